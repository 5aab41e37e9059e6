"""What the cases share: rotations on an adapter without XLA, compared with the reference."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import ml_dtypes
import numpy as np

from .. import reference
from ..arguments import canonical
from ..reference import Comparison
from ..rotary import Rotary
from ..webgpu import device as devices, offload, selftest
from ..webgpu.call import ByAngles

DTYPES: dict[str, type] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
PAIRINGS = ("interleaved", "half")
FAR = (0, 1, 4095, 131_071, 10_000_000, 2**31 - 1, -1, -(2**31))


class Target(NamedTuple):
    """An adapter: the ``number``-th of those that the name matches."""

    name: str | None
    number: int


# What is tried, and what returns the worst of its comparisons or raises.
Cases = Iterator[tuple[str, Callable[[], Comparison]]]


def worst(comparisons: Iterable[Comparison]) -> Comparison:
    """One for all."""
    units, steps, holds = zip(*comparisons, strict=True)
    counted = [step for step in steps if step is not None]
    return Comparison(max(units), max(counted, default=None), all(holds))


def exactly(y: np.ndarray, x: np.ndarray) -> Comparison:
    """Whether a result is x bit for bit."""
    same = (y.dtype, y.shape, y.tobytes()) == (x.dtype, x.shape, x.tobytes())
    return Comparison(0.0 if same else np.inf, None, same)


def draw(shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Normally distributed, of very different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-5, 5, shape)).astype(DTYPES[dtype])


class Host:
    """Rotations on rotators of one's own, which no call of the program's uses."""

    def __init__(self, target: Target):
        self._target = target
        self.made = functools.cache(self._made)
        self.rotator = self.made()

    def _made(self, binding: int | None = None, workgroups: int | None = None, mapped: bool | None = None):
        """A rotator, which may believe in tighter limits than its adapter has."""
        device = devices.Device(*self._target)
        if binding is not None:
            device.limits["max-storage-buffer-binding-size"] = binding
        if workgroups is not None:
            device.limits["max-compute-workgroups-per-dimension"] = workgroups
        if mapped is not None:
            device.mapped = mapped and device.mapped
        return offload.Rotator(device)

    def rotate(self, xs, positions, rotary, transpose=False, rotator=None, **options) -> tuple[np.ndarray, ...]:
        """The rotated xs, or the gradient's rotation of them."""
        named = dict(zip("qk", xs, strict=False))
        arguments = {"seq_axis": -3, "seq_len": None, "inverse": False, **options}
        layout, _, angles, _ = canonical(named, positions, rotary, **arguments)
        layout = layout.transpose() if transpose else layout
        fractions = None if angles.fractions is None else np.asarray(angles.fractions)
        by = ByAngles(layout, xs[0].shape, np.asarray(angles.positions), np.asarray(angles.table), fractions)
        return selftest.rotate_on(rotator or self.rotator, layout, xs, by)

    def compared(self, xs, positions=None, rotary: Rotary = Rotary(), rotator=None, **options) -> Comparison:
        """Forward and gradient, against the reference."""
        found = []
        for transpose in (False, True):
            ys = self.rotate(xs, positions, rotary, transpose, rotator, **options)
            for x, y in zip(xs, ys, strict=True):
                exact = reference.rotate(x, positions, rotary, transpose=transpose, **options)
                way = {"inverse": options.get("inverse", False), "transpose": transpose}
                found.append(reference.compare(y, exact, x, rotary, **way))
        return worst(found)
