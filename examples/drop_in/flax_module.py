"""A Flax NNX module that rotates queries and keys, and with it ``nnx.MultiHeadAttention`` with rotary positions.

Flax has no rotary module of its own. This one has no parameters, so that a model's state and its checkpoints stay as
they are::

    rotary = RotaryEmbedding(theta=500_000.0, pairing="half")
    q, k = rotary(q, k, offset)                                             # in an attention of your own
    nnx.MultiHeadAttention(..., attention_fn=rotary.attention)              # in Flax's

Which implementation rotates is what `jax_rope.configure` or JAX_ROPE_IMPLEMENTATION says.
"""

from typing import Any

import jax
from flax import nnx

from jax_rope import Rotary, rope_qk


class RotaryEmbedding(nnx.Module):
    """Takes what `jax_rope.Rotary` takes, by name."""

    def __init__(self, *, rngs: nnx.Rngs | None = None, **fields: Any):
        self.rotary = Rotary(**fields)  # hashable, so a part of the graph's definition

    def __call__(
        self, query: jax.Array, key: jax.Array, positions: jax.typing.ArrayLike | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """The rotated query ``[..., S, Hq, D]`` and key ``[..., S, Hk, D]``; positions as in `jax_rope.rope`."""
        return rope_qk(query, key, positions, self.rotary)

    def attention(self, query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
        """`nnx.dot_product_attention` of the rotated query and key, which count from 0.

        Not for ``decode=True``, which does not tell an attention_fn where the query's one token lies.
        """
        if query.shape[-3] != key.shape[-3]:
            raise ValueError(
                f"query and key must be as long as each other, got {query.shape[-3]} and {key.shape[-3]} tokens: "
                "rotate them before the cache in an attention of your own, by rotary(query, key, offset)"
            )
        return nnx.dot_product_attention(*self(query, key), value, **options)
