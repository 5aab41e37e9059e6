"""Angles counted in turns, exactly.

A pair that turns by omega radians per position turns by ``omega / 2 pi`` turns, and only the fraction of a
turn matters. It is kept as a 64-bit fixed-point number F, so that the phase of an integer position p is
``p * F mod 2**64``: integer multiplications whose wrap-around reduces the angle for free. The top 32 bits
are exact to 2**-32 turn at every int32 position. Sine and cosine follow from a reduction to the nearest
quarter turn, in integers, and a polynomial.
"""

import functools
import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

DIGITS = 60
TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164194988918461563281257241799725607")
STREAM_BITS = 8

# Minimax polynomials in t**2 on |t| <= 1/8 turn, coefficients rounded to float32 one after the other, each
# refitted to the rounding of those before it: sin(2 pi t) / t and (cos(2 pi t) - 1) / t**2.
SINE = (6.2831855, -41.341747, 81.60228, -75.72509)
COSINE = (-19.739208, 64.93914, -85.423134, 58.564697)

Operand = jax.Array | np.ndarray


class Angles(NamedTuple):
    """What decides by which angle each pair of each token turns: the operands every implementation takes.

    The leading axes are those of x before its sequence, head and head_dim axes; each is x's size or 1.
    """

    positions: Operand  # int32 [..., streams, S], or [..., streams, 1]: a row's first position
    table: Operand  # uint32 [..., pairs, 4], from `pair_table` or `traced_pair_table`
    fractions: Operand | None = None  # floats like positions, added to them; NaN for what is no position
    frequencies: Operand | None = None  # floats [..., pairs] that the table was made of, for their gradient


def pair_table(frequencies: Sequence[Decimal], amplitude: float, streams: Sequence[int]) -> np.ndarray:
    """One row a pair, uint32 [pairs, 4].

    Columns: the turn fraction's high and low word; ``whole turns << 8 | position stream``; the factor on
    cosine and sine, as the bits of a float32. ``frequencies`` are in radians per position. Whole turns only
    matter to positions that are not whole.
    """
    table = np.empty((len(frequencies), 4), np.uint32)
    limit = 1 << (31 - STREAM_BITS)
    with localcontext() as context:
        context.prec = DIGITS
        for i, (omega, stream) in enumerate(zip(frequencies, streams, strict=True)):
            turns = int((omega / TWO_PI * 2**64).to_integral_value())
            whole, fraction = divmod(turns, 2**64)
            if not -limit <= whole < limit:
                raise ValueError(
                    f"frequencies must be below {2 * math.pi * limit:.3g} radians per position in size, "
                    f"got {float(omega):g}"
                )
            packed = whole << STREAM_BITS | stream
            table[i, :3] = fraction >> 32, fraction & 0xFFFFFFFF, packed & 0xFFFFFFFF
    table[:, 3] = np.float32(amplitude).view(np.uint32)
    return table


# 2**128 / (2 pi) in 32-bit words, the lowest first.
_INVERSE_TWO_PI = tuple(int(Decimal(2) ** 128 / TWO_PI) >> 32 * word & 0xFFFFFFFF for word in range(4))


def traced_pair_table(frequencies: jax.Array, streams: Sequence[int]) -> jax.Array:
    """`pair_table` of a float32 or float64 array [pairs] that may be traced, exact as well, with amplitude 1.

    A frequency that is not finite, or beyond the limit there, gives NaN.
    """
    single = frequencies.astype(jnp.float32)
    low, high, whole = _turns(single)
    if frequencies.dtype == jnp.float64:
        rest = _turns((frequencies - single.astype(jnp.float64)).astype(jnp.float32))
        low, carry = _add(low, rest[0], jnp.uint32(0))
        high, carry = _add(high, rest[1], carry)
        whole, _ = _add(whole, rest[2], carry)
    fits = jnp.abs(single) < 2 * math.pi * (1 << 31 - STREAM_BITS)
    amplitude = jax.lax.bitcast_convert_type(jnp.where(fits, jnp.float32(1), jnp.float32(math.nan)), jnp.uint32)
    return jnp.stack((high, low, whole << STREAM_BITS | jnp.asarray(streams, jnp.uint32), amplitude), axis=-1)


def _turns(frequencies: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Radians, float32, in units of 2**-64 turn: a two's complement number of three uint32 words, the lowest first."""
    bits = jax.lax.bitcast_convert_type(frequencies, jnp.uint32)
    exponent = (bits >> 23 & 0xFF).astype(jnp.int32)
    mantissa = jnp.where(exponent > 0, bits & 0x7FFFFF | 0x800000, 0)
    # mantissa * 2**128 / (2 pi), in five words, of which the result begins at a bit that the exponent decides.
    words, carry = [], jnp.zeros_like(bits)
    for word in map(jnp.uint32, _INVERSE_TWO_PI):
        total, overflow = _add(mantissa * word, carry, jnp.uint32(0))
        words.append(total)
        carry = multiply_high(mantissa, word) + overflow
    shift = jnp.clip(214 - exponent, 0, 160)
    stacked = jnp.stack([*words, carry, *[jnp.zeros_like(bits)] * 5], axis=-1)

    def word_at(index: int) -> jax.Array:
        at = (shift >> 5) + index
        lower, upper = (jnp.take_along_axis(stacked, (at + i)[..., None], axis=-1)[..., 0] for i in range(2))
        by = (shift & 31).astype(jnp.uint32)
        return lower >> by | jnp.where(by > 0, upper << (32 - by & 31), 0)

    low, high, whole = word_at(0), word_at(1), word_at(2)
    negative = frequencies < 0
    flipped_low, carry = _add(~low, jnp.ones_like(low), jnp.uint32(0))
    flipped_high, carry = _add(~high, jnp.zeros_like(high), carry)
    flipped_whole = ~whole + carry
    return (
        jnp.where(negative, flipped_low, low),
        jnp.where(negative, flipped_high, high),
        jnp.where(negative, flipped_whole, whole),
    )


def _add(a: jax.Array, b: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum of uint32 words and a carry of 0 or 1, and its own carry."""
    partial = a + b
    total = partial + carry
    return total, ((partial < a) | (total < partial)).astype(jnp.uint32)


def arithmetic(dtype: jnp.dtype) -> jnp.dtype:
    """What elements of a dtype are rotated in: float32, and float64 for float64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def multiply_high(a: jax.Array, b: Operand) -> jax.Array:
    """The high words of uint32 products, from four 16-bit products each."""
    a_low, a_high = a & 0xFFFF, a >> 16
    b_low, b_high = b & 0xFFFF, b >> 16
    middle = a_high * b_low + (a_low * b_low >> 16)
    carry = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (carry >> 16)


class Phase(NamedTuple):
    """A phase in units of 2**-64 turn, uint32 words [..., S, pairs]."""

    high: jax.Array
    low: jax.Array


def phases(angles: Angles, length: int) -> Phase:
    """The phases of ``length`` tokens, their fractions left aside."""
    high, low, packed = (angles.table[..., None, :, column] for column in range(3))
    first = _by_pair(angles.positions, packed)
    position = jax.lax.bitcast_convert_type(first, jnp.uint32)
    position = _counted(position, length)
    # A negative position is 2**32 too large as uint32. A row that counts past 2**31 is not negative.
    negative = (first < 0) & (jax.lax.bitcast_convert_type(position, jnp.int32) < 0)
    phase_low = position * low
    phase_high = position * high + multiply_high(position, low) - jnp.where(negative, low, 0)
    return Phase(phase_high, phase_low)


def _counted(position: jax.Array, length: int) -> jax.Array:
    """[..., S, pairs] as it is; [..., 1, pairs], a row's first position, counted on to ``length`` tokens."""
    if position.shape[-2] == length:
        return position
    steps = jnp.arange(length, dtype=position.dtype)
    return position + jnp.expand_dims(steps, (*range(position.ndim - 2), -1))


def _by_pair(per_stream: Operand, packed: Operand) -> jax.Array:
    """[..., streams, S] to [..., S, pairs], or [..., S, 1] where all pairs share one stream."""
    streams = per_stream.shape[-2]
    result = jnp.asarray(per_stream[..., 0, :, None])
    for stream in range(1, streams):
        mine = (packed & (1 << STREAM_BITS) - 1) == stream
        result = jnp.where(mine, per_stream[..., stream, :, None], result)
    return result


def _float32_cos_sin(angles: Angles, phase: Phase) -> tuple[jax.Array, jax.Array]:
    turned = phase.high
    if angles.fractions is not None:
        high, packed = angles.table[..., None, :, 0], angles.table[..., None, :, 2]
        fraction = _by_pair(angles.fractions, packed).astype(jnp.float32)
        size = (jnp.abs(fraction) * 2.0**32).astype(jnp.uint32)
        whole_turns = jax.lax.bitcast_convert_type(packed, jnp.int32) >> STREAM_BITS
        part = multiply_high(size, high) + size * jax.lax.bitcast_convert_type(whole_turns, jnp.uint32)
        turned = turned + jnp.where(fraction < 0, -part, part)
    quadrant, rest = _to_quarter(turned)
    turns = rest.astype(jnp.float32) * 2.0**-32
    square = turns * turns
    s0, s1, s2, s3 = SINE
    c0, c1, c2, c3 = COSINE
    s = turns * (s0 + square * (s1 + square * (s2 + square * s3)))
    c = 1 + square * (c0 + square * (c1 + square * (c2 + square * c3)))
    return _turned(quadrant, c, s)


def _float64_cos_sin(angles: Angles, phase: Phase) -> tuple[jax.Array, jax.Array]:
    quadrant, rest = _to_quarter(phase.high)
    turns = (rest.astype(jnp.float64) + phase.low.astype(jnp.float64) * 2.0**-32) * 2.0**-32
    radians = 2 * math.pi * turns
    if angles.fractions is not None:
        fraction = _by_pair(angles.fractions, angles.table[..., None, :, 2]).astype(jnp.float64)
        radians = radians + fraction * omegas(angles, jnp.dtype(jnp.float64))
    return _turned(quadrant, jnp.cos(radians), jnp.sin(radians))


def _to_quarter(phase: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The nearest quarter turn, 0 to 3, and what is left, int32 in units of 2**-32 turn."""
    quadrant = (phase + 0x20000000) >> 30
    return quadrant, jax.lax.bitcast_convert_type(phase - (quadrant << 30), jnp.int32)


def _turned(quadrant: jax.Array, c: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cosine, sine) of an angle plus ``quadrant`` quarter turns."""
    swap = quadrant & 1 == 1
    c, s = jnp.where(swap, s, c), jnp.where(swap, c, s)
    return jnp.where((quadrant + 1) & 2 == 2, -c, c), jnp.where(quadrant & 2 == 2, -s, s)


def omegas(angles: Angles, dtype: jnp.dtype) -> jax.Array:
    """The frequencies in radians per position, [..., 1, pairs]; differentiable, where they can be."""
    if angles.frequencies is not None:
        return jnp.asarray(angles.frequencies[..., None, :], dtype)
    high, low, packed = (angles.table[..., None, :, column] for column in range(3))
    whole = (jax.lax.bitcast_convert_type(packed, jnp.int32) >> STREAM_BITS).astype(dtype)
    fraction = (high.astype(dtype) + low.astype(dtype) * 2.0**-32) * 2.0**-32
    return (whole + fraction) * (2 * math.pi)


def _computed_once(compute: Callable[[], tuple[jax.Array, jax.Array]], like: jax.Array, dtype: jnp.dtype):
    """What compute() gives, two arrays of the shape of ``like``, kept from being fused into what uses them.

    XLA on a CPU would compute cosines and sines again for each head that they turn. It sees through barriers, but not
    through a loop of one round that ends with two values.
    """
    zeros = (like & 0).astype(dtype)  # varies over the axes of a mesh that the results do
    _, _, c, s = jax.lax.while_loop(
        lambda carry: ~(carry[0] & carry[1]), lambda _: (True, True, *compute()), (False, False, zeros, zeros)
    )
    return c, s


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def cos_sin(angles: Angles, length: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of ``length`` tokens, amplitude included, float32 or float64 [..., S, pairs]."""
    phase = phases(angles, length)

    def compute() -> tuple[jax.Array, jax.Array]:
        c, s = (_float64_cos_sin if dtype == jnp.float64 else _float32_cos_sin)(angles, phase)
        amplitude = jax.lax.bitcast_convert_type(angles.table[..., None, :, 3], jnp.float32).astype(dtype)
        if angles.fractions is not None:
            fraction = _by_pair(angles.fractions, angles.table[..., None, :, 2])
            amplitude = jnp.where(jnp.isnan(fraction), jnp.nan, amplitude)
        return c * amplitude, s * amplitude

    return _computed_once(compute, phase.high, dtype)


@cos_sin.defjvp
def _cos_sin_jvp(length, dtype, primals, tangents):
    (angles,), (changes,) = primals, tangents
    c, s = cos_sin(angles, length, dtype)
    radians = angle_change(angles, changes.fractions, changes.frequencies, length, dtype)
    return (c, s), (jnp.zeros_like(c), jnp.zeros_like(s)) if radians is None else (-s * radians, c * radians)


def angle_change(
    angles: Angles, fractions: Operand | None, frequencies: Operand | None, length: int, dtype: jnp.dtype
) -> jax.Array | None:
    """By how many radians each pair's angle changes, [..., S, pairs], with these changes of fractions and frequencies.

    None if both are None.
    """
    packed = angles.table[..., None, :, 2]
    change = None
    if fractions is not None:
        change = _by_pair(fractions.astype(dtype), packed) * omegas(angles, dtype)
    if frequencies is not None:
        position = _counted(_by_pair(angles.positions, packed).astype(dtype), length)
        if angles.fractions is not None:
            position = position + _by_pair(angles.fractions, packed).astype(dtype)
        by_frequency = position * frequencies[..., None, :].astype(dtype)
        change = by_frequency if change is None else change + by_frequency
    return change
