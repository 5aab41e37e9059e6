"""What is rotated, and how fast."""

import functools
import math
import numbers
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np

from .phase import DIGITS, pair_table

PAIRINGS = ("interleaved", "half")


@dataclass(frozen=True)
class Rotary:
    """Which elements of a head are paired, and how fast each pair turns. Immutable and hashable: static under ``jit``.

    Pair i of n = rotary_dim / 2 turns by ``theta ** (-i / n)`` radians per position (Su et al., "RoFormer",
    arXiv:2104.09864, section 3.2.2).

    Attributes:
      theta: the base, a finite number above 0.
      pairing: ``"interleaved"`` pairs elements (2i, 2i + 1) of the window (RoFormer, LLaMA as published, GPT-J, GGUF);
        ``"half"`` pairs (i, i + rotary_dim / 2) (GPT-NeoX, Hugging Face).
      rotary_dim: how many elements of each head are rotated, even; ``None`` is all from ``start`` on.
      start: the first of them. What lies outside the window passes through bit for bit.

    Raises:
      TypeError, ValueError: for a field that is of no such form.
    """

    theta: float = 10_000.0
    pairing: str = "interleaved"
    rotary_dim: int | None = None
    start: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.theta, numbers.Real) or isinstance(self.theta, bool):
            raise TypeError(f"theta must be a number known while tracing, got {type(self.theta).__name__}")
        if not (math.isfinite(self.theta) and self.theta > 0):
            raise ValueError(f"theta must be a finite number above 0, got {self.theta}")
        object.__setattr__(self, "theta", float(self.theta))
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing must be one of {', '.join(map(repr, PAIRINGS))}, got {self.pairing!r}")
        if self.rotary_dim is not None:
            object.__setattr__(self, "rotary_dim", _integer("rotary_dim", self.rotary_dim))
            if self.rotary_dim <= 0 or self.rotary_dim % 2:
                raise ValueError(f"rotary_dim must be even and above 0, got {self.rotary_dim}")
        object.__setattr__(self, "start", _integer("start", self.start))
        if self.start < 0:
            raise ValueError(f"start must not be negative, got {self.start}")

    def window(self, head_dim: int) -> int:
        """How many elements of a head are rotated.

        Raises:
          ValueError: the window does not fit into ``head_dim``, or what it leaves is odd.
        """
        if self.rotary_dim is None:
            width = head_dim - self.start
            if width <= 0 or width % 2:
                raise ValueError(
                    f"rotary_dim is all of the head from start on, which must be even and above 0, "
                    f"got head_dim {head_dim} with start {self.start}"
                )
            return width
        if self.start + self.rotary_dim > head_dim:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} from start {self.start} on does not fit into head_dim {head_dim}"
            )
        return self.rotary_dim

    def inv_freq(self, head_dim: int) -> np.ndarray:
        """The frequencies in radians per position, float64 [rotary_dim / 2]."""
        return np.array([float(omega) for omega in _frequencies(self.theta, self.window(head_dim))])

    def table(self, head_dim: int) -> np.ndarray:
        """The frequencies as the implementations take them: see `jax_rope.phase.pair_table`."""
        return _table(self.theta, self.window(head_dim))


def _integer(name: str, value: object) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer known while tracing, got {value!r}")
    return int(value)


@functools.lru_cache(maxsize=64)
def _frequencies(theta: float, rotary_dim: int) -> tuple[Decimal, ...]:
    # float64 is not enough: its rounding of omega shows as 1e-7 radians at 2**31 positions.
    with localcontext() as context:
        context.prec = DIGITS
        log_theta = Decimal(theta).ln()
        return tuple((log_theta * (-2 * i) / rotary_dim).exp() for i in range(rotary_dim // 2))


@functools.lru_cache(maxsize=64)
def _table(theta: float, rotary_dim: int) -> np.ndarray:
    frequencies = _frequencies(theta, rotary_dim)
    table = pair_table(frequencies, 1.0, [0] * len(frequencies))
    table.setflags(write=False)
    return table
