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
    """y1 = cos x1 - sin x2, y2 = sin2 x1 + cos2 x2; each [..., S, pairs], or with an axis of 1 for the heads.

    cos2 is cos and sin2 is sin, the same objects, where pairs are turned and not sheared.
    """

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
    identity = jnp.expand_dims(identity, _pair_axis(layout))

    def one(x: jax.Array) -> jax.Array:
        pairs = _pairs(layout, x)
        return _with_pairs(layout, x, _keep(identity, pairs, _turn(layout, f, pairs)))

    return tuple(one(x) for x in xs)


# How this is written decides how fast XLA runs it on a CPU, up to four times: with the pair as an axis of its own it
# runs at about the speed of a copy, while the usual concatenation of halves takes two to four passes.


def _turn(layout: Layout, f: Factors, pairs: jax.Array) -> jax.Array:
    """Each element times its factor less its partner times another, rounded to their dtype."""
    axis = _pair_axis(layout)
    values = pairs.astype(f.cos.dtype)
    if layout.interleaved and pairs.dtype == values.dtype:
        partners = jnp.flip(values, axis)
    else:  # slower for them, and up to three times as fast for all others
        first, second = (jax.lax.slice_in_dim(values, i, i + 1, axis=axis) for i in range(2))
        partners = jnp.concatenate((second, first), axis)
    # Without second factors the axis is broadcast: a stack of equals is slower too.
    cos = jnp.expand_dims(f.cos, axis) if f.cos2 is f.cos else jnp.stack((f.cos, f.cos2), axis)
    if f.sin2 is f.sin:
        signs = jnp.array((1, -1), f.sin.dtype).reshape([2 if i == axis else 1 for i in range(-pairs.ndim, 0)])
        sin = jnp.expand_dims(f.sin, axis) * signs
    else:
        sin = jnp.stack((f.sin, -f.sin2), axis)
    # A difference, since XLA may fuse one product with a sum, and of a sum's two it takes now one, now the other: so
    # all pairings round alike.
    return (cos * values - sin * partners).astype(pairs.dtype)


def _factors(layout: Layout, by: Angles | Tables, length: int, dtype: jnp.dtype) -> Factors:
    if isinstance(by, Tables):
        factors = _of_tables(layout, by, dtype)
    else:
        cos, sin = cos_sin(by, length, dtype)
        factors = Factors(cos, sin, cos, sin)
    cos, sin, cos2, sin2 = (jnp.expand_dims(f, layout.head_axis) for f in factors)
    if layout.direction < 0:  # the transpose
        sin, sin2 = -sin2, -sin
    if factors.cos2 is factors.cos and factors.sin2 is factors.sin:
        return Factors(cos, sin, cos, sin)
    return Factors(cos, sin, cos2, sin2)


def _of_tables(layout: Layout, tables: Tables, dtype: jnp.dtype) -> Factors:
    cos, sin = jnp.asarray(tables.cos, dtype), jnp.asarray(tables.sin, dtype)
    n = layout.pairs
    if cos.shape[-1] == n:
        return Factors(cos, sin, cos, sin)
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


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _pairs(layout: Layout, x: jax.Array) -> jax.Array:
    """The pairs of the window, [..., pairs, 2] or, as halves, [..., 2, pairs]."""
    return _as_floats(_window(layout, _as_bits(x)))


@_pairs.defjvp
def _pairs_jvp(layout, primals, tangents):
    return _pairs(layout, *primals), _window(layout, *tangents)


def _pair_axis(layout: Layout) -> int:
    """The axis that counts the two elements of a pair."""
    return -1 if layout.interleaved else -2


def _window(layout: Layout, x: jax.Array) -> jax.Array:
    window = jax.lax.slice_in_dim(x, layout.start, layout.start + 2 * layout.pairs, axis=-1)
    axes = (layout.pairs, 2) if layout.interleaved else (2, layout.pairs)
    return window.reshape(*x.shape[:-1], *axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _with_pairs(layout: Layout, x: jax.Array, pairs: jax.Array) -> jax.Array:
    """x with its pairs replaced, the inverse of `_pairs`."""
    return _as_floats(_replaced(layout, *map(_as_bits, (x, pairs))))


@_with_pairs.defjvp
def _with_pairs_jvp(layout, primals, tangents):
    return _with_pairs(layout, *primals), _replaced(layout, *tangents)


def _replaced(layout: Layout, x: jax.Array, pairs: jax.Array) -> jax.Array:
    window = pairs.reshape(*x.shape[:-1], 2 * layout.pairs)
    if window.shape == x.shape:
        return window
    before = jax.lax.slice_in_dim(x, 0, layout.start, axis=-1)
    after = jax.lax.slice_in_dim(x, layout.start + 2 * layout.pairs, x.shape[-1], axis=-1)
    return jnp.concatenate((before, window, after), axis=-1)


def rearrange(layout: Layout, x: jax.Array) -> jax.Array:
    """x with the pairs of its window moved from the layout's pairing to the other one, elements unchanged."""
    moved = jnp.swapaxes(_pairs(layout, x), -2, -1)
    return _with_pairs(layout._replace(interleaved=not layout.interleaved), x, moved)


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
        return _with_pairs(layout, jnp.zeros_like(x), _turn(layout, f, _pairs(layout, x)))

    return tuple(one(x) for x in of)
