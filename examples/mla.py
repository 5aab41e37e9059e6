"""Multi-head latent attention as DeepSeek-V3 has it: a small part of each query is rotated, and one key for all heads.

What a layer caches of a token is a latent vector, from which each head's keys and values are made, and one rotated key.
A latent could not be rotated: positions would come between it and the matrix that a query can absorb. So a head is in
two parts, one without positions, by the latent, and one with, by a key that all heads share.

``python examples/mla.py`` runs it.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rope import Rotary, adapters, rope_qk

# What DeepSeek-V3's config.json says about rotation. Other sizes of the layer below are a fraction of its.
CONFIG = {
    "model_type": "deepseek_v3",
    "qk_rope_head_dim": 64,
    "rope_theta": 10_000,
    "max_position_embeddings": 163_840,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}
ROTARY = Rotary.from_hf(CONFIG)  # of the rotated part by itself; reads neighbours, writes halves
CHANNELS, HEADS, LATENT, NOPE, ROPE, VALUE = 64, 4, 32, 16, 64, 16
# YaRN's temperature. Here cosine and sine carry none of it: mscale and mscale_all_dim cancel.
SCALE = (NOPE + ROPE) ** -0.5 * (0.1 * math.log(40) + 1) ** 2
IMPLEMENTATION = "webgpu" if adapters() else "jnp"


class Cache(NamedTuple):
    """The latents [B, T, C] and the rotated keys [B, T, R]: that is all."""

    latent: jax.Array
    key: jax.Array


def init(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {"q": (CHANNELS, HEADS, NOPE + ROPE), "latent": (CHANNELS, LATENT), "k_rope": (CHANNELS, ROPE)}
    shapes |= {"k": (LATENT, HEADS, NOPE), "v": (LATENT, HEADS, VALUE), "o": (HEADS, VALUE, CHANNELS)}
    return {n: jnp.asarray(rng.standard_normal(s) / math.sqrt(s[0]), jnp.float32) for n, s in shapes.items()}


def project(w: dict[str, jax.Array], x: jax.Array, offset) -> tuple[jax.Array, jax.Array, Cache]:
    """Of x [B, S, E] at positions from offset on: both parts of the queries, and what is to be cached."""
    q_nope, q_rope = jnp.split(jnp.einsum("bse,ehd->bshd", x, w["q"]), [NOPE], axis=-1)
    k_rope = (x @ w["k_rope"])[:, :, None]  # one head
    q_rope, k_rope = rope_qk(q_rope, k_rope, offset, ROTARY, implementation=IMPLEMENTATION)
    return q_nope, q_rope, Cache(x @ w["latent"], k_rope[:, :, 0])


@jax.jit
def prefill(w: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, Cache]:
    """All tokens at once, with keys and values written out for each head."""
    q_nope, q_rope, cache = project(w, x, 0)
    k_nope, v = (jnp.einsum("btc,chd->bthd", cache.latent, w[n]) for n in "kv")
    k_rope = jnp.broadcast_to(cache.key[:, :, None], (*k_nope.shape[:3], ROPE))
    q, k = jnp.concatenate([q_nope, q_rope], axis=-1), jnp.concatenate([k_nope, k_rope], axis=-1)
    scores = SCALE * jnp.einsum("bshd,bthd->bhst", q, k)
    weights = jax.nn.softmax(jnp.where(np.tri(x.shape[1], dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bhst,bthd,hde->bse", weights, v, w["o"]), cache


@jax.jit
def decode(w: dict[str, jax.Array], x: jax.Array, cache: Cache, offset: jax.Array) -> tuple[jax.Array, Cache]:
    """One token x [B, 1, E] behind offset others. The query absorbs the keys' matrix, so no key is ever written out."""
    q_nope, q_rope, new = project(w, x, offset)
    cache = Cache(*(jax.lax.dynamic_update_slice_in_dim(o, n, offset, 1) for o, n in zip(cache, new, strict=True)))
    absorbed = jnp.einsum("bshd,chd->bshc", q_nope, w["k"])
    scores = jnp.einsum("bshc,btc->bhst", absorbed, cache.latent) + jnp.einsum("bshd,btd->bhst", q_rope, cache.key)
    seen = jnp.arange(cache.key.shape[1]) <= offset
    weights = jax.nn.softmax(jnp.where(seen, SCALE * scores, -jnp.inf))
    return jnp.einsum("bhst,btc,chd,hde->bse", weights, cache.latent, w["v"], w["o"]), cache


def main() -> None:
    print(f"DeepSeek-V3's rotation: {ROTARY.pairing}, YaRN times {ROTARY.scaling.factor:g}, of {ROPE} elements")
    print(
        f"factor on cosine and sine: {ROTARY.attention_factor():g}; on the scores: {SCALE * (NOPE + ROPE) ** 0.5:.3f}"
    )

    batch, length, start = 2, 24, 16
    w, x = init(0), jax.random.normal(jax.random.key(0), (batch, length, CHANNELS), jnp.float32)
    with jax.default_matmul_precision("highest"):
        expected, _ = prefill(w, x)
        _, cache = prefill(w, x[:, :start])
        cache = Cache(*(jnp.pad(c, ((0, 0), (0, length - start), (0, 0))) for c in cache))
        steps = []
        for offset in range(start, length):
            y, cache = decode(w, x[:, offset : offset + 1], cache, jnp.int32(offset))
            steps.append(y)
    difference = float(jnp.abs(jnp.concatenate(steps, axis=1) - expected[:, start:]).max())
    assert difference < 1e-4, difference
    print(f"{length - start} decoded tokens and the prefill differ by {difference:.0e}")
    print(f"cached for each token: {LATENT + ROPE} numbers, not {HEADS * (NOPE + ROPE + VALUE)}")


if __name__ == "__main__":
    main()
