"""MaxText's ``apply_rotary``, and the tables that go into it, exact at every position.

In MaxText these are `RotaryEmbedding.apply_rotary` and the lines of its ``__call__`` that make cosines and sines.
Which implementation rotates is what `jax_rope.configure` or JAX_ROPE_IMPLEMENTATION says.
"""

import jax
import jax.numpy as jnp

from jax_rope import Rotary, rope_cached
from jax_rope.scaling import Linear


def apply_rotary(inputs: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """``inputs * cos + rotate_half(inputs) * sin``.

    Args:
      inputs: ``[B, S, N, H]``; elements i and i + H / 2 of a head are a pair.
      cos: ``[B, S, 1, H]``, both halves alike, or whatever broadcasts to that.
      sin: like cos.

    Returns:
      An array of the shape of ``inputs``, and of the dtype that the product has.
    """
    for name, table in {"cos": cos, "sin": sin}.items():
        if table.ndim < 3 or table.shape[-2] != 1:
            raise ValueError(f"{name} must be [..., S, 1, H], one table for all heads, got shape {table.shape}")
    inputs = inputs.astype(jnp.result_type(inputs, cos, sin))
    return rope_cached(inputs, cos[..., 0, :], sin[..., 0, :], pairing="half")


def cos_sin(
    position: jax.Array,
    embedding_dims: int,
    max_timescale: float,
    min_timescale: float = 1,
    rope_linear_scaling_factor: float = 1.0,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
    """What `apply_rotary` takes.

    Args:
      position: ``[B, S]``.
      embedding_dims: H.
      max_timescale: with ``min_timescale`` as in MaxText: pair i turns by a radian in
        ``min_timescale * (max_timescale / min_timescale) ** (2 i / H) * rope_linear_scaling_factor`` tokens, of which
        the first, the shortest, must be at least one token.
      min_timescale: see there.
      rope_linear_scaling_factor: see there.
      dtype: MaxText makes them of the inputs' dtype; float32 keeps what bfloat16 rounds off.

    Returns:
      (cos, sin), each ``[B, S, 1, H]``.
    """
    slower = Linear(min_timescale * rope_linear_scaling_factor)
    rotary = Rotary(theta=max_timescale / min_timescale, pairing="half", scaling=slower)
    cos, sin = (jnp.tile(t, 2)[..., None, :].astype(dtype) for t in rotary.tables(position, embedding_dims))
    return cos, sin
