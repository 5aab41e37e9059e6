"""Training a small language model on real text, twice: with rotations as WGSL kernels, and in jnp.

The text is Python's own documentation, which the standard library carries; the model reads it byte by byte. Both runs
start from the same weights and see the same batches, and should learn the same.

``python examples/train.py`` runs it (needs rich), and ``--plot FILE.png`` draws the losses (needs matplotlib).
"""

import argparse
import functools
import math
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from jax_rope import Rotary, adapters, rope_qk

LAYERS, CHANNELS, HEADS, BATCH, TOKENS = 2, 64, 4, 16, 64
ROTARY = Rotary()
Params = dict[str, Any]


def init(vocabulary: int) -> Params:
    rng, c = np.random.default_rng(0), CHANNELS
    shapes = {"embedding": (vocabulary, c), "qkv": (LAYERS, c, 3 * c), "o": (LAYERS, c, c)}
    shapes |= {"up": (LAYERS, c, 4 * c), "down": (LAYERS, 4 * c, c)}
    return {n: jnp.asarray(rng.standard_normal(s) / math.sqrt(s[-2]), jnp.float32) for n, s in shapes.items()}


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def loss(params: Params, text: jax.Array, implementation: str) -> jax.Array:
    """The mean cross-entropy of each byte of int32 [B, S + 1] given those before it, in nats."""

    def layer(x: jax.Array, w: Params) -> tuple[jax.Array, None]:
        q, k, v = jnp.split((normalized(x) @ w["qkv"]).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        q, k = rope_qk(q, k, None, ROTARY, implementation=implementation)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["o"]
        return x + jax.nn.silu(normalized(x) @ w["up"]) @ w["down"], None

    layers = {name: w for name, w in params.items() if name != "embedding"}
    x, _ = jax.lax.scan(layer, params["embedding"][text[:, :-1]], layers)
    scores = jax.nn.log_softmax(normalized(x) @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(scores, text[:, 1:, None], axis=-1))


@functools.partial(jax.jit, static_argnames="implementation")
def update(params: Params, moments: tuple, step: jax.Array, text: jax.Array, implementation: str) -> tuple:
    """One step of Adam."""
    value, gradient = jax.value_and_grad(loss)(params, text, implementation)
    b1, b2, rate = 0.9, 0.99, 3e-3
    m, v = moments
    m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, gradient)
    v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, gradient)
    unbiased = rate / (1 - b1**step), 1 - b2**step
    params = jax.tree.map(lambda p, m, v: p - unbiased[0] * m / (jnp.sqrt(v / unbiased[1]) + 1e-8), params, m, v)
    return params, (m, v), value


def train(text: np.ndarray, steps: int, implementation: str) -> np.ndarray:
    """The loss of each step's batch."""
    params, rng = init(int(text.max()) + 1), np.random.default_rng(1)
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments, losses = (zeros, zeros), []
    for step in track(range(1, steps + 1), f"{implementation:6}", console=Console(stderr=True)):
        batch = text[rng.integers(0, len(text) - TOKENS, (BATCH, 1)) + np.arange(TOKENS + 1)]
        params, moments, value = update(params, moments, jnp.float32(step), batch, implementation)
        losses.append(float(value))
    return np.array(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small language model with both implementations.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plot", metavar="FILE.png", help="draw the losses (needs matplotlib)")
    arguments = parser.parse_args()

    letters, text = np.unique(np.frombuffer("\n".join(topics.values()).encode(), np.uint8), return_inverse=True)
    text = text.astype(np.int32)
    print(f"{len(text):,} bytes of documentation, of {len(letters)} kinds: log is {math.log(len(letters)):.2f} nats")
    curves = {
        implementation: train(text, arguments.steps, implementation)
        for implementation in ("jnp", *(["webgpu"] if adapters() else []))
    }
    for implementation, losses in curves.items():
        print(f"{implementation:6} loss {losses[0]:.3f} at first, {losses[-10:].mean():.3f} over the last ten steps")
    if len(curves) == 2:
        # Rounding differs in the last bit, and training multiplies that, but slowly.
        difference = np.abs(curves["jnp"] - curves["webgpu"]).max()
        assert difference < 1e-4, difference
        print(f"the curves agree within 0.0001 nats: {difference < 1e-4} ({difference:.0e})")

    if arguments.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        for (implementation, losses), style in zip(curves.items(), ("-", "--"), strict=False):
            axes.plot(losses, style, label=implementation)
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.legend()
        figure.savefig(arguments.plot, dpi=120)
        print("plotted to", arguments.plot)


if __name__ == "__main__":
    main()
