"""Positions for batches that are not simply 0 ... S - 1. All of them can be traced; all results are int32."""

import jax
import jax.numpy as jnp


def from_offsets(offsets: jax.typing.ArrayLike, length: int) -> jax.Array:
    """Each row counts from its own offset.

    Example::

        from_offsets([0, 7], 3)     # [[0, 1, 2], [7, 8, 9]]

    Args:
      offsets: integers ``[...]``, the first position of each row.
      length: of the rows.

    Returns:
      int32 ``[..., length]``.

    Raises:
      TypeError: offsets that are no integers.
    """
    offsets = _integers("offsets", offsets)
    return offsets[..., None] + _index(length, offsets.ndim + 1)


def from_segment_ids(segment_ids: jax.typing.ArrayLike) -> jax.Array:
    """Packed documents: positions begin anew wherever the segment id changes.

    Example::

        from_segment_ids([5, 5, 5, 2, 2])     # [0, 1, 2, 0, 1]

    Args:
      segment_ids: integers ``[..., S]``.

    Returns:
      int32 ``[..., S]``.

    Raises:
      TypeError: segment_ids that are no integers.
      ValueError: a scalar.
    """
    segment_ids = _integers("segment_ids", segment_ids)
    if segment_ids.ndim == 0:
        raise ValueError("segment_ids must be [..., S], got a scalar")
    index = _index(segment_ids.shape[-1], segment_ids.ndim)
    begins = jnp.concatenate(
        [jnp.ones_like(segment_ids[..., :1], bool), segment_ids[..., 1:] != segment_ids[..., :-1]], axis=-1
    )
    return index - jax.lax.cummax(jnp.where(begins, index, 0), axis=segment_ids.ndim - 1)


def from_cu_seqlens(cu_seqlens: jax.typing.ArrayLike, total: int) -> jax.Array:
    """Packed documents by their boundaries. Tokens behind the last boundary count on from it. Documents may be empty.

    Example::

        from_cu_seqlens([0, 3, 5], 5)     # [0, 1, 2, 0, 1]

    Args:
      cu_seqlens: integers ``[N + 1]``, the boundaries of N documents: the first is 0, and they never fall.
      total: how many tokens there are.

    Returns:
      int32 ``[total]``.

    Raises:
      TypeError: cu_seqlens that are no integers.
      ValueError: cu_seqlens of another shape.
    """
    boundaries = _integers("cu_seqlens", cu_seqlens)
    if boundaries.ndim != 1 or boundaries.shape[0] == 0:
        raise ValueError(f"cu_seqlens must be [N + 1], got shape {boundaries.shape}")
    index = _index(total, 1)
    return index - boundaries[jnp.searchsorted(boundaries, index, side="right") - 1]


def from_mask(mask: jax.typing.ArrayLike) -> jax.Array:
    """The tokens that a mask keeps count from 0, wherever the padding lies.

    Padding before the first of them is at position 0, later padding at that of the token before it.

    Example::

        from_mask([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])     # [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]

    Args:
      mask: booleans or integers ``[..., S]``, True or 1 for a token that counts.

    Returns:
      int32 ``[..., S]``.

    Raises:
      TypeError: a mask of floats, or a scalar.
    """
    mask = jnp.asarray(mask)
    if mask.ndim == 0 or not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(f"mask must be booleans or integers [..., S], got {mask.dtype} of shape {mask.shape}")
    kept = jnp.cumsum(mask.astype(bool).astype(jnp.int32), axis=-1, dtype=jnp.int32)
    return jnp.maximum(kept - 1, 0)


def _integers(name: str, values: jax.typing.ArrayLike) -> jax.Array:
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array.astype(jnp.int32)


def _index(length: int, rank: int) -> jax.Array:
    return jnp.expand_dims(jnp.arange(length, dtype=jnp.int32), tuple(range(rank - 1)))
