"""Rotary embedding with the interface of hand-written GPU kernels, as inference and training code in C calls them.

Queries and keys are flat buffers, ``[seq, n_heads * head_dim]`` and ``[seq, n_kv_heads * head_dim]``. Elements 2i and
2i + 1 of a head are a pair, and row r is at position ``pos_offset + r``. "In place" is what JAX calls donation: the
caller gives the buffer away, and the result is written where it lay.

``python examples/in_place_kernels.py`` runs it.
"""

import functools

import jax
import jax.numpy as jnp

from jax_rope import Rotary, rope

# By number, as q and k name their arguments differently: (buffer, heads, pos_offset, base, implementation).
in_place = functools.partial(jax.jit, static_argnums=(1, 3, 4), donate_argnums=0)


def rotate(
    x: jax.Array, heads: int, pos_offset: jax.Array | int, rotary: Rotary, inverse: bool, implementation: str | None
) -> jax.Array:
    """The flat buffer x, float [seq, heads * head_dim], rotated; of its shape and dtype."""
    seq, width = x.shape
    if heads <= 0 or width % heads:
        raise ValueError(f"a row of {width} elements does not divide into {heads} heads")
    x = x.reshape(seq, heads, width // heads)
    return rope(x, pos_offset, rotary, inverse=inverse, implementation=implementation).reshape(seq, width)


@in_place
def rope_q(
    q: jax.Array, n_heads: int, pos_offset: jax.Array | int, base: float = 1e4, implementation: str | None = None
) -> jax.Array:
    """Rotates queries in place.

    Args:
      q: float32, bfloat16 or float16 [seq, n_heads * head_dim]; not to be used again.
      n_heads: how many heads a row holds.
      pos_offset: the position of row 0, an int32 scalar. A new one compiles nothing.
      base: pair i of n turns by ``base ** (-i / n)`` per position. A new one compiles once, see `rope_traced_base`.
      implementation: see `jax_rope.rope`.

    Returns:
      The rotated queries, of q's shape and dtype, in q's memory where the backend can.
    """
    return rotate(q, n_heads, pos_offset, Rotary(theta=base), False, implementation)


@in_place
def rope_k(
    k: jax.Array, n_kv_heads: int, pos_offset: jax.Array | int, base: float = 1e4, implementation: str | None = None
) -> jax.Array:
    """Rotates keys in place, as `rope_q`: [seq, n_kv_heads * head_dim], often with fewer heads than the queries."""
    return rotate(k, n_kv_heads, pos_offset, Rotary(theta=base), False, implementation)


@in_place
def rope_q_backward(
    dq: jax.Array, n_heads: int, pos_offset: jax.Array | int, base: float = 1e4, implementation: str | None = None
) -> jax.Array:
    """From the gradient of `rope_q`'s result to that of its q, in place: the opposite rotation.

    A rotation's transpose is its inverse, as long as no attention factor (YaRN, LongRoPE) lengthens the pairs.
    """
    return rotate(dq, n_heads, pos_offset, Rotary(theta=base), True, implementation)


@in_place
def rope_k_backward(
    dk: jax.Array, n_kv_heads: int, pos_offset: jax.Array | int, base: float = 1e4, implementation: str | None = None
) -> jax.Array:
    """`rope_q_backward` for keys."""
    return rotate(dk, n_kv_heads, pos_offset, Rotary(theta=base), True, implementation)


@functools.partial(jax.jit, static_argnums=(1, 4), donate_argnums=0)
def rope_traced_base(
    x: jax.Array, heads: int, pos_offset: jax.Array | int, base: jax.Array, implementation: str | None = None
) -> jax.Array:
    """`rope_q` or `rope_k` with a base that is traced, a float32 scalar: it may change, and be learned, without
    compiling again. Its frequencies are float32 and so their angles good to about 1e-7 of themselves; those of a static
    base are exact."""
    head_dim = x.shape[1] // heads
    pairs = head_dim // 2
    freqs = base ** (-jnp.arange(pairs, dtype=base.dtype) / pairs)
    return rotate(x, heads, pos_offset, Rotary(freqs=freqs, rotary_dim=head_dim), False, implementation)


def main() -> None:
    seq, n_heads, n_kv_heads, head_dim, pos_offset = 4, 8, 2, 64, 1000
    keys = jax.random.split(jax.random.key(0))
    q = jax.random.normal(keys[0], (seq, n_heads * head_dim))
    k = jax.random.normal(keys[1], (seq, n_kv_heads * head_dim))
    q_before, k_before = jnp.copy(q), jnp.copy(k)

    rotated_q, rotated_k = rope_q(q, n_heads, pos_offset), rope_k(k, n_kv_heads, pos_offset)
    print(f"q {rotated_q.shape} with {n_heads} heads, k {rotated_k.shape} with {n_kv_heads}: rows at 1000 ... 1003")
    print(f"buffers given away: q {q.is_deleted()}, k {k.is_deleted()}")

    traced = rope_traced_base(jnp.copy(q_before), n_heads, pos_offset, jnp.float32(1e4))
    print(f"a traced base differs from a static one by {jnp.abs(traced - rotated_q).max():.0e}")

    q, k = rope_q_backward(rotated_q, n_heads, pos_offset), rope_k_backward(rotated_k, n_kv_heads, pos_offset)
    undone = all(bool(jnp.allclose(a, b, atol=1e-5)) for a, b in ((q, q_before), (k, k_before)))
    print(f"backward undoes forward: {undone}")


if __name__ == "__main__":
    main()
