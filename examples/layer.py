"""A layer's rotation of queries and keys in three forms that give the same: at positions 0 ... S - 1, from an offset
that is traced, and by tables that are computed once.

Half pairing (i, i + D / 2) and base 500000, as Llama 3 in Hugging Face's format. Shapes are written with B sequences,
S tokens, Hq query heads, Hk key heads and D elements of a head.

``python examples/layer.py`` runs it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jax_rope import Rotary, rope_cached, rope_qk

ROTARY = Rotary(theta=500_000.0, pairing="half")


class Tables(NamedTuple):
    """Cosines and sines of the positions 0 ... max_seq - 1, each float32 [max_seq, D / 2]."""

    cos: jax.Array
    sin: jax.Array


def rotate_static(q: jax.Array, k: jax.Array, implementation: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Positions 0 ... S - 1, as in training.

    Args:
      q: float32, bfloat16 or float16 [B, S, Hq, D].
      k: alike, [B, S, Hk, D].
      implementation: see `jax_rope.rope_qk`.

    Returns:
      The rotated (q, k).
    """
    return rope_qk(q, k, None, ROTARY, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def rotate_dynamic(
    q: jax.Array, k: jax.Array, offset: jax.Array | int, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """As `rotate_static`, at positions offset ... offset + S - 1. A new offset, an int32 scalar, compiles nothing."""
    return rope_qk(q, k, offset, ROTARY, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("max_seq", "head_dim"))
def make_tables(max_seq: int, head_dim: int) -> Tables:
    """What `rotate_cached` takes: to be made once, not in each step."""
    return Tables(*ROTARY.tables(jnp.arange(max_seq, dtype=jnp.int32), head_dim))


def rotate_cached(
    q: jax.Array, k: jax.Array, tables: Tables, offset: jax.Array | int = 0, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """As `rotate_dynamic`, by the rows offset ... offset + S - 1 of the tables.

    Args:
      q: float32, bfloat16 or float16 [B, S, Hq, D].
      k: alike, [B, S, Hk, D].
      tables: from `make_tables`.
      offset: an int32 or int64 scalar, traced or not.
      implementation: see `jax_rope.rope_cached`.

    Returns:
      The rotated (q, k). Tokens at positions that the tables have no row for become NaN, if the offset is traced.

    Raises:
      ValueError: the offset is not traced, and the tables have no row for one of the positions.
    """
    length, max_seq = q.shape[1], tables.cos.shape[0]
    if not isinstance(offset, jax.core.Tracer) and not 0 <= int(offset) <= max_seq - length:
        last = int(offset) + length - 1
        raise ValueError(f"positions {int(offset)} to {last} do not lie in tables of the positions 0 to {max_seq - 1}")
    offset = jnp.asarray(offset)
    rows = offset + jnp.arange(length, dtype=offset.dtype)
    # Not lax.dynamic_slice, which moves a slice that does not fit to other rows, and not jnp.take, which counts
    # negative ones from the end: both would rotate to wrong values without a word.
    cos, sin = (
        table.at[rows].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False, indices_are_sorted=True)
        for table in tables
    )
    q, k = (rope_cached(x, cos, sin, pairing=ROTARY.pairing, implementation=implementation) for x in (q, k))
    return q, k


def main() -> None:
    length, head_dim, max_seq = 16, 64, 32
    keys = jax.random.split(jax.random.key(0))
    q = jax.random.normal(keys[0], (2, length, 8, head_dim))
    k = jax.random.normal(keys[1], (2, length, 2, head_dim))
    tables = make_tables(max_seq, head_dim)

    def difference(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> float:
        return max(float(jnp.abs(x - y).max()) for x, y in zip(a, b, strict=True))

    static = rotate_static(q, k)
    print(f"static and dynamic differ by {difference(static, rotate_dynamic(q, k, 0)):.0e}")
    print(f"static and cached differ by {difference(static, rotate_cached(q, k, tables)):.0e}")

    compiled = []

    @jax.jit
    def step(q: jax.Array, k: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
        compiled.append(True)  # happens while tracing only, so once for each program
        return rotate_cached(q, k, tables, offset)

    for offset in range(8):
        rotated = step(q, k, offset)
    print(f"programs compiled for 8 offsets: {len(compiled)}")
    print(f"the last and dynamic differ by {difference(rotated, rotate_dynamic(q, k, 7)):.0e}")

    beyond, _ = step(q, k, max_seq - 10)
    lost = jnp.isnan(beyond).any(axis=(0, 2, 3)).sum()
    print(f"tokens that got NaN, where 6 of 16 lie beyond the tables: {lost}")
    try:
        rotate_cached(q, k, tables, max_seq - 10)
    except ValueError as error:
        print(f"and where the offset is known: {error}")


if __name__ == "__main__":
    main()
