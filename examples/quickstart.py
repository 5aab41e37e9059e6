"""What there is to know at first: rotate, at which positions, in which pairs, and what comes of it.

``python examples/quickstart.py`` runs it.
"""

import jax
import jax.numpy as jnp

from jax_rope import Rotary, adapters, rope, rope_qk


def main() -> None:
    # The same call runs as WGSL kernels where there is a GPU or a software driver, and in jnp where there is neither.
    implementation = "webgpu" if adapters() else "jnp"
    print("implementation:", implementation, *adapters()[:1])

    # Arrays are [..., S, H, D]: tokens, heads, elements of a head. Without positions, tokens count from 0.
    x = jnp.broadcast_to(jnp.array([1.0, 0.0]), (3, 1, 2))
    turned = rope(x, implementation=implementation)[:, 0]
    print("(1, 0) at positions 0, 1, 2:", *(f"({a:.4f}, {b:.4f})" for a, b in turned))

    # What a model rotates is said once. Weights in Hugging Face's format pair the first half with the second one.
    rotary = Rotary(theta=500_000.0, pairing="half")
    q = jax.random.normal(jax.random.key(0), (2, 16, 8, 64))  # [B, S, H, D]
    k = jax.random.normal(jax.random.key(1), (2, 16, 2, 64))  # fewer heads: grouped-query attention
    q_all, k_all = rope_qk(q, k, None, rotary, implementation=implementation)

    # A step of decoding rotates one token. Its position is the number of tokens before it, traced or not.
    step = jax.jit(lambda q, k, offset: rope_qk(q, k, offset, rotary, implementation=implementation))
    q_last, k_last = step(q[:, -1:], k[:, -1:], 15)
    same = bool((q_last == q_all[:, -1:]).all() and (k_last == k_all[:, -1:]).all())
    print(f"the 16th token alone is rotated as among all: {same}")

    # Each row may have positions of its own, anywhere in int32. A score depends on how far q and k lie apart, no more.
    def score(position: int) -> float:
        where_q, where_k = [[position + 5], [position]], [[position], [position]]  # [B, S]
        a = rope(q[:, :1, :2], where_q, rotary, implementation=implementation)
        b = rope(k[:, :1], where_k, rotary, implementation=implementation)
        return float(jnp.vdot(a[0], b[0]))

    near, far = score(0), score(2_000_000_000)
    print(f"q five tokens behind k, at 0 and at 2,000,000,000: {near:.4f} and {far:.4f}")

    # Gradients are rotations the other way, and are kernels as well.
    def loss(q: jax.Array, k: jax.Array) -> jax.Array:
        q, k = rope_qk(q, k, 1_000_000, rotary, implementation=implementation)
        return jnp.mean(jax.nn.dot_product_attention(q, k, k, is_causal=True) ** 2)

    value, (dq, dk) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(q, k)
    print(f"loss {value:.4f}, gradients {dq.shape} and {dk.shape}")

    # A published model's config.json says all of it.
    config = {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32, "rope_theta": 500_000.0}
    print("a config.json as a Rotary:", Rotary.from_hf(config))


if __name__ == "__main__":
    main()
