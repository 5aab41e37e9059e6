"""A small decoder with grouped-query attention and random weights: rotation by tables of cosines and sines, a check of
its gradient, and greedy generation with a cache of rotated keys, which may be a window that slides over the text.

Shapes are written with B sequences, S tokens of each in this call, T places in the cache, L layers, E channels,
Hq query heads, Hk key and value heads, D channels of a head and V tokens in the vocabulary.

``python examples/tiny_gqa.py`` runs it.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_rope import Rotary, rope_cached

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 4, 2, 32, 64
CHANNELS = HEADS * HEAD_DIM
ROTARY = Rotary(theta=10_000.0)

Params = dict[str, Any]


class Cache(NamedTuple):
    """The rotated keys and the values of the tokens so far, each float32 [L, B, T, Hk, D], and the tables of cosines
    and sines of the positions 0 ... T - 1, each float32 [T, D / 2]."""

    k: jax.Array
    v: jax.Array
    cos: jax.Array
    sin: jax.Array


@jax.jit
def init(key: jax.Array) -> Params:
    """Random weights, float32; every matrix [in, out], those of the layers stacked to [L, in, out]."""
    kv = KV_HEADS * HEAD_DIM
    shapes = {"q": (CHANNELS, CHANNELS), "k": (CHANNELS, kv), "v": (CHANNELS, kv), "o": (CHANNELS, CHANNELS)}
    shapes |= {"up": (CHANNELS, 4 * CHANNELS), "down": (4 * CHANNELS, CHANNELS)}
    embedding, output, *layers = jax.random.split(key, 2 + len(shapes))

    def matrix(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32) * shape[-2] ** -0.5

    return {
        "embedding": jax.random.normal(embedding, (VOCABULARY, CHANNELS), jnp.float32),
        "output": matrix(output, CHANNELS, VOCABULARY),
        "layers": {n: matrix(k, LAYERS, *shapes[n]) for n, k in zip(shapes, layers, strict=True)},
    }


@functools.partial(jax.jit, static_argnames=("batch", "length"))
def empty_cache(batch: int, length: int) -> Cache:
    """Room for ``length`` tokens of each of ``batch`` sequences."""
    kv = jnp.zeros((LAYERS, batch, length, KV_HEADS, HEAD_DIM), jnp.float32)
    return Cache(kv, jnp.copy(kv), *ROTARY.tables(jnp.arange(length, dtype=jnp.int32), HEAD_DIM))


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def forward(
    params: Params, tokens: jax.Array, cache: Cache, offset: jax.Array | int = 0, implementation: str | None = None
) -> tuple[jax.Array, Cache]:
    """The logits after each token.

    Args:
      params: from `init`.
      tokens: int32 [B, S].
      cache: what the call before returned, or `empty_cache`.
      offset: how many tokens the cache holds, an int32 scalar; offset + S <= T.
      implementation: of the rotation, see `jax_rope.rope_cached`.

    Returns:
      The logits, float32 [B, S, V], and the cache with these S tokens in it.
    """
    (batch, length), places = tokens.shape, cache.k.shape[2]
    offset = jnp.asarray(offset, jnp.int32)
    rows = offset + jnp.arange(length, dtype=jnp.int32)
    cos, sin = (table.at[rows].get(mode="fill", fill_value=jnp.nan) for table in (cache.cos, cache.sin))
    seen = jnp.arange(places, dtype=jnp.int32)[None] <= rows[:, None]
    zero = jnp.int32(0)  # all indices of a slice have one dtype

    def heads(x: jax.Array, weight: jax.Array) -> jax.Array:
        return (x @ weight).reshape(batch, length, -1, HEAD_DIM)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, new, (zero, offset, zero, zero))

    def block(x: jax.Array, layer: tuple[Params, jax.Array, jax.Array]) -> tuple[jax.Array, tuple]:
        w, old_k, old_v = layer
        h = normalized(x)
        q, k = (rope_cached(heads(h, w[n]), cos, sin, implementation=implementation) for n in ("q", "k"))
        k, v = put(old_k, k), put(old_v, heads(h, w["v"]))
        y = jax.nn.dot_product_attention(q, k, v, mask=seen[None, None])
        x = x + y.reshape(batch, length, CHANNELS) @ w["o"]
        return x + jax.nn.silu(normalized(x) @ w["up"]) @ w["down"], (k, v)

    with jax.default_matmul_precision("highest"):
        x, (k, v) = jax.lax.scan(block, params["embedding"][tokens], (params["layers"], cache.k, cache.v))
        return normalized(x) @ params["output"], cache._replace(k=k, v=v)


# Compiled for each S: for the prompt, for single tokens and for a full window. The offset is traced.
step = jax.jit(forward, static_argnames="implementation", donate_argnames="cache")


def full(params: Params, tokens: jax.Array, implementation: str | None = None) -> jax.Array:
    """The logits after each token, float32 [B, S, V], in one pass over all of int32 [B, S]."""
    return step(params, tokens, empty_cache(*tokens.shape), 0, implementation)[0]


def loss(params: Params, tokens: jax.Array, implementation: str | None = None) -> jax.Array:
    """The mean cross-entropy of each token of int32 [B, S] given those before it, a float32 scalar."""
    logits = jax.nn.log_softmax(full(params, tokens[:, :-1], implementation))
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))


def check_gradient(
    params: Params, tokens: jax.Array, key: jax.Array, implementation: str | None = None
) -> tuple[float, float]:
    """The slope of `loss` in a random direction of the weights that make queries and keys, which act through the
    rotation alone: (by its gradient, by differences)."""

    w = params["layers"]
    keys = zip(("q", "k"), jax.random.split(key), strict=True)
    direction = {n: jax.random.normal(key, w[n].shape, jnp.float32) for n, key in keys}

    def at(distance: jax.Array) -> jax.Array:
        moved = {n: w[n] + distance * towards for n, towards in direction.items()}
        return loss(params | {"layers": w | moved}, tokens, implementation)

    value_and_slope, distance = jax.jit(jax.value_and_grad(at)), 2e-3
    (before, _), (_, slope), (after, _) = map(value_and_slope, (-distance, 0.0, distance))
    return float(slope), float(after - before) / (2 * distance)


def generate(
    params: Params, prompt: Sequence[int], count: int, window: int | None = None, implementation: str | None = None
) -> Iterator[tuple[int, jax.Array]]:
    """Greedy decoding: ``count`` times the likeliest next token and the logits, float32 [V], that it was taken from.

    With a window, what comes next depends on the last ``window`` tokens alone. Once it is full, each step moves it by
    one token; the keys in the cache, rotated already, belong to other positions, and values to tokens that saw further
    back. So its tokens are computed anew, at positions 0 ... window - 1.
    """
    tokens, seen = list(prompt), 0
    places = len(prompt) + count if window is None else window
    cache = empty_cache(1, places)
    for _ in range(count):
        if len(tokens) > places:
            new, seen = tokens[-places:], 0  # overwrites all of the cache
        else:
            new = tokens[seen:]
        logits, cache = step(params, jnp.array([new], jnp.int32), cache, seen, implementation)
        seen += len(new)
        tokens.append(int(logits[0, -1].argmax()))
        yield tokens[-1], logits[0, -1]


def main() -> None:
    x = jnp.array([[[1.0, 0.0]], [[1.0, 0.0]]])  # [S, H, D]
    turned = rope_cached(x, *ROTARY.tables(jnp.arange(2, dtype=jnp.int32), 2)).reshape(2, 2)
    print("(1, 0) at positions 0 and 1:", *(f"({a:.6f}, {b:.6f})" for a, b in turned))
    print(f"their dot product: {jnp.vdot(*turned):.6f}")

    params, prompt = init(jax.random.key(0)), [3, 14, 15, 9, 26, 5]
    slopes = check_gradient(params, jnp.array([prompt], jnp.int32), jax.random.key(1))
    print(f"slope of the loss by its gradient {slopes[0]:.3f}, by differences {slopes[1]:.3f}")

    tokens = [token for token, _ in generate(params, prompt, 12)]
    print("generated with a cache:   ", *tokens)
    at_once = full(params, jnp.array([prompt + tokens], jnp.int32))[0].argmax(axis=-1)
    print(f"one pass over all of them says the same: {at_once[len(prompt) - 1 : -1].tolist() == tokens}")
    print("with a window of 8 tokens:", *(token for token, _ in generate(params, prompt, 12, window=8)))


if __name__ == "__main__":
    main()
