"""A Llama in plain JAX, read from a GGUF file, whose queries and keys `jax_rope.rope_qk` rotates.

``python -m jax_rope demo`` runs it. In a program of your own::

    config, params, tokenizer = load("model.gguf")
    for token, _ in generate(params, config, tokenizer.encode("The capital of France is").ids, 24):
        print(tokenizer.decode([token]), end="", flush=True)

Shapes are written with B sequences, S tokens of each in this call, T places in the cache, L layers, E channels,
Hq query heads, Hk key and value heads, D channels of a head and V tokens in the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_rope import Rotary, rope_qk

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

Params = dict[str, Any]

# One layer's weights, by their names in the file.
LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are found in the text before it is split


@dataclass(frozen=True)
class Config:
    """What the file's metadata say of the model. Hashable: static under ``jit``."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    epsilon: float
    rotary: Rotary


class Cache(NamedTuple):
    """The rotated keys and the values of the tokens so far, each float32 [L, B, T, Hk, D]."""

    k: jax.Array
    v: jax.Array


def empty_cache(config: Config, batch: int, length: int) -> Cache:
    """Room for ``length`` tokens of each of ``batch`` sequences."""
    shape = (config.layers, batch, length, config.kv_heads, config.head_dim)
    return Cache(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight


def attention(
    w: Params,
    config: Config,
    x: jax.Array,
    cache: Cache,
    place: tuple[jax.Array, jax.Array],
    implementation: str | None,
) -> tuple[jax.Array, Cache]:
    """Causal grouped-query attention.

    Args:
      w: the layer's weights.
      config: the model's.
      x: float32 [B, S, E].
      cache: of all layers.
      place: the layer's index and the number of tokens that the cache holds, int32 scalars.
      implementation: of the rotation.

    Returns:
      What each token gathers from those up to itself, float32 [B, S, E], and the cache with these S tokens in it.
    """
    layer, offset = place
    batch, length, _ = x.shape
    q = (x @ w["attn_q"].T).reshape(batch, length, config.heads, config.head_dim)
    k = (x @ w["attn_k"].T).reshape(batch, length, config.kv_heads, config.head_dim)
    v = (x @ w["attn_v"].T).reshape(batch, length, config.kv_heads, config.head_dim)

    # GGUF files order the rows of a Llama's Q and K for interleaved pairs, which is Rotary's default.
    q, k = rope_qk(q, k, offset, config.rotary, implementation=implementation)

    zero = jnp.int32(0)  # a bare 0 would be an int64 in x64 mode, and all five must be alike

    def put(old, new):
        return jax.lax.dynamic_update_slice(old, new[None], (layer, zero, offset, zero, zero))

    cache = jax.tree.map(put, cache, Cache(k, v))
    seen = jnp.arange(cache.k.shape[2])[None] <= offset + jnp.arange(length)[:, None]
    y = jax.nn.dot_product_attention(q, cache.k[layer], cache.v[layer], mask=seen[None, None])
    return y.reshape(batch, length, -1) @ w["attn_output"].T, cache


def mlp(w: Params, x: jax.Array) -> jax.Array:
    """SwiGLU of x, float32 [..., E]."""
    return (jax.nn.silu(x @ w["ffn_gate"].T) * (x @ w["ffn_up"].T)) @ w["ffn_down"].T


def forward(
    params: Params,
    config: Config,
    tokens: jax.Array,
    cache: Cache,
    offset: jax.Array,
    implementation: str | None = None,
) -> tuple[jax.Array, Cache]:
    """The next token's logits.

    Args:
      params: as `load` returns them.
      config: as `load` returns it.
      tokens: int32 [B, S].
      cache: what the call before returned, or `empty_cache`.
      offset: how many tokens the cache holds, an int32 scalar.
      implementation: of the rotation, see `jax_rope.rope_qk`.

    Returns:
      The logits of the token after the last one, float32 [B, V], and the cache with these S tokens in it.
    """

    def block(carry, inputs):
        x, cache = carry
        layer, w = inputs
        normed = rms_norm(x, w["attn_norm"], config.epsilon)
        attended, cache = attention(w, config, normed, cache, (layer, offset), implementation)
        x = x + attended
        return (x + mlp(w, rms_norm(x, w["ffn_norm"], config.epsilon)), cache), None

    with jax.default_matmul_precision("highest"):
        x = params["embedding"][tokens]
        # One layer is compiled, whatever their number, with one callback.
        layers = jnp.arange(config.layers, dtype=jnp.int32), params["layers"]
        (x, cache), _ = jax.lax.scan(block, (x, cache), layers)
        return rms_norm(x[:, -1], params["norm"], config.epsilon) @ params["output"].T, cache


# Compiled for each S, so once for the prompt and once for single tokens: the offset is traced.
step = jax.jit(forward, static_argnames=("config", "implementation"), donate_argnames="cache")


def generate(
    params: Params, config: Config, prompt: Sequence[int], count: int, implementation: str | None = None
) -> Iterator[tuple[int, jax.Array]]:
    """Greedy decoding: ``count`` times the likeliest next token and the logits, float32 [V], that it was taken from."""
    cache, offset = empty_cache(config, 1, len(prompt) + count), 0
    tokens = list(prompt)
    for _ in range(count):
        logits, cache = step(params, config, jnp.array([tokens], jnp.int32), cache, jnp.int32(offset), implementation)
        offset += len(tokens)
        tokens = [int(logits[0].argmax())]
        yield tokens[0], logits[0]


def load(
    path: str | PathLike[str], progress: Callable[[int, int], None] | None = None
) -> tuple[Config, Params, "Tokenizer"]:
    """Reads a GGUF file of the Llama architecture with a byte-level BPE vocabulary, whatever its quantisation.

    Args:
      path: of the file.
      progress: called with the number of bytes of weights read, and of all of them.

    Returns:
      The configuration, the weights as float32 arrays, those of the layers stacked to [L, ...] and every matrix as
      [out, in], and the tokenizer.

    Raises:
      ValueError: the file is no such file; the message names what is not supported.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (IndexError, ValueError) as error:
        raise ValueError(f"not a complete GGUF file: {error}") from error
    config = read_config(reader)
    return config, read_params(reader, config.layers, progress or (lambda done, total: None)), read_tokenizer(reader)


def metadata(reader: "GGUFReader", key: str, *default: Any) -> Any:
    """The value of ``key``, or the default; without one a ValueError."""
    if key in reader.fields:
        return reader.fields[key].contents()
    if not default:
        raise ValueError(f"the file has no {key}")
    return default[0]


def require(reader: "GGUFReader", key: str, *supported: Any) -> None:
    """That the value of ``key`` is among those supported; None is a missing one."""
    value = metadata(reader, key, None)
    if value not in supported:
        raise ValueError(f"{key} must be {' or '.join(map(repr, supported))}, got {value!r}")


def read_config(reader: "GGUFReader") -> Config:
    require(reader, "general.architecture", "llama")
    require(reader, "llama.rope.scaling.type", None, "none")
    require(reader, "llama.rope.scale_linear", None, 1.0)
    require(reader, "llama.expert_count", None, 0)
    heads = metadata(reader, "llama.attention.head_count")
    head_dim = metadata(reader, "llama.attention.key_length", metadata(reader, "llama.embedding_length") // heads)
    require(reader, "llama.attention.value_length", None, head_dim)
    return Config(
        layers=metadata(reader, "llama.block_count"),
        heads=heads,
        kv_heads=metadata(reader, "llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        context=metadata(reader, "llama.context_length"),
        epsilon=metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
        rotary=Rotary(
            theta=metadata(reader, "llama.rope.freq_base", 10_000.0),
            rotary_dim=metadata(reader, "llama.rope.dimension_count", None),
        ),
    )


def read_params(reader: "GGUFReader", layers: int, progress: Callable[[int, int], None]) -> Params:
    from gguf.quants import dequantize

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    total, done = sum(tensor.n_bytes for tensor in reader.tensors), 0

    def take(name: str) -> np.ndarray:
        nonlocal done
        if name not in tensors:
            raise ValueError(f"the file has no tensor {name}")
        tensor = tensors.pop(name)
        done += tensor.n_bytes
        progress(done, total)
        return dequantize(tensor.data, tensor.tensor_type)

    embedding = jnp.asarray(take("token_embd.weight"))
    params = {
        "embedding": embedding,
        "layers": {name: jnp.stack([take(f"blk.{i}.{name}.weight") for i in range(layers)]) for name in LAYER},
        "norm": jnp.asarray(take("output_norm.weight")),
        "output": jnp.asarray(take("output.weight")) if "output.weight" in tensors else embedding,  # else tied
    }
    if tensors:  # biases, frequency factors (rope_freqs.weight), experts: the results would be wrong without them
        raise ValueError(f"the file has tensors that are not supported: {', '.join(sorted(tensors)[:5])}")
    return params


def read_tokenizer(reader: "GGUFReader") -> "Tokenizer":
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    pre = {"gpt-2": by_bytes, "smollm": pre_tokenizers.Sequence([digits, by_bytes])}
    require(reader, "tokenizer.ggml.model", "gpt2")
    require(reader, "tokenizer.ggml.pre", *pre)
    require(reader, "tokenizer.ggml.add_space_prefix", None, False)

    tokens = metadata(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre[metadata(reader, "tokenizer.ggml.pre")]
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, metadata(reader, "tokenizer.ggml.token_type"), strict=True):
        if kind in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    if metadata(reader, "tokenizer.ggml.add_bos_token", False):
        bos = metadata(reader, "tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing("bos $A", special_tokens=[("bos", bos)])
    return tokenizer
