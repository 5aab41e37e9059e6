"""The pure ``jnp`` implementation: the reference, and what runs without a GPU."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .layout import Layout
from .phase import Angles, Operand, angle_change, arithmetic, cos_sin


# Compiled as one where it is called outside of jit; inside, it is inlined.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def rotate(layout: Layout, xs: Sequence[jax.Array], angles: Angles) -> tuple[jax.Array, ...]:
    """Rotates every x: y1 = cos x1 - sin x2, y2 = sin x1 + cos x2 for each pair, in float32 (float64 for float64)."""
    dtype = arithmetic(xs[0].dtype)
    cosine, sine = cos_sin(angles, xs[0].shape[layout.token_axis], dtype)
    cosine, sine = (jnp.expand_dims(t, layout.head_axis) for t in (cosine, layout.direction * sine))
    # Only an angle of exactly 0 has this sine and cosine.
    identity = (sine == 0) & (cosine == 1)

    def one(x: jax.Array) -> jax.Array:
        x1, x2 = split(layout, x)
        a, b = x1.astype(dtype), x2.astype(dtype)
        y1 = _keep(identity, x1, (cosine * a - sine * b).astype(x.dtype))
        y2 = _keep(identity, x2, (sine * a + cosine * b).astype(x.dtype))
        return join(layout, x, y1, y2)

    return tuple(one(x) for x in xs)


@jax.custom_jvp
def _keep(identity: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """y, but x bit for bit where that is the same: no -0 becomes 0, no NaN spreads from its pair's other element."""
    return jnp.where(identity, x, y)


@_keep.defjvp
def _keep_jvp(primals, tangents):
    # An angle that is 0 changes y all the same.
    return _keep(*primals), tangents[2]


def turned_by(layout: Layout, y: jax.Array, angles: Angles, fractions_change: Operand) -> jax.Array:
    """By how much a rotated y changes when the fractions change: its pairs turned by 90 degrees, times the angles'."""
    radians = layout.direction * angle_change(angles, fractions_change, arithmetic(y.dtype))
    radians = jnp.expand_dims(radians, layout.head_axis)
    y1, y2 = split(layout, y)
    return join(layout, jnp.zeros_like(y), (-radians * y2).astype(y.dtype), (radians * y1).astype(y.dtype))


# A reshape that makes the pair an axis of its own, and a stack: XLA runs these at the speed of a copy, while
# it makes two to four passes of the usual concatenation of halves.


def split(layout: Layout, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first and the second elements of all pairs, [..., pairs] each."""
    window = jax.lax.slice_in_dim(x, layout.start, layout.start + 2 * layout.pairs, axis=-1)
    if layout.interleaved:
        pairs = window.reshape(*x.shape[:-1], layout.pairs, 2)
        return pairs[..., 0], pairs[..., 1]
    pairs = window.reshape(*x.shape[:-1], 2, layout.pairs)
    return pairs[..., 0, :], pairs[..., 1, :]


def join(layout: Layout, x: jax.Array, y1: jax.Array, y2: jax.Array) -> jax.Array:
    """x with its pairs replaced."""
    window = jnp.stack((y1, y2), axis=-1 if layout.interleaved else -2).reshape(*x.shape[:-1], 2 * layout.pairs)
    if window.shape == x.shape:
        return window
    before = jax.lax.slice_in_dim(x, 0, layout.start, axis=-1)
    after = jax.lax.slice_in_dim(x, layout.start + 2 * layout.pairs, x.shape[-1], axis=-1)
    return jnp.concatenate((before, window, after), axis=-1)
