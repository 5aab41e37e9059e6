"""Whether an adapter rotates rightly at all: a few tiny rotations, for the first use of it.

A driver's compiler may be wrong where its description gives no hint. What is compared with here is computed from
Python's integers and `math`. ``python -m jax_rope check`` is the whole examination.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..layout import Layout
from .call import By, ByAngles, Call

if TYPE_CHECKING:
    from .rotator import Rotator

# A near position, both ends of int32, and two whose products with a frequency carry from word to word.
POSITIONS = (1, -1, 2**31 - 1, -(2**31), 123_456_789)
# Fractions of a turn per position, in units of 2**-64: those of a head of 8 elements and theta = 10000.
TURNS = (0x28BE60DB9391054A, 0x041309AF8EC1B3BA, 0x00684DC4C179C52C, 0x000A6E2D468C2D51)
AMPLITUDES = (1.0, 0.75, 1.0, 1.25)  # or all of them the last
HEADS = (9, 1)  # of queries and keys: more than one thread takes
HEAD_DIM, START = 16, 4


class _Run(NamedTuple):
    dtype: type
    interleaved: bool
    direction: int
    plain: bool  # all amplitudes alike, for which there are pipelines of their own

    @property
    def amplitudes(self) -> Sequence[float]:
        return AMPLITUDES[-1:] * len(AMPLITUDES) if self.plain else AMPLITUDES

    def __str__(self) -> str:
        pairs = "interleaved" if self.interleaved else "half"
        return f"{np.dtype(self.dtype).name}, {pairs} pairs, {'forward' if self.direction > 0 else 'backward'}"


# Each value of each field meets each of another: four pipelines instead of eight.
RUNS = (
    _Run(np.float32, True, 1, plain=True),
    _Run(np.float32, False, -1, plain=False),
    _Run(np.float16, True, -1, plain=False),
    _Run(np.float16, False, 1, plain=True),
)


def fault(rotator: "Rotator") -> str | None:
    """What is wrong with a rotator's results, in one sentence; None if nothing is.

    What it raises counts as wrong too. A few milliseconds, and as many more as making four pipelines takes.
    """
    for run in RUNS:
        try:
            wrong = _wrong(rotator, run)
        except Exception as error:
            wrong = " ".join(f"{type(error).__name__}: {error}".split())
        if wrong:
            return f"{rotator.device.adapter} fails its first rotations ({run}): {wrong}"
    return None


def rotate_on(rotator: "Rotator", layout: Layout, xs: Sequence[np.ndarray], by: By) -> tuple[np.ndarray, ...]:
    """`jax_rope.webgpu.offload.rotate` on a rotator of the caller's."""
    results = [np.empty(x.shape, x.dtype) for x in xs]
    call = Call(layout, xs, by, results)
    rotator.run(call)
    call.finish()
    return tuple(results)


def _wrong(rotator: "Rotator", run: _Run) -> str | None:
    layout = Layout(run.interleaved, START, len(TURNS), True, run.direction)
    shapes = [(len(POSITIONS), heads, HEAD_DIM) for heads in HEADS]
    # Eighths up to 6: exact in 16 bits.
    xs: list[np.ndarray] = [((np.arange(math.prod(s)) * 37 % 97 - 48) / 8).reshape(s).astype(run.dtype) for s in shapes]
    table = np.array([(f >> 32, f & 0xFFFFFFFF, 0, 0) for f in TURNS], np.uint32)
    table[:, 3] = np.array(run.amplitudes, np.float32).view(np.uint32)
    by = ByAngles(layout, xs[0].shape, np.array([POSITIONS], np.int32), table, None)
    for x, y in zip(xs, rotate_on(rotator, layout, xs, by), strict=True):
        exact = _exact(layout, run.amplitudes, x.astype(np.float64))
        # 4 units of 2**-24 of a pair's norm, and one in the last place of a float16.
        tolerance = 4 * 2.0**-24 * 6 * math.sqrt(2) * max(AMPLITUDES) * np.ones(exact.shape)
        if run.dtype == np.float16:
            tolerance += 2.0**-10 * np.abs(exact)
        tolerance[..., :START] = tolerance[..., START + 2 * len(TURNS) :] = 0
        bad = ~(np.abs(y.astype(np.float64) - exact) <= tolerance)
        if bad.any():
            token, head, i = at = tuple(np.argwhere(bad)[0])
            place = f"position {POSITIONS[token]}, head {head} of {x.shape[1]}, element {i} of {HEAD_DIM}"
            return f"{place} is {float(y[at]):.9g} instead of {exact[at]:.9g}"
    return None


def _exact(layout: Layout, amplitudes: Sequence[float], x: np.ndarray) -> np.ndarray:
    y = x.copy()
    for token, position in enumerate(POSITIONS):
        for i, (turns, amplitude) in enumerate(zip(TURNS, amplitudes, strict=True)):
            phase = (position * turns + 2**63) % 2**64 - 2**63
            angle = layout.direction * 2 * math.pi * math.ldexp(phase, -64)
            c, s = amplitude * math.cos(angle), amplitude * math.sin(angle)
            first = START + (2 * i if layout.interleaved else i)
            second = first + (1 if layout.interleaved else layout.pairs)
            a, b = x[token, :, first], x[token, :, second]
            y[token, :, first], y[token, :, second] = c * a - s * b, s * a + c * b
    return y
