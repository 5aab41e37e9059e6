"""How wrong the participants are. As a child, ``python -m jax_rope.bench.accuracy``: at positions up to 2^31 - 1."""

import sys
from collections.abc import Sequence

import numpy as np

from .. import reference
from . import workloads
from .children import say
from .entry import CannotError
from .participants import PARTICIPANTS, SHOWN_BY_POSITION
from .workloads import Case


def largest_error(case: Case, results: Sequence[np.ndarray]) -> float:
    """Of the first and the last token and some between, in units of 2**-24 of the pair's norm."""
    tokens = np.unique(np.linspace(0, case.workload.tokens - 1, 9).astype(int))
    return error_at(case, results, tokens)


def error_at(case: Case, results: Sequence[np.ndarray], tokens: np.ndarray) -> float:
    """The largest error of any pair of these tokens in the rotated xs and their gradients."""
    rotary, positions = case.workload.rotary, case.workload.position_of_tokens()[tokens]
    errors = []
    count = len(case.xs)
    for i, (before, after) in enumerate(zip((x for xs in case.passes for x in xs), results, strict=True)):
        x, y = np.asarray(before)[:, tokens], np.asarray(after)[:, tokens]
        exact = reference.rotate(x, positions, rotary, transpose=i >= count)
        errors.append(reference.error(y, exact, x, rotary, transpose=i >= count))
    worst = max(errors)
    if not np.isfinite(worst):
        raise ValueError("the result is of another shape or dtype than x, or not finite")
    return worst


def by_position(name: str) -> list[tuple[int, float]]:
    """(position, error) of a participant, as far as it goes.

    Raises:
      CannotError: it takes no part.
    """
    prepare = PARTICIPANTS[name].prepare
    try:
        case = workloads.case(workloads.POSITIONS["positions"], backward=False)
        results, tokens = prepare(case).results, np.arange(case.workload.tokens, dtype=np.int32)
    except CannotError:  # to take positions of the caller's
        case = workloads.case(workloads.POSITIONS["positions-from-0"], backward=False)
        results = prepare(case).results
        tokens = workloads.FAR[: np.searchsorted(workloads.FAR, case.workload.tokens)]
    assert results is not None, "a floor has no results"
    found = results()
    positions = case.workload.position_of_tokens()
    return [(int(positions[t]), error_at(case, found, np.array([t]))) for t in tokens]


def main() -> int:
    for done, name in enumerate(SHOWN_BY_POSITION, 1):
        try:
            points = by_position(name)
            say("positions", participant=name, points=points)
        except CannotError as error:
            say("absent", participant=name, reason=str(error))
        except Exception as error:
            say("failed", participant=name, reason=f"{type(error).__name__}: {error}")
        say("progress", done=done, of=len(SHOWN_BY_POSITION))
    return 0


if __name__ == "__main__":
    sys.exit(main())
