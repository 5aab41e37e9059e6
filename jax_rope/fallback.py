"""The pure ``jnp`` implementation: the reference, and what runs without a GPU."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .layout import Layout
from .phase import Angles, Operand, angle_change, arithmetic, cos_sin


class Tables(NamedTuple):
    """Cosines and sines of the caller's, in the place of `Angles`: floats [..., S, width], leading axes as there.

    width is the number of pairs; or twice that, and then pair i's second result has factors of its own, at pairs + i:
    ``y1 = cos[i] x1 - sin[i] x2, y2 = sin[pairs + i] x1 + cos[pairs + i] x2``.
    """

    cos: Operand
    sin: Operand


class Factors(NamedTuple):
    """y1 = cos x1 - sin x2, y2 = sin2 x1 + cos2 x2; each [..., S, pairs], or with an axis of 1 for the heads."""

    cos: jax.Array
    sin: jax.Array
    cos2: jax.Array
    sin2: jax.Array


# Compiled as one where it is called outside of jit; inside, it is inlined.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def rotate(layout: Layout, xs: Sequence[jax.Array], by: Angles | Tables) -> tuple[jax.Array, ...]:
    """Rotates the pairs of every x, in float32 (float64 for float64), each rounded once to x's dtype."""
    dtype = arithmetic(xs[0].dtype)
    f = _factors(layout, by, xs[0].shape[layout.token_axis], dtype)
    # Only an angle of exactly 0 has these.
    identity = (f.sin == 0) & (f.cos == 1) & (f.sin2 == 0) & (f.cos2 == 1)

    def one(x: jax.Array) -> jax.Array:
        x1, x2 = _split(layout, x)
        a, b = x1.astype(dtype), x2.astype(dtype)
        y1 = _keep(identity, x1, (f.cos * a - f.sin * b).astype(x.dtype))
        y2 = _keep(identity, x2, (f.sin2 * a + f.cos2 * b).astype(x.dtype))
        return _join(layout, x, y1, y2)

    return tuple(one(x) for x in xs)


def _factors(layout: Layout, by: Angles | Tables, length: int, dtype: jnp.dtype) -> Factors:
    if isinstance(by, Tables):
        factors = _of_tables(layout, by, dtype)
    else:
        cos, sin = cos_sin(by, length, dtype)
        factors = Factors(cos, sin, cos, sin)
    if layout.direction < 0:  # the transpose
        factors = Factors(factors.cos, -factors.sin2, factors.cos2, -factors.sin)
    return Factors(*(jnp.expand_dims(f, layout.head_axis) for f in factors))


def _of_tables(layout: Layout, tables: Tables, dtype: jnp.dtype) -> Factors:
    cos, sin = jnp.asarray(tables.cos, dtype), jnp.asarray(tables.sin, dtype)
    n = layout.pairs
    return Factors(cos[..., :n], sin[..., :n], cos[..., -n:], sin[..., -n:])


# XLA may pass bfloat16 through float32 on the way, which changes a NaN's bits. What has to stay bit for bit is moved
# as integers, by functions whose derivatives are given by hand.


def _as_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _as_floats(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16) if bits.dtype == jnp.uint16 else bits


@jax.custom_jvp
def _keep(identity: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """y, but x bit for bit where that is the same: no -0 becomes 0, no NaN spreads from its pair's other element."""
    return _as_floats(jnp.where(identity, _as_bits(x), _as_bits(y)))


@_keep.defjvp
def _keep_jvp(primals, tangents):
    # An angle that is 0 changes y all the same.
    return _keep(*primals), tangents[2]


# A reshape that makes the pair an axis of its own, and a stack: XLA runs these at the speed of a copy, while
# it makes two to four passes of the usual concatenation of halves.


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _split(layout: Layout, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the second elements of all pairs, [..., pairs] each."""
    x1, x2 = _taken_apart(layout, _as_bits(x))
    return _as_floats(x1), _as_floats(x2)


@_split.defjvp
def _split_jvp(layout, primals, tangents):
    return _split(layout, *primals), _taken_apart(layout, *tangents)


def _taken_apart(layout: Layout, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    window = jax.lax.slice_in_dim(x, layout.start, layout.start + 2 * layout.pairs, axis=-1)
    if layout.interleaved:
        pairs = window.reshape(*x.shape[:-1], layout.pairs, 2)
        return pairs[..., 0], pairs[..., 1]
    pairs = window.reshape(*x.shape[:-1], 2, layout.pairs)
    return pairs[..., 0, :], pairs[..., 1, :]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _join(layout: Layout, x: jax.Array, y1: jax.Array, y2: jax.Array) -> jax.Array:
    """x with its pairs replaced."""
    return _as_floats(_put_together(layout, *map(_as_bits, (x, y1, y2))))


@_join.defjvp
def _join_jvp(layout, primals, tangents):
    return _join(layout, *primals), _put_together(layout, *tangents)


def _put_together(layout: Layout, x: jax.Array, y1: jax.Array, y2: jax.Array) -> jax.Array:
    window = jnp.stack((y1, y2), axis=-1 if layout.interleaved else -2).reshape(*x.shape[:-1], 2 * layout.pairs)
    if window.shape == x.shape:
        return window
    before = jax.lax.slice_in_dim(x, 0, layout.start, axis=-1)
    after = jax.lax.slice_in_dim(x, layout.start + 2 * layout.pairs, x.shape[-1], axis=-1)
    return jnp.concatenate((before, window, after), axis=-1)


def rearrange(layout: Layout, x: jax.Array) -> jax.Array:
    """x with the pairs of its window moved from the layout's pairing to the other one, elements unchanged."""
    return _join(layout._replace(interleaved=not layout.interleaved), x, *_split(layout, x))


def changed_by(
    layout: Layout, of: Sequence[jax.Array], by: Angles | Tables, changes: Angles | Tables
) -> tuple[jax.Array, ...]:
    """By how much rotated arrays change with these changes of what they are rotated by; None there is no change.

    ``of`` are the arrays themselves where they are rotated by `Tables`, and the results where it is by `Angles`.
    """
    length, dtype = of[0].shape[layout.token_axis], arithmetic(of[0].dtype)
    if isinstance(by, Tables):
        filled = Tables(*(jnp.zeros_like(t) if c is None else c for t, c in zip(by, changes, strict=True)))
        f = _factors(layout, filled, length, dtype)
    else:
        assert isinstance(changes, Angles)
        radians = angle_change(by, changes.fractions, changes.frequencies, length, dtype)
        assert radians is not None
        radians = jnp.expand_dims(layout.direction * radians, layout.head_axis)
        zero = jnp.zeros_like(radians)
        f = Factors(zero, radians, zero, radians)  # the rotated pair turned by 90 degrees

    def one(x: jax.Array) -> jax.Array:
        x1, x2 = (part.astype(dtype) for part in _split(layout, x))
        y1, y2 = (f.cos * x1 - f.sin * x2).astype(x.dtype), (f.sin2 * x1 + f.cos2 * x2).astype(x.dtype)
        return _join(layout, jnp.zeros_like(x), y1, y2)

    return tuple(one(x) for x in of)
