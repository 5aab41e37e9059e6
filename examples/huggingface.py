"""Drop-in counterparts of the rotation in Hugging Face's ``transformers``: its signatures and shapes, for JAX arrays.

A model that was ported line by line keeps its calls::

    cos, sin = rotary_embedding(position_ids, Rotary.from_hf("config.json"), head_dim)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)

Shapes are written with B sequences, S tokens, H heads and D elements of a head.

``python examples/huggingface.py`` runs it.
"""

import jax
import jax.numpy as jnp

from jax_rope import Rotary, positions, rope_cached


def rotary_embedding(position_ids: jax.typing.ArrayLike, rotary: Rotary, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """What a model's ``rotary_emb(x, position_ids)`` returns.

    Args:
      position_ids: integers [B, S]; [S] makes the caches [S, D] of the older signature.
      rotary: with half pairing; scaling rules included.
      head_dim: D.

    Returns:
      (cos, sin), float32 [B, S, R] where R = D, unless only R elements are rotated: an entry for each element, the
      attention factor in them. They stay float32, whatever q and k are.
    """
    if rotary.pairing != "half":
        raise ValueError(f"cos and sin are laid out for half pairing, got {rotary.pairing!r}")
    cos, sin = rotary.tables(position_ids, head_dim)
    return jnp.concatenate((cos, cos), axis=-1), jnp.concatenate((sin, sin), axis=-1)


def apply_rotary_pos_emb(
    q: jax.Array,
    k: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    position_ids: jax.typing.ArrayLike | None = None,
    unsqueeze_dim: int = 1,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``x * cos + rotate_half(x) * sin`` for queries and keys.

    Args:
      q: float32, bfloat16 or float16 [B, H, S, D]; [B, S, H, D] with ``unsqueeze_dim=2``.
      k: alike; its number of heads may differ.
      cos: float [B, S, R] or [1, S, R], from `rotary_embedding`, R <= D: elements from R on pass through. With
        position_ids, the older signature: a cache [max_positions, R], whose row p belongs to position p.
      sin: like cos.
      position_ids: ``None``, or integers [B, S], each row's own; [1, S] and [S] are shared by all rows.
      unsqueeze_dim: the axis of q that counts heads, 1 or 2.
      implementation: see `jax_rope.rope_cached`.

    Returns:
      The rotated (q, k). Tokens at positions that a cache has no row for become NaN.

    Raises:
      ValueError: an argument that is of no such form.
    """
    if unsqueeze_dim not in (1, 2):
        raise ValueError(f"unsqueeze_dim must be 1 for [B, H, S, D] or 2 for [B, S, H, D], got {unsqueeze_dim}")
    if position_ids is not None:
        if cos.ndim != 2 or sin.ndim != 2:
            raise ValueError(
                f"with position_ids, cos and sin are caches [max_positions, D], got {cos.shape} and {sin.shape}"
            )
        # Without wrap_negative_indices=False position -1 would get the cache's last row.
        cos, sin = (
            cache.at[jnp.asarray(position_ids)].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
            for cache in (cos, sin)
        )

    def rotate(x: jax.Array) -> jax.Array:
        # rope_cached takes an entry for each element only where they span the head.
        turned, passed = jnp.split(x, [cos.shape[-1]], axis=-1)
        seq_axis = -2 if unsqueeze_dim == 1 else -3
        turned = rope_cached(turned, cos, sin, pairing="half", seq_axis=seq_axis, implementation=implementation)
        return jnp.concatenate((turned, passed), axis=-1)

    return rotate(q), rotate(k)


def main() -> None:
    config = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "rope_theta": 500_000.0}
    rotary, head_dim = Rotary.from_hf(config), 64
    keys = jax.random.split(jax.random.key(0))
    q = jax.random.normal(keys[0], (1, 8, 5, head_dim))
    k = jax.random.normal(keys[1], (1, 2, 5, head_dim))

    # A batch of two: the same five tokens alone, and behind three tokens of padding.
    def padded(x: jax.Array, left: int) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (left, 3 - left), (0, 0)))

    q, k = (jnp.concatenate((padded(x, 0), padded(x, 3))) for x in (q, k))
    mask = jnp.array([[1, 1, 1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1]], jnp.int32)
    position_ids = positions.from_mask(mask)
    print(f"position_ids of the two rows: {position_ids[0].tolist()} and {position_ids[1].tolist()}")

    cos, sin = rotary_embedding(position_ids, rotary, head_dim)
    rotated_q, rotated_k = apply_rotary_pos_emb(q, k, cos, sin)
    alike = all(bool(jnp.allclose(x[0, :, :5], x[1, :, 3:], atol=1e-6)) for x in (rotated_q, rotated_k))
    print(f"the padded row is rotated as the other: {alike}")

    caches = rotary_embedding(jnp.arange(128, dtype=jnp.int32), rotary, head_dim)
    old_q, _ = apply_rotary_pos_emb(q, k, *caches, position_ids)
    print(f"the older signature gives the same: {bool(jnp.allclose(old_q, rotated_q, atol=1e-6))}")


if __name__ == "__main__":
    main()
