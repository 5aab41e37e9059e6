"""Packed documents: several in one row without padding, each as if it were alone.

Two things make it so: positions that begin anew with each document, and a mask that keeps attention within them.

``python examples/packed.py`` runs it.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jax_rope import Rotary, adapters, positions, rope_qk

LENGTHS = (37, 64, 22)
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
ROTARY = Rotary(theta=500_000.0, pairing="half")
IMPLEMENTATION = "webgpu" if adapters() else "jnp"


@jax.jit
def attention(q: jax.Array, k: jax.Array, v: jax.Array, where: jax.Array, mask: jax.Array) -> jax.Array:
    """Of the packed q [T, Hq, D] and k, v [T, Hk, D] at the positions ``where`` [T], as far as the mask [T, T] lets."""
    q, k = rope_qk(q, k, where, ROTARY, implementation=IMPLEMENTATION)
    return jax.nn.dot_product_attention(q, k, v, mask=mask[None])  # one mask for all heads


def main() -> None:
    total = sum(LENGTHS)
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((total, HEADS, HEAD_DIM), (total, KV_HEADS, HEAD_DIM), (total, KV_HEADS, HEAD_DIM))
    q, k, v = (jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True))

    # The boundaries, as variable-length attention takes them, or an id for each token: the positions are the same.
    cu_seqlens = np.cumsum([0, *LENGTHS], dtype=np.int32)
    segment_ids = np.repeat(np.arange(len(LENGTHS), dtype=np.int32), LENGTHS)
    where = positions.from_cu_seqlens(cu_seqlens, total)
    print("positions around the first boundary:", *where[35:40])
    print("by segment ids they are the same:", bool((where == positions.from_segment_ids(segment_ids)).all()))

    causal = np.tri(total, dtype=bool)
    blocks = causal & (segment_ids[:, None] == segment_ids)
    packed = attention(q, k, v, where, blocks)

    def off(result: jax.Array) -> float:
        """How far it is from what each document gets by itself, at positions 0, 1, ..."""
        spans = [slice(a, b) for a, b in itertools.pairwise(cu_seqlens)]
        alone = [attention(q[s], k[s], v[s], jnp.arange(s.stop - s.start), causal[s, s]) for s in spans]
        return float(jnp.abs(result - jnp.concatenate(alone)).max())

    print(f"packed and alone differ by {off(packed):.0e}")
    print(f"without the mask by {off(attention(q, k, v, where, causal)):.0e}")
    # RoPE is relative, so within a mask positions may also run on. But the rotated keys, which a cache keeps, are then
    # not the document's own, and scaling rules that go by the length would see that of the whole row.
    running = jnp.arange(total)
    print(f"with the mask and positions that run on by {off(attention(q, k, v, running, blocks)):.0e}", end="")
    own = rope_qk(q, k, where, ROTARY, implementation=IMPLEMENTATION)[1]
    other = rope_qk(q, k, running, ROTARY, implementation=IMPLEMENTATION)[1]
    print(f", but the keys by {float(jnp.abs(own - other).max()):.0e}")

    # And nothing of one document's loss reaches another.
    def loss(k: jax.Array) -> jax.Array:
        return jnp.sum(attention(q, k, v, where, blocks)[cu_seqlens[2] :] ** 2)

    gradient = jax.grad(loss)(k)
    leaked = float(jnp.abs(gradient[: cu_seqlens[2]]).max())
    print(f"gradient that reaches other documents: {leaked:.0f}")


if __name__ == "__main__":
    main()
