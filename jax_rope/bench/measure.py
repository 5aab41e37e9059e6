"""Measures one workload, as a child that prints JSON lines: ``python -m jax_rope.bench.measure WORKLOAD``."""

import argparse
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np

from . import workloads
from .accuracy import largest_error
from .children import say
from .entry import CannotError, Entry
from .participants import PARTICIPANTS
from .workloads import Workload

DIRECTIONS = ("forward", "forward and backward")


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    rounds: int,
    calls: int = 1,
    heard: Callable[[int], None] = lambda done: None,
) -> dict[str, list[float]]:
    """Seconds of each, ``calls`` in a row in each of ``rounds`` rounds, in which all take turns: noise hits all alike.

    A turn begins with a call that does not count: cores that rested during somebody else's turn compute at up to a
    third of their speed at first.

    Args:
      heard: called with the number of rounds that are done.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs.items())
    for done in range(1, rounds + 1):
        for name, run in order:
            run()
            for _ in range(calls):
                start = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - start)
        order.append(order.pop(0))  # nobody always follows the same one
        heard(done)
    return times


def calls_in_a_row(workload: Workload) -> int:
    """Small arrays take microseconds: one call after other participants' would measure cold caches."""
    return 20 if workload.nbytes < workloads.MiB else 1


def measure(name: str, direction: str, participants: list[str], rounds: int) -> None:
    """Says what the participants of a workload take, and how wrong they are."""
    workload = workloads.ALL[name]
    case = workloads.case(workload, backward=direction != "forward")
    entries: dict[str, Entry] = {}
    errors: dict[str, float | None] = {}
    for participant in participants:
        try:
            entry = PARTICIPANTS[participant].prepare(case)
            errors[participant] = None if entry.results is None else largest_error(case, entry.results())
            entries[participant] = entry
        except CannotError as error:
            say("absent", direction=direction, participant=participant, reason=str(error))
        except Exception as error:
            say("failed", direction=direction, participant=participant, reason=f"{type(error).__name__}: {error}")
        say("progress", direction=direction, done=0, of=rounds)  # a sign of life

    def heard(done: int) -> None:
        say("progress", direction=direction, done=done, of=rounds)

    runs = {participant: entry.run for participant, entry in entries.items()}
    for participant, seconds in interleaved(runs, rounds, calls_in_a_row(workload), heard).items():
        milliseconds = [round(1e3 * s, 5) for s in seconds]
        say(
            "result",
            direction=direction,
            participant=participant,
            kind=PARTICIPANTS[participant].kind,
            floor=PARTICIPANTS[participant].floor,
            median_ms=float(np.median(milliseconds)),
            min_ms=min(milliseconds),
            rounds=rounds,
            times_ms=milliseconds,
            error=errors[participant],
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_rope.bench.measure")
    parser.add_argument("workload", choices=workloads.ALL)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--direction", choices=DIRECTIONS, default=DIRECTIONS[0])
    parser.add_argument("--participants", nargs="+", choices=PARTICIPANTS, default=list(PARTICIPANTS))
    arguments = parser.parse_args(argv)
    measure(arguments.workload, arguments.direction, arguments.participants, arguments.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
