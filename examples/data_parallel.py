"""Data-parallel training in several processes, each of which rotates on an adapter of its own.

One process::

    python examples/data_parallel.py

Two on one machine, each in a terminal of its own (on a cluster: one on each machine, with the first one's address)::

    python examples/data_parallel.py --coordinator localhost:9876 --processes 2 --process 0
    python examples/data_parallel.py --coordinator localhost:9876 --processes 2 --process 1

All print the same parameters, whatever the number of processes.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_rope import rope_qk

BATCH, TOKENS, VOCABULARY, CHANNELS, HEADS = 4, 16, 11, 16, 2


def initial() -> dict[str, jax.Array]:
    """Weights of one attention layer, float32."""
    rng = np.random.default_rng(0)
    head = (CHANNELS, HEADS, CHANNELS // HEADS)
    shapes = {"embedding": (VOCABULARY, CHANNELS), "q": head, "k": head, "v": head, "output": (*head[1:], CHANNELS)}
    return {name: jnp.asarray(0.3 * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def loss(params: dict[str, jax.Array], tokens: jax.Array, implementation: str | None) -> jax.Array:
    """The mean cross-entropy of each next token, for tokens int32 [B, S]."""
    x = params["embedding"][tokens]
    q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[name]) for name in "qkv")
    q, k = rope_qk(q, k, implementation=implementation)
    y = x + jnp.einsum("bshe,hed->bsd", jax.nn.dot_product_attention(q, k, v, is_causal=True), params["output"])
    scores = jax.nn.log_softmax(y[:, :-1] @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1))


def train(steps: int, implementation: str | None) -> tuple[dict[str, jax.Array], jax.Array]:
    """Gradient descent on one batch that is sharded over all devices of all processes: (parameters, last loss)."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (BATCH, TOKENS)).astype(np.int32)
    batch = jax.make_array_from_callback(tokens.shape, sharded, lambda index: tokens[index])
    params = jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, replicated, lambda index: np.asarray(a)[index]), initial()
    )

    def step(params, tokens):
        value, gradient = jax.value_and_grad(
            lambda p: jax.lax.pmean(loss(p, tokens, implementation), "data")  # so are the gradients then
        )(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient), value

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P())))
    for _ in range(steps):
        params, value = step(params, batch)
    return params, value


def main() -> None:
    parser = argparse.ArgumentParser(description="Data-parallel training, the same in any number of processes.")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0; without it there is one process")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="which of them this one is")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--implementation", choices=("webgpu", "jnp"))
    arguments = parser.parse_args()
    if arguments.coordinator:
        jax.distributed.initialize(arguments.coordinator, arguments.processes, arguments.process)
    params, value = train(arguments.steps, arguments.implementation)
    print(f"process {jax.process_index()} of {jax.process_count()}, loss {float(value):.6f}")
    for name, array in params.items():
        print(name, " ".join(f"{number:.5f}" for number in np.asarray(array).ravel()[:8]))


if __name__ == "__main__":
    main()
