"""Sliding-window attention as Mistral has it: decoding forever with a cache that does not grow.

Each token sees the last W tokens, itself among them. The cache is a ring of W places: a token's key, rotated at the
token's own position, takes the place of that W tokens before it. Keys stay as they are while the window moves on, since
a score depends on the distance of query and key alone, and where in the ring a key lies does not matter at all.

`tiny_gqa.py` has the cache that grows, and a window that recomputes what is in it. ``python examples/decode.py`` runs
this one.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rope import Rotary, adapters, rope_qk

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 4, 2, 32, 16
ROTARY = Rotary(theta=10_000.0, pairing="half")
IMPLEMENTATION = "webgpu" if adapters() else "jnp"


class Ring(NamedTuple):
    """Rotated keys and values, each [B, W, Hk, D], and the position that each place holds, [W]; -1 is none yet."""

    k: jax.Array
    v: jax.Array
    positions: jax.Array


def step(ring: Ring, token: tuple[jax.Array, jax.Array, jax.Array, jax.Array]) -> tuple[Ring, jax.Array]:
    """One token's q [B, Hq, D] and k, v [B, Hk, D], and its position."""
    *qkv, position = token
    q, k, v = (x[:, None] for x in qkv)
    q, k = rope_qk(q, k, position, ROTARY, implementation=IMPLEMENTATION)
    place = position % WINDOW
    ring = Ring(
        jax.lax.dynamic_update_slice_in_dim(ring.k, k, place, 1),
        jax.lax.dynamic_update_slice_in_dim(ring.v, v, place, 1),
        ring.positions.at[place].set(position),
    )
    seen = ring.positions >= 0  # whatever is in the ring is within the window
    return ring, jax.nn.dot_product_attention(q, ring.k, ring.v, mask=seen[None, None, None])[:, 0]


@jax.jit
def decode(q: jax.Array, k: jax.Array, v: jax.Array, first: jax.Array) -> jax.Array:
    """Token after token of q [B, S, Hq, D] and k, v [B, S, Hk, D], at positions from first on, as one scan."""
    empty = jnp.zeros((k.shape[0], WINDOW, *k.shape[2:]), k.dtype)
    ring = Ring(empty, empty, jnp.full(WINDOW, -1, jnp.int32))
    tokens = *(jnp.moveaxis(x, 1, 0) for x in (q, k, v)), first + jnp.arange(q.shape[1], dtype=jnp.int32)
    return jnp.moveaxis(jax.lax.scan(step, ring, tokens)[1], 0, 1)


@jax.jit
def at_once(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same in one pass, with a mask as wide as the window."""
    q, k = rope_qk(q, k, None, ROTARY, implementation=IMPLEMENTATION)
    distance = np.subtract.outer(np.arange(q.shape[1]), np.arange(q.shape[1]))
    mask = (distance >= 0) & (distance < WINDOW)
    return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])


def main() -> None:
    tokens = 100
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, tokens, heads, HEAD_DIM), jnp.float32)
        for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS), strict=True)
    )
    expected = at_once(q, k, v)

    def off(result: jax.Array) -> float:
        return float(jnp.abs(result - expected).max())

    print(f"{tokens} tokens with a ring of {WINDOW} places")
    print(f"token by token and at once differ by {off(decode(q, k, v, jnp.int32(0))):.0e}")
    # A stream has no end, but int32 has. Until then the same tokens get the same attention, however late they come.
    last = 2**31 - tokens
    print(f"the same tokens from position {last:,} on by {off(decode(q, k, v, jnp.int32(last))):.0e}")


if __name__ == "__main__":
    main()
