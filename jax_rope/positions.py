"""Positions for batches that are not simply 0 ... S - 1. All of them can be traced; all results are int32."""

import operator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from .checks import array, beyond_int32, shown


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
      TypeError: offsets that are no integers, or a length that is none.
      ValueError: a length below 0; a row that would end beyond int32, where its offset is not traced.
    """
    offsets = _integers("offsets", offsets)
    length = _size("length", length)
    known = _known(offsets)
    if known is not None and known.size and isinstance(length, int) and length:
        _check_range("offsets, counted to the rows' ends,", int(known.min()), int(known.max()) + length - 1)
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
      TypeError: cu_seqlens that are no integers, or a total that is none.
      ValueError: cu_seqlens of another shape, or a total below 0; boundaries that are none, where they are not traced.
    """
    boundaries = _integers("cu_seqlens", cu_seqlens)
    if boundaries.ndim != 1 or boundaries.shape[0] == 0:
        raise ValueError(f"cu_seqlens must be [N + 1], got shape {boundaries.shape}")
    total = _size("total", total)
    known = _known(boundaries)
    if known is not None and (
        known[0] != 0 or (np.diff(known) < 0).any() or (isinstance(total, int) and known[-1] > total)
    ):
        raise ValueError(
            f"cu_seqlens must begin with 0, never fall and end at total {total} at most, got {shown(known.tolist())}"
        )
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
      TypeError: a mask of floats.
      ValueError: a scalar.
    """
    mask = array("mask", mask, "booleans or integers")
    if not (mask.dtype == bool or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(f"mask must be booleans or integers, got {mask.dtype}")
    if mask.ndim == 0:
        raise ValueError("mask must be [..., S], got a scalar")
    kept = jnp.cumsum(mask.astype(bool).astype(jnp.int32), axis=-1, dtype=jnp.int32)
    return jnp.maximum(kept - 1, 0)


def _integers(name: str, values: jax.typing.ArrayLike) -> jax.Array:
    if isinstance(values, np.ndarray) and np.issubdtype(values.dtype, np.integer) and values.size:
        _check_range(name, int(values.min()), int(values.max()))
    integers = array(name, values, "integers in int32")
    if not jnp.issubdtype(integers.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {integers.dtype}")
    return integers.astype(jnp.int32)


def _check_range(name: str, least: int, most: int) -> None:
    if not -(2**31) <= least <= most < 2**31:
        raise beyond_int32(name, least, most)


def _known(values: jax.Array) -> np.ndarray | None:
    """The values, but None while they are traced."""
    return None if isinstance(values, jax.core.Tracer) else np.asarray(values, np.int64)


def _size(name: str, size: int) -> Any:
    """An int, or as it is a name that stands for one while a program is exported."""
    if jax.export.is_symbolic_dim(size):
        return size
    try:
        number = operator.index(size)
    except TypeError as error:
        raise TypeError(f"{name} must be an integer known while tracing, got {shown(size)}") from error
    if number < 0:
        raise ValueError(f"{name} must be at least 0, got {shown(number)}")
    return number


def _index(length: int, rank: int) -> jax.Array:
    return jnp.expand_dims(jnp.arange(length, dtype=jnp.int32), tuple(range(rank - 1)))
