"""What a participant brings: something to time, and its results."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .workloads import Case


class CannotError(Exception):
    """Why a participant does not take part in a case."""


class Entry(NamedTuple):
    """A participant that is ready for one case.

    Attributes:
      run: does the work once and waits for it.
      results: of one run: the rotated xs, then the gradients, of the xs' shapes and dtype. None for a floor.
    """

    run: Callable[[], object]
    results: Callable[[], Sequence[np.ndarray]] | None


class Participant(NamedTuple):
    """Somebody who takes part.

    Attributes:
      kind: ``"ours"``, ``"part"`` of ours, ``"floor"`` or ``"peer"``.
      prepare: makes it ready, or raises `CannotError`.
      floor: the name of what it cannot be faster than.
    """

    name: str
    kind: str
    prepare: Callable[[Case], Entry]
    floor: str | None = None


def jitted(case: Case, rotate: Callable[..., Any], *operands: object) -> Entry:
    """A compiled ``rotate(xs, *operands)``, with its gradient where the case has cotangents."""

    def there_and_back(xs, cotangents, *operands):
        ys, vjp = jax.vjp(lambda xs: rotate(xs, *operands), xs)
        return *ys, *vjp(cotangents)[0]

    if case.cotangents is None:
        compiled, arguments = jax.jit(rotate), (case.xs, *operands)
    else:
        compiled, arguments = jax.jit(there_and_back), (case.xs, case.cotangents, *operands)

    def run():
        return jax.block_until_ready(compiled(*arguments))

    return Entry(run, lambda: [np.asarray(y) for y in run()])
