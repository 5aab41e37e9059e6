"""``equinox.nn.RotaryPositionalEmbedding``, exact at every position and without a cache.

It has the original's fields and is called like it, and takes an offset besides, as a step of decoding needs it. The
original's cache of cosines and sines does not tell one theta from another; here there is none.

Which implementation rotates is what `jax_rope.configure` or JAX_ROPE_IMPLEMENTATION says.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from jax_rope import Rotary, rope


class RotaryPositionalEmbedding(eqx.Module):
    """Rotates ``[S, D]``; map it over the heads, as ``jax.vmap(module, in_axes=1, out_axes=1)``: one call all the same.

    Attributes:
      embedding_size: D, even.
      theta: the base.
      dtype: of the original's tables. Here cosines and sines are float32 for all inputs but those of float64.
    """

    embedding_size: int = eqx.field(static=True)
    theta: float = eqx.field(static=True, default=10_000.0)
    dtype: Any = eqx.field(static=True, default_factory=lambda: jnp.result_type(float))

    def __check_init__(self):
        if self.embedding_size <= 0 or self.embedding_size % 2:
            raise ValueError(f"`embedding_size` must be even and above 0, got {self.embedding_size}.")

    def __call__(self, x: jax.Array, offset: jax.typing.ArrayLike = 0, *, key: jax.Array | None = None) -> jax.Array:
        """Rotates x ``[S, D]`` at positions offset, offset + 1, and so on; the key is ignored."""
        if x.ndim != 2 or x.shape[-1] != self.embedding_size:
            raise ValueError(f"x must be [S, {self.embedding_size}] as `embedding_size` says, got shape {x.shape}.")
        return rope(x[:, None], offset, Rotary(theta=self.theta, pairing="half"))[:, 0]
