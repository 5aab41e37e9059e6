"""The calls that every transformation is tried on: one table for all tests of transformations.

Each case is a function of one float32 array [2, 5, 4, 8], and of further floats that it may be differentiated in, with
an independent formula for it in plain jnp.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rope import Rotary, forward_mode, rope, rope_cached, rope_qk, scaling

SHAPE = (2, 5, 4, 8)
ROWS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
TOKENS = np.arange(5, dtype=np.float32)
YARN = scaling.YaRN(4, 64)


class Case(NamedTuple):
    ours: Callable  # (x, *floats, implementation, forward) -> array
    formula: Callable  # (x, *floats) -> array
    floats: tuple[np.ndarray, ...] = ()


def turned(x, angles, factor=1.0, pairing="interleaved"):
    """Pairs of x [B, S, H, D] turned by angles [..., S, n]."""
    angles = jnp.broadcast_to(angles, (*x.shape[:2], angles.shape[-1]))[:, :, None]
    c, s = factor * jnp.cos(angles), factor * jnp.sin(angles)
    n = angles.shape[-1]
    if pairing == "half":
        x1, x2 = x[..., :n], x[..., n:]
        return jnp.concatenate([c * x1 - s * x2, s * x1 + c * x2], axis=-1)
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return jnp.stack([c * x1 - s * x2, s * x1 + c * x2], axis=-1).reshape(x.shape)


def omega(n):
    return jnp.asarray(1e4 ** (-np.arange(n) / n), jnp.float32)


def plain(x, *, implementation, forward=False):
    return (forward_mode.rope if forward else rope)(x, ROWS, implementation=implementation)


def with_keys(x, *, implementation, forward=False):
    f = forward_mode.rope_qk if forward else rope_qk
    q, k = f(x, x[:, :, :1], 7, Rotary(pairing="half", scaling=YARN), implementation=implementation)
    return q * k  # both matter, and not linearly


def with_keys_formula(x):
    freqs = jnp.asarray(Rotary(scaling=YARN).inv_freq(8), jnp.float32)
    angles = (7 + TOKENS)[None, :, None] * freqs[None, None]
    return turned(x, angles, YARN.factor_on_attention(None), "half") * turned(
        x[:, :, :1], angles, YARN.factor_on_attention(None), "half"
    )


def window_heads_first(x, *, implementation, forward=False):
    f = forward_mode.rope if forward else rope
    y = f(jnp.swapaxes(x, 1, 2), None, Rotary(rotary_dim=4, start=2), seq_axis=-2, implementation=implementation)
    return jnp.swapaxes(y, 1, 2)


def window_formula(x):
    middle = turned(x[..., 2:6], TOKENS[None, :, None] * omega(2)[None, None])
    return jnp.concatenate([x[..., :2], middle, x[..., 6:]], axis=-1)


def float_positions(x, positions, *, implementation, forward=False):
    return (forward_mode.rope if forward else rope)(x, positions, implementation=implementation)


def learned(x, freqs, *, implementation, forward=False):
    return (forward_mode.rope if forward else rope)(x, 3, Rotary(freqs=freqs), implementation=implementation)


def tables(x, cos, sin, *, implementation, forward=False):
    return (forward_mode.rope_cached if forward else rope_cached)(x, cos, sin, implementation=implementation)


def tables_formula(x, cos, sin):
    c, s = cos[None, :, None], sin[None, :, None]
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return jnp.stack([c * x1 - s * x2, s * x1 + c * x2], axis=-1).reshape(x.shape)


_angles = np.arange(5)[:, None] * np.array([1.0, 0.5, 0.25, 0.1])
CASES = {
    "rope": Case(plain, lambda x: turned(x, jnp.float32(ROWS)[..., None] * omega(4)[None, None])),
    "rope_qk": Case(with_keys, with_keys_formula),
    "window": Case(window_heads_first, window_formula),
    "float positions": Case(
        float_positions,
        lambda x, p: turned(x, p[None, :, None] * omega(4)[None, None]),
        (np.float32([0.0, 2.0, 0.3, -1.8, 40.6]),),
    ),
    "freqs": Case(
        learned,
        lambda x, f: turned(x, (3 + TOKENS)[None, :, None] * f[None, None]),
        (np.float32([1.1, 0.3, 0.05, -0.2]),),
    ),
    "rope_cached": Case(tables, tables_formula, (np.float32(np.cos(_angles)), np.float32(np.sin(_angles)))),
}


def arguments(case: Case, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    x = jnp.asarray(rng.standard_normal(SHAPE), jnp.float32)
    return x, *(jnp.asarray(f) for f in case.floats)


def close(actual, expected, atol: float = 5e-5) -> None:
    """That two trees of arrays are alike."""

    def one(a, b):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=1e-4)

    jax.tree.map(one, actual, expected)
