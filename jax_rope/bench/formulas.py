"""How others rotate in ``jnp``: the usual formulas, as their code bases write them."""

import jax.numpy as jnp
import numpy as np

from .entry import Entry, jitted
from .workloads import Case, Workload


def inv_freq(workload: Workload) -> np.ndarray:
    """Radians per position as float32 [D / 2]: correctly rounded, which theirs not always are."""
    return workload.rotary.inv_freq(workload.head_dim).astype(np.float32)


def half_tables(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of float32 angles, float32 [S, D / 2]."""
    angles = workload.position_of_tokens().astype(np.float32)[:, None] * inv_freq(workload)
    factor = np.float32(workload.rotary.attention_factor())
    return np.cos(angles) * factor, np.sin(angles) * factor


def tables(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """The same with an entry for each element of a head, float32 [1, S, 1, D]."""

    def widened(table: np.ndarray) -> np.ndarray:
        if workload.rotary.pairing == "half":
            return np.concatenate((table, table), -1)[None, :, None]
        return np.repeat(table, 2, -1)[None, :, None]

    cos, sin = half_tables(workload)
    return widened(cos), widened(sin)


def rotate_half(x):
    """Hugging Face's, of Llama and most others."""
    half = x.shape[-1] // 2
    return jnp.concatenate((-x[..., half:], x[..., :half]), axis=-1)


def rotate_every_two(x):
    """Hugging Face's, of GPT-J, GLM and Cohere."""
    return jnp.stack((-x[..., 1::2], x[..., ::2]), axis=-1).reshape(x.shape)


def hugging_face(case: Case) -> Entry:
    """``x * cos + rotate_half(x) * sin``, the tables made beforehand and cast to x's dtype."""
    rotated = rotate_half if case.workload.rotary.pairing == "half" else rotate_every_two
    cos, sin = (jnp.asarray(table, case.workload.dtype) for table in tables(case.workload))

    def rotate(xs, cos, sin):
        return tuple(x * cos + rotated(x) * sin for x in xs)

    return jitted(case, rotate, cos, sin)


def on_the_fly(case: Case) -> Entry:
    """float32 angles, cosines and sines inside the op, as MaxText, Gemma and T5X write it."""
    interleaved = case.workload.rotary.pairing == "interleaved"
    factor = case.workload.rotary.attention_factor()

    def rotate(xs, positions, frequencies):
        angles = positions[None, :, None, None].astype(jnp.float32) * frequencies[None, None, None]
        cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor

        def one(x):
            y = x.astype(jnp.float32)
            first, second = (y[..., ::2], y[..., 1::2]) if interleaved else jnp.split(y, 2, axis=-1)
            parts = first * cos - second * sin, second * cos + first * sin
            y = jnp.stack(parts, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(parts, axis=-1)
            return y.astype(x.dtype)

        return tuple(map(one, xs))

    positions = jnp.asarray(case.workload.position_of_tokens(), jnp.int32)
    return jitted(case, rotate, positions, jnp.asarray(inv_freq(case.workload)))
