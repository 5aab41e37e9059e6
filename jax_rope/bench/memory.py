"""Time and memory of one large call, as a child: ``python -m jax_rope.bench.memory WORKLOAD``."""

import argparse
import sys

import numpy as np

from . import workloads
from .children import say
from .entry import CannotError
from .measure import interleaved
from .participants import LARGE, PARTICIPANTS


def peak() -> int | None:
    """The most bytes that the process has had in memory; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(name: str, rounds: int) -> None:
    workload = workloads.ALL[name]
    prepare = PARTICIPANTS[LARGE].prepare
    prepare(workloads.case(workloads.SIZES[workloads.SMALLEST], backward=False)).run()  # loads what every size needs
    case = workloads.case(workload, backward=False)
    before = peak()
    entry = prepare(case)
    seconds = interleaved({LARGE: entry.run}, rounds, heard=lambda done: say("progress", done=done, of=rounds))[LARGE]
    after = peak()
    median = float(np.median(seconds))
    extra = None if before is None or after is None else after - before - workload.nbytes
    say(
        "large",
        participant=LARGE,
        nbytes=workload.nbytes,
        median_ms=1e3 * median,
        ns_per_byte=1e9 * median / workload.nbytes,
        extra_bytes=extra,  # beyond x and the result
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jax_rope.bench.memory")
    parser.add_argument("workload", choices=workloads.LARGE)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    try:
        measure(arguments.workload, arguments.rounds)
    except CannotError as error:
        say("absent", participant=LARGE, reason=str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
