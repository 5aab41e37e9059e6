"""The right values, slowly: exact angles in Python's integers, float64 from there on, NumPy only.

Nothing here is shared with what it is a reference for: `jax_rope.phase` and the kernels count turns in 64 bits, this
in `BITS`; they evaluate polynomials in float32, this calls NumPy's float64 cosine and sine. Tests and
``python -m jax_rope check`` compare with it.

The accuracy contract: float32 within `UNITS` units of 2**-24 of the pair's norm; 16-bit floats within one unit in the
last place of the exactly rounded result, or within the float32 bound; elements outside the window bit for bit. It is
for pairs whose norm is above `SMALLEST`, as adapters may flush subnormal numbers.
"""

import functools
from decimal import Decimal, localcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .rotary import Rotary

BITS = 192  # of a turn's fraction
DIGITS = 80
UNITS = 4.0
SMALLEST = 2.0**-100

Floats = NDArray[np.float64]
Indices = tuple[np.ndarray, np.ndarray]


def rotate(
    x: ArrayLike,
    positions: ArrayLike | None = None,
    rotary: Rotary = Rotary(),
    *,
    seq_axis: int = -3,
    seq_len: ArrayLike | None = None,
    inverse: bool = False,
    transpose: bool = False,
) -> Floats:
    """What `jax_rope.rope` should return, before it is rounded to x's dtype.

    Args:
      x: floats of any kind, ``[..., S, H, D]``, or ``[..., H, S, D]`` with ``seq_axis=-2``.
      positions: as in `jax_rope.rope`, but integers of any size; floats are taken exactly.
      rotary: as in `jax_rope.rope`; ``freqs`` must be numbers.
      seq_axis: -3 or -2.
      seq_len: as in `jax_rope.rope`.
      inverse: as in `jax_rope.rope`.
      transpose: the transposed map instead, which is the gradient's.

    Returns:
      float64 of x's shape.

    Raises:
      ValueError, OverflowError: positions that are not finite.
    """
    x = _doubles(np.asarray(x))
    batch, length, head_dim = x.shape[:-3], x.shape[seq_axis], x.shape[-1]
    streams = _streams(positions, batch, length, rotary)
    cos, sin = _cos_sin(streams, rotary, head_dim, _lengths(seq_len, streams, batch), batch, inverse)
    if inverse != transpose:
        sin = -sin
    cos, sin = (np.expand_dims(table, -2 if seq_axis == -3 else -3) for table in (cos, sin))
    read, written = pairs(rotary, head_dim, inverse=inverse, transpose=transpose)
    a, b = x[..., read[0]], x[..., read[1]]
    y = x.copy()
    identity = (cos == 1) & (sin == 0)  # where infinity times 0 must not be computed
    with np.errstate(invalid="ignore"):
        y[..., written[0]] = np.where(identity, a, cos * a - sin * b)
        y[..., written[1]] = np.where(identity, b, sin * a + cos * b)
    return y


def pairs(rotary: Rotary, head_dim: int, *, inverse: bool = False, transpose: bool = False) -> tuple[Indices, Indices]:
    """Where a head's pairs are read and where they are written.

    Args:
      rotary: as in `rotate`.
      head_dim: of the heads.
      inverse: as in `rotate`.
      transpose: as in `rotate`.

    Returns:
      Twice the indices (of first elements, of second elements).

    Raises:
      TypeError, ValueError: as `Rotary.window`.
    """
    count = rotary.window(head_dim) // 2
    i = np.arange(count)
    adjacent = rotary.start + 2 * i, rotary.start + 2 * i + 1
    halves = rotary.start + i, rotary.start + i + count
    read = halves if rotary.pairing == "half" else adjacent
    written = adjacent if rotary.pairing == "interleaved" else halves
    return (read, written) if inverse == transpose else (written, read)


class Comparison(NamedTuple):
    """How far a result is from the exact one.

    Attributes:
      units: the largest error of a pair, in units of 2**-24 of its norm.
      steps: 16-bit: the most units in the last place of an element that the float32 bound does not excuse; else None.
      holds: whether the accuracy contract does.
    """

    units: float
    steps: int | None
    holds: bool


def compare(
    y: ArrayLike,
    exact: Floats,
    x: ArrayLike,
    rotary: Rotary = Rotary(),
    *,
    inverse: bool = False,
    transpose: bool = False,
) -> Comparison:
    """Compares a rotation of x with the exact one.

    A pair that has no exact result, for it began with NaN or infinity, must have none in y either. Where it does, where
    an element outside the window is not x's bit for bit, and where y's dtype or shape is not x's, ``units`` is
    infinite.

    Args:
      y: the rotated x.
      exact: what `rotate` returns for it.
      x: what was rotated.
      rotary: as in `rotate`.
      inverse: as in `rotate`.
      transpose: as in `rotate`.

    Returns:
      The largest errors, and whether they are within the contract.

    Raises:
      TypeError, ValueError: as `Rotary.window`.
    """
    y, x = np.asarray(y), np.asarray(x)
    if y.dtype != x.dtype or y.shape != x.shape:
        return Comparison(np.inf, None, False)
    _, (first, second) = pairs(rotary, x.shape[-1], inverse=inverse, transpose=transpose)
    outside = np.setdiff1d(np.arange(x.shape[-1]), np.concatenate((first, second)))
    passed_through = y[..., outside].tobytes() == x[..., outside].tobytes()
    right = np.stack((exact[..., first], exact[..., second]))
    mine = np.stack((y[..., first], y[..., second]))
    finite = np.isfinite(right).all(0)
    alike = np.isfinite(_doubles(mine)) == np.isfinite(_doubles(_rounded(right, y.dtype)))
    with np.errstate(invalid="ignore"):
        error = np.abs(_doubles(mine) - right)
        norm = np.hypot(*right)
        counted = finite & (norm > SMALLEST)
        relative = np.nan_to_num(np.hypot(*error)[counted] / norm[counted] * 2.0**24, nan=np.inf)
    lost = not (alike[:, ~finite].all() and passed_through)
    units = np.inf if lost else float(np.max(relative, initial=0.0))
    if y.dtype.itemsize != 2:
        return Comparison(units, None, units <= UNITS)
    apart = np.abs(_ordered(mine) - _ordered(_rounded(right, y.dtype)))
    apart = np.where(error <= UNITS * 2.0**-24 * norm, 0, apart)[:, counted]
    steps = int(np.max(apart, initial=0))
    return Comparison(units, steps, steps <= 1 and not lost)


def error(y: ArrayLike, exact: Floats, x: ArrayLike, rotary: Rotary = Rotary(), **way: bool) -> float:
    """The largest error of any pair.

    Args:
      y: as in `compare`.
      exact: as in `compare`.
      x: as in `compare`.
      rotary: as in `compare`.
      **way: ``inverse`` and ``transpose``, as in `compare`.

    Returns:
      `compare`'s ``units``: the error in units of 2**-24 of the pair's norm.

    Raises:
      TypeError, ValueError: as `Rotary.window`.
    """
    return compare(y, exact, x, rotary, **way).units


def steps(y: ArrayLike, exact: Floats) -> int:
    """The largest distance of 16-bit floats from the exactly rounded result.

    Args:
      y: float16 or bfloat16.
      exact: what `rotate` returns for it.

    Returns:
      The distance, in units in the last place.
    """
    y = np.asarray(y)
    return int(np.max(np.abs(_ordered(y) - _ordered(_rounded(exact, y.dtype))), initial=0))


def _doubles(values: np.ndarray) -> Floats:
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return values.astype(np.float64)


def _rounded(exact: Floats, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return exact.astype(dtype)


def _ordered(values: np.ndarray) -> np.ndarray:
    """16-bit floats as integers that count them in order."""
    bits = np.ascontiguousarray(values).view(np.int16).astype(np.int32)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)


def _streams(positions: ArrayLike | None, batch: tuple[int, ...], length: int, rotary: Rotary) -> np.ndarray:
    """Python numbers [streams, ..., S]; leading axes as the positions have them, or as many as the batch has."""
    array = np.asarray(0 if positions is None else positions).astype(object)
    if array.ndim == 0:
        array = np.tile(array + np.arange(length).astype(object), (rotary.streams, 1))
    elif rotary.sections is None:
        array = array[None]
    lead = (1,) * (len(batch) + 2 - array.ndim)
    return array.reshape(array.shape[0], *lead, *array.shape[1:])


def _lengths(seq_len: ArrayLike | None, streams: np.ndarray, batch: tuple[int, ...]) -> np.ndarray:
    """The length of each row, with leading axes that broadcast to the batch."""
    if seq_len is None:
        return np.floor(np.asarray(streams.max(axis=(0, -1), initial=-1), np.float64)).astype(np.int64) + 1
    lengths = np.asarray(seq_len, np.int64)
    return lengths.reshape((1,) * (len(batch) - lengths.ndim) + lengths.shape)


def _cos_sin(streams, rotary: Rotary, head_dim: int, lengths, batch, inverse: bool) -> tuple[Floats, Floats]:
    """[..., S, pairs] each, attention factor included."""
    if not rotary.depends_on_length:
        return _one_length(streams, rotary, head_dim, None, inverse)
    lead = np.broadcast_shapes(lengths.shape, streams.shape[1:-1])
    streams = np.broadcast_to(streams, (streams.shape[0], *lead, streams.shape[-1]))
    tables = np.empty((2, *lead, streams.shape[-1], rotary.window(head_dim) // 2))
    for row, length in zip(np.ndindex(lead), np.broadcast_to(lengths, lead).ravel(), strict=True):
        tables[(slice(None), *row)] = _one_length(streams[(slice(None), *row)], rotary, head_dim, int(length), inverse)
    return tables[0], tables[1]


def _one_length(streams, rotary: Rotary, head_dim: int, length: int | None, inverse: bool) -> tuple[Floats, Floats]:
    turns = _turns(rotary, rotary.window(head_dim), length)
    followed = np.zeros(len(turns), int) if rotary.sections is None else np.array(rotary.pair_streams())
    amplitude = rotary.attention_factor(length)
    amplitude = 1 / amplitude if inverse else amplitude
    angles = np.empty((*streams.shape[1:], len(turns)))
    for stream, positions in enumerate(streams):
        mine = followed == stream
        different, where = np.unique(positions.ravel(), return_inverse=True)
        angles[..., mine] = _angles(different, turns[mine])[where].reshape(*positions.shape, mine.sum())
    return amplitude * np.cos(angles), amplitude * np.sin(angles)


def _angles(positions: np.ndarray, turns: np.ndarray) -> Floats:
    """Radians from -pi to pi, [positions, pairs], of Python numbers and of turns in units of 2**-BITS."""
    ratios = [position.as_integer_ratio() for position in positions]
    numerators = np.array([n for n, _ in ratios] + [None], object)[:-1]
    shifts = np.array([d.bit_length() - 1 for _, d in ratios] + [None], object)[:-1]  # all denominators are powers of 2
    phase = np.multiply.outer(numerators, turns) >> shifts[:, None]
    top = phase >> (BITS - 64) & (1 << 64) - 1
    return top.astype(np.uint64).view(np.int64).astype(np.float64) * (2 * np.pi * 2.0**-64)


@functools.lru_cache(maxsize=64)
def _turns(rotary: Rotary, width: int, length: int | None) -> np.ndarray:
    """Turns per position of each pair, Python integers in units of 2**-BITS."""
    with localcontext() as context:
        context.prec = DIGITS
        per_turn = Decimal(1 << BITS) / (2 * _pi())
        return np.array([int(omega * per_turn) for omega in _frequencies(rotary, width, length)] + [None], object)[:-1]


def _frequencies(rotary: Rotary, width: int, length: int | None) -> list[Decimal]:
    """Radians per position."""
    if rotary.freqs is not None:
        return [Decimal(omega) for omega in rotary.freqs]
    theta = Decimal(rotary.theta)
    widths = [width]
    if rotary.sections is not None and rotary.section_layout == "axial":
        widths = [2 * count for count in rotary.sections]
    if rotary.scaling is not None:
        return [omega for w in widths for omega in rotary.scaling.frequencies(theta, w, length)]
    return [theta ** (Decimal(-2 * i) / w) for w in widths for i in range(w // 2)]


@functools.cache
def _pi() -> Decimal:
    """By Machin's formula, 16 arctan(1/5) - 4 arctan(1/239), in integers."""
    one = 10 ** (DIGITS + 10)

    def arctan_of_inverse(n: int) -> int:
        total, power, k = 0, one // n, 1
        while power:
            total += power // k if k % 4 == 1 else -(power // k)
            power, k = power // (n * n), k + 2
        return total

    with localcontext() as context:
        context.prec = DIGITS
        return Decimal(16 * arctan_of_inverse(5) - 4 * arctan_of_inverse(239)) / one
