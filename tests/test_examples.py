"""The examples that are systems in small: against the oracle and against formulas written out here, and as scripts."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from jax_rope import Rotary, rope_cached

EXAMPLES = Path(__file__).parent.parent / "examples"
GOLDEN = json.loads((Path(__file__).parent / "golden" / "hf_rotations.json").read_text())["cases"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


in_place, layer, huggingface, tiny = map(load, ("in_place_kernels", "layer", "huggingface", "tiny_gqa"))


def draw(rng, shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("in_place_kernels", "backward undoes forward: True"),
        ("in_place_kernels", "buffers given away: q True, k True"),
        ("layer", "programs compiled for 8 offsets: 1"),
        ("layer", "tokens that got NaN, where 6 of 16 lie beyond the tables: 6"),
        ("huggingface", "the padded row is rotated as the other: True"),
        ("tiny_gqa", "(1, 0) at positions 0 and 1: (1.000000, 0.000000) (0.540302, 0.841471)"),
        ("tiny_gqa", "one pass over all of them says the same: True"),
    ],
)
def test_script(printed, name, line):
    assert line in printed(name).splitlines()


@pytest.fixture(scope="module")
def printed():
    outputs = {}

    def run(name: str) -> str:
        if name not in outputs:
            command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            outputs[name] = done.stdout
        return outputs[name]

    return run


# in_place_kernels.py


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("pos_offset", [0, 4095, 2_000_000_000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_kernels_against_the_oracle(implementation, dtype, pos_offset, base, rng):
    """Four query heads, two key heads; forward and backward, in place."""
    positions = pos_offset + np.arange(5)
    for forward, backward, heads in (
        (in_place.rope_q, in_place.rope_q_backward, 4),
        (in_place.rope_k, in_place.rope_k_backward, 2),
    ):
        for kernel, direction in ((forward, 1), (backward, -1)):
            x = draw(rng, (5, heads * 16), dtype)
            before = np.asarray(x).copy().reshape(5, heads, 16)
            y = kernel(x, heads, pos_offset, base, implementation)
            assert x.is_deleted()
            assert y.shape == (5, heads * 16)
            exact = oracle.rotate(before, positions, theta=base, direction=direction)
            oracle.assert_exact(np.asarray(y).reshape(before.shape), exact, before)


def test_in_place_is_the_same_memory(rng):
    x = draw(rng, (64, 512))
    address = x.unsafe_buffer_pointer()
    assert in_place.rope_q(x, 8, 3, implementation="jnp").unsafe_buffer_pointer() == address


@pytest.mark.parametrize("heads", [4, 1])
def test_backward_kernel_is_the_transpose(implementation, heads, rng):
    """<R x, ct> = <x, R' ct>, and R' is what JAX's own gradient computes."""
    x, ct = draw(rng, (7, 32)), draw(rng, (7, 32))

    def forward(x):
        return in_place.rope_k(jnp.copy(x), heads, 100, 5e5, implementation)

    y, vjp = jax.vjp(forward, x)
    dx = in_place.rope_k_backward(jnp.copy(ct), heads, 100, 5e5, implementation)
    np.testing.assert_allclose(np.vdot(y, ct), np.vdot(x, dx), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(vjp(ct)[0], dx, atol=1e-6)
    assert np.abs(np.asarray(dx) - np.asarray(forward(ct))).max() > 0.1  # the forward is not its own transpose


@pytest.mark.parametrize("base", [1e4, 5e5])
def test_traced_base_is_the_static_one(implementation, base, compilations, rng):
    x = draw(rng, (5, 4 * 16))
    static = in_place.rope_q(jnp.copy(x), 4, 40, base, implementation)
    traced = in_place.rope_traced_base(jnp.copy(x), 4, 40, jnp.float32(base), implementation)
    other = jnp.float32(2 * base)
    compiled = compilations()
    exact = oracle.rotate(np.asarray(x).reshape(5, 4, 16), 40 + np.arange(5), theta=base).reshape(5, 64)
    np.testing.assert_allclose(static, exact, atol=2e-6)
    np.testing.assert_allclose(traced, exact, atol=1e-4)
    in_place.rope_traced_base(x, 4, 41, other, implementation)
    assert compilations() == compiled


def test_traced_base_has_a_gradient(implementation, rng):
    x, weights = draw(rng, (5, 32)), draw(rng, (5, 32))

    def ours(base):
        return jnp.vdot(in_place.rope_traced_base(jnp.copy(x), 2, 3, base, implementation), weights)

    def exact(base):
        y = oracle.rotate(np.asarray(x).reshape(5, 2, 16), 3 + np.arange(5), theta=base)
        return np.vdot(y, np.asarray(weights, np.float64).reshape(y.shape))

    expected = (exact(101.0) - exact(99.0)) / 2
    assert abs(expected) > 1e-3
    np.testing.assert_allclose(jax.grad(ours)(jnp.float32(100)), expected, rtol=1e-3)


@pytest.mark.parametrize("kernel", [in_place.rope_q, in_place.rope_k_backward])
def test_kernels_refuse_heads_that_do_not_divide_a_row(kernel):
    with pytest.raises(ValueError, match="a row of 30 elements does not divide into 4 heads"):
        kernel(jnp.ones((2, 30)), 4, 0)


# layer.py

MAX_SEQ = 16


def expected_by_layer(x, positions):
    return oracle.rotate(x, positions, theta=5e5, pairing="half")


@pytest.mark.parametrize("offset", [0, 7])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_forms_of_the_layer_agree(implementation, dtype, offset, rng):
    q, k = draw(rng, (2, 9, 4, 32), dtype), draw(rng, (2, 9, 2, 32), dtype)
    tables = layer.make_tables(MAX_SEQ, 32)
    assert tables.cos.shape == tables.sin.shape == (MAX_SEQ, 16)
    results = [
        layer.rotate_dynamic(q, k, offset, implementation),
        layer.rotate_cached(q, k, tables, offset, implementation),
        jitted_cached(q, k, tables, offset, implementation),
    ]
    if offset == 0:
        results.append(layer.rotate_static(q, k, implementation))
    for result in results:
        for actual, x in zip(result, (q, k), strict=True):
            exact = expected_by_layer(x, np.broadcast_to(offset + np.arange(9), (2, 9)))
            oracle.assert_exact(actual, exact, x, pairing="half")


jitted_cached = jax.jit(layer.rotate_cached, static_argnames="implementation")


def test_a_new_offset_compiles_nothing(implementation, compilations, rng):
    q, k, tables = draw(rng, (1, 1, 2, 8)), draw(rng, (1, 1, 1, 8)), layer.make_tables(MAX_SEQ, 8)
    compiled = set()
    for offset in (0, 5, 11, 15):
        rotated = np.asarray(layer.rotate_dynamic(q, k, offset, implementation)[0])
        cached = np.asarray(jitted_cached(q, k, tables, offset, implementation)[0])
        np.testing.assert_allclose(cached, rotated, atol=1e-6)
        np.testing.assert_allclose(rotated, expected_by_layer(q, np.full((1, 1), offset)), atol=1e-6)
        compiled.add(compilations())
    assert len(compiled) == 1


def test_layer_gradients(implementation, rng):
    q, k, tables = draw(rng, (2, 5, 4, 16)), draw(rng, (2, 5, 2, 16)), layer.make_tables(MAX_SEQ, 16)
    ct = draw(rng, q.shape), draw(rng, k.shape)
    positions = np.broadcast_to(6 + np.arange(5), (2, 5))
    for f in (
        lambda q, k: layer.rotate_dynamic(q, k, 6, implementation),
        lambda q, k: layer.rotate_cached(q, k, tables, 6, implementation),
    ):
        for actual, c in zip(jax.vjp(f, q, k)[1](ct), ct, strict=True):
            exact = oracle.rotate(c, positions, theta=5e5, pairing="half", direction=-1)
            oracle.assert_exact(actual, exact, c, pairing="half")


@pytest.mark.parametrize("offset", [9, 16, -1, -8, 2**31 - 1, -(2**31), 2**40])
def test_a_known_offset_beyond_the_tables_raises(offset):
    x, tables = jnp.ones((1, 8, 1, 8)), layer.make_tables(MAX_SEQ, 8)
    last = offset + 7
    with pytest.raises(ValueError, match=f"positions {offset} to {last} do not lie in tables of the positions 0 to 15"):
        layer.rotate_cached(x, x, tables, offset)


@pytest.mark.parametrize("offset", [8, 9, 12, 15, 16, 1000, 2**31 - 1, -1, -3, -8, -16, -(2**31)])
def test_a_traced_offset_beyond_the_tables_gives_nan(implementation, offset, rng):
    """Never another row: neither the last one's, nor rows moved as a whole, nor rows counted from the end."""
    q, k = draw(rng, (1, 8, 2, 8)), draw(rng, (1, 8, 1, 8))
    results = jitted_cached(q, k, layer.make_tables(MAX_SEQ, 8), jnp.int32(offset), implementation)
    positions = offset + np.arange(8)
    within = (positions >= 0) & (positions < MAX_SEQ)
    for actual, x in zip(results, (q, k), strict=True):
        exact = expected_by_layer(x, np.where(within, positions, 0)[None])
        np.testing.assert_allclose(actual[:, within], exact[:, within], atol=2e-6)
        assert np.isnan(np.asarray(actual)[:, ~within]).all()


# huggingface.py


@pytest.mark.parametrize("name", ["llama-half-gqa", "qwen2-yarn-attention-factor", "phi3-longrope-short"])
@pytest.mark.parametrize("form", ["rows", "caches", "unsqueeze_dim=2"])
def test_rotations_are_those_of_transformers(implementation, form, name):
    (case,) = (case for case in GOLDEN if case["name"] == name)
    (position_ids,) = positions = np.array(case["positions"])
    rotary = Rotary.from_hf(case["config"])
    arrays = {n: np.array(case[n], np.float32).reshape(case[f"shape_{n[0]}"]) for n in ("q", "k", "q_out", "k_out")}
    q, k, out = jnp.asarray(arrays["q"]), jnp.asarray(arrays["k"]), [arrays["q_out"], arrays["k_out"]]
    if form == "caches":
        cos, sin = huggingface.rotary_embedding(np.arange(1001), rotary, 16)
        rotated = huggingface.apply_rotary_pos_emb(q, k, cos, sin, positions, implementation=implementation)
    elif form == "rows":
        cos, sin = huggingface.rotary_embedding(positions, rotary, 16)
        assert cos.shape == sin.shape == (1, 5, 16)
        rotated = huggingface.apply_rotary_pos_emb(q, k, cos, sin, implementation=implementation)
    else:
        cos, sin = huggingface.rotary_embedding(positions, rotary, 16)
        q, k = (jnp.swapaxes(x, 1, 2) for x in (q, k))
        rotated = huggingface.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2, implementation=implementation)
        out = [np.swapaxes(x, 1, 2) for x in out]
    tokens = 2 if form != "unsqueeze_dim=2" else 1
    for actual, expected in zip(rotated, out, strict=True):
        difference = np.abs(np.moveaxis(np.asarray(actual) - expected, tokens, 0)).reshape(5, -1).max(axis=-1)
        assert (difference < np.where(position_ids >= 200, 2e-4, 1e-5)).all(), difference


def test_cos_and_sin_as_transformers_makes_them():
    position_ids = np.array([[0, 1, 2, 3], [7, 9, 1000, 3]])
    cos, sin = huggingface.rotary_embedding(position_ids, Rotary(theta=5e5, pairing="half"), 32)
    assert cos.dtype == sin.dtype == jnp.float32
    for actual, expected in zip((cos, sin), oracle.cos_sin(5e5, 32, position_ids), strict=True):
        np.testing.assert_allclose(actual, np.concatenate([expected, expected], axis=-1), atol=1e-6)
    with pytest.raises(ValueError, match="half pairing, got 'interleaved'"):
        huggingface.rotary_embedding(position_ids, Rotary(), 32)


def wide(positions, rotary_dim=16):
    """cos and sin over the whole width from the oracle, not from the example."""
    pair = oracle.cos_sin(1e4, rotary_dim, np.asarray(positions))
    return [jnp.asarray(np.concatenate([t, t], axis=-1), jnp.float32) for t in pair]


def expected_by_heads(x, positions, **window):
    """For x [B, H, S, D]."""
    swapped = np.swapaxes(np.asarray(x), 1, 2)
    positions = np.broadcast_to(positions, swapped.shape[:2])
    return np.swapaxes(oracle.rotate(swapped, positions, pairing="half", **window), 1, 2)


# Two rows padded on the left to unlike lengths, with 1 where there is padding, as transformers fills it in.
LEFT_PADDED = np.array([[1, 1, 1, 0, 1, 2], [1, 0, 1, 2, 3, 4]])


@pytest.mark.parametrize("position_ids", [LEFT_PADDED, LEFT_PADDED[:1], np.arange(6), LEFT_PADDED[::-1] + 90])
@pytest.mark.parametrize("old", [False, True])
def test_every_row_has_its_own_position_ids(implementation, old, position_ids, rng):
    """unslothai/unsloth#3699; values that were ignored: NVIDIA/Megatron-LM#453."""
    q, k = draw(rng, (2, 4, 6, 16)), draw(rng, (2, 2, 6, 16))
    if old:
        tables, arguments = wide(np.arange(100)), (jnp.asarray(position_ids, jnp.int32),)
    else:
        tables, arguments = wide(position_ids), ()
    result = huggingface.apply_rotary_pos_emb(q, k, *tables, *arguments, implementation=implementation)
    for actual, x in zip(result, (q, k), strict=True):
        oracle.assert_exact(actual, expected_by_heads(x, position_ids), np.asarray(x), pairing="half")


def test_left_padding_changes_no_token(implementation, rng):
    q, k = draw(rng, (1, 2, 4, 16)), draw(rng, (1, 1, 4, 16))
    alone = [expected_by_heads(x, np.arange(4)[None]) for x in (q, k)]
    padded = [jnp.pad(x, ((0, 1), (0, 0), (2, 0), (0, 0))) for x in (q, k)]  # and an empty row behind
    mask = jnp.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], jnp.int32)
    position_ids = huggingface.positions.from_mask(mask)
    cos, sin = huggingface.rotary_embedding(position_ids, Rotary(pairing="half"), 16)
    rotated = huggingface.apply_rotary_pos_emb(*padded, cos, sin, implementation=implementation)
    for actual, expected in zip(rotated, alone, strict=True):
        np.testing.assert_allclose(actual[:1, :, 2:], expected, atol=2e-6)


def test_position_ids_beyond_the_cache_give_nan(implementation, rng):
    position_ids = np.array([[0, 9, 10, 11], [-1, 2**31 - 1, 3, -10]], np.int32)
    within = (position_ids >= 0) & (position_ids < 10)
    q, k = draw(rng, (2, 4, 4, 16)), draw(rng, (2, 2, 4, 16))
    f = jax.jit(huggingface.apply_rotary_pos_emb, static_argnames=("unsqueeze_dim", "implementation"))
    for actual, x in zip(f(q, k, *wide(np.arange(10)), position_ids, 1, implementation), (q, k), strict=True):
        exact = expected_by_heads(x, np.where(within, position_ids, 0))
        actual, exact = (np.swapaxes(y, 1, 2) for y in (actual, exact))
        np.testing.assert_allclose(actual[within], exact[within], atol=2e-6)
        assert np.isnan(actual[~within]).all()


@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_partial_rotation_with_whole_tables(implementation, rotary_dim, rng):
    """Tables up to half as wide as the head hold an entry for each element here, not one for each pair."""
    q, k = draw(rng, (2, 4, 3, 16)), draw(rng, (2, 2, 3, 16))
    position_ids = np.array([[0, 1, 2], [5, 6, 7]])
    cos, sin = huggingface.rotary_embedding(position_ids, Rotary(pairing="half", rotary_dim=rotary_dim), 16)
    assert cos.shape == sin.shape == (2, 3, rotary_dim)
    result = huggingface.apply_rotary_pos_emb(q, k, cos, sin, implementation=implementation)
    for actual, x in zip(result, (q, k), strict=True):
        exact = expected_by_heads(x, position_ids, rotary_dim=rotary_dim)
        oracle.assert_exact(actual, exact, np.asarray(x), pairing="half", rotary_dim=rotary_dim)


def test_gradient_of_apply_rotary_pos_emb(implementation, rng):
    q, k = draw(rng, (2, 4, 6, 16)), draw(rng, (2, 2, 6, 16))
    ct = draw(rng, q.shape), draw(rng, k.shape)

    def f(q, k):
        return huggingface.apply_rotary_pos_emb(q, k, *wide(LEFT_PADDED), implementation=implementation)

    for actual, c in zip(jax.vjp(f, q, k)[1](ct), ct, strict=True):
        oracle.assert_exact(actual, expected_by_heads(c, LEFT_PADDED, direction=-1), np.asarray(c), pairing="half")


def test_what_apply_rotary_pos_emb_refuses():
    x, (cos, sin) = jnp.ones((2, 1, 6, 16)), wide(LEFT_PADDED)
    with pytest.raises(ValueError, match=r"cos and sin are caches \[max_positions, D\], got \(2, 6, 16\)"):
        huggingface.apply_rotary_pos_emb(x, x, cos, sin, LEFT_PADDED)
    with pytest.raises(ValueError, match=r"unsqueeze_dim must be 1 .* got 3"):
        huggingface.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=3)


# tiny_gqa.py

PROMPT = [3, 14, 15, 9, 26, 5]


@pytest.fixture(scope="module")
def params():
    return tiny.init(jax.random.key(0))


@jax.jit
def reference(params, tokens):
    """The logits [S, V] after each of tokens [S]: the decoder written out for one sequence, its pairs as complex
    numbers that angles from the oracle turn."""
    length = tokens.shape[0]
    cos, sin = (jnp.asarray(t, jnp.float32) for t in oracle.cos_sin(1e4, 32, np.arange(length)))
    turn = jax.lax.complex(cos, sin)

    def normalized(x):
        return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    def heads(x):
        return x.reshape(length, -1, 32)

    def turned(x):
        z = jax.lax.complex(x[..., 0::2], x[..., 1::2]) * turn[:, None]
        return jnp.stack([z.real, z.imag], axis=-1).reshape(x.shape)

    def shared(x):  # each key head by two query heads
        return jnp.stack([x[:, 0], x[:, 0], x[:, 1], x[:, 1]], axis=1)

    x = params["embedding"][tokens]
    for i in range(2):
        w = {name: stacked[i] for name, stacked in params["layers"].items()}
        h = normalized(x)
        q, k, v = turned(heads(h @ w["q"])), shared(turned(heads(h @ w["k"]))), shared(heads(h @ w["v"]))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(32))
        attention = jax.nn.softmax(jnp.where(np.tri(length, dtype=bool)[None], scores, -jnp.inf))
        x = x + jnp.einsum("hqk,khd->qhd", attention, v).reshape(length, 128) @ w["o"]
        x = x + jax.nn.silu(normalized(x) @ w["up"]) @ w["down"]
    return normalized(x) @ params["output"]


def test_known_answer(implementation):
    """d_k = 2: (1, 0) stays at position 0 and turns by one radian at position 1."""
    x = jnp.broadcast_to(jnp.array([1.0, 0.0]), (2, 1, 2))
    cos, sin = tiny.ROTARY.tables(jnp.arange(2), 2)
    first, second = rope_cached(x, cos, sin, implementation=implementation)[:, 0]
    np.testing.assert_allclose(first, [1, 0], atol=0)
    np.testing.assert_allclose(second, [0.540302, 0.841471], atol=1e-6)
    np.testing.assert_allclose(jnp.vdot(first, second), 0.540302, atol=1e-6)


def test_full_forward(implementation, params):
    """Two sequences at once. Each sees its own tokens at their positions, and the rotation matters."""
    tokens = jnp.array([PROMPT, PROMPT[::-1]], jnp.int32)
    logits = tiny.full(params, tokens, implementation)
    for actual, row in zip(logits, tokens, strict=True):
        np.testing.assert_allclose(actual, reference(params, row), atol=1e-4)
    moved, _ = tiny.forward(params, tokens, tiny.empty_cache(2, 6)._replace(sin=jnp.zeros((6, 16))))
    assert np.abs(np.asarray(moved - logits)).max() > 0.1


@pytest.fixture(scope="module")
def expected_gradient(params):
    tokens = np.array(PROMPT)

    def loss(params):
        logits = reference(params, tokens[:-1])
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - logits[np.arange(5), tokens[1:]])

    return jax.grad(loss)(params)


def test_model_gradient(implementation, params, expected_gradient):
    """The backward turns by the opposite angle, which JAX finds by itself where the formula is written out."""
    tokens = jnp.array([PROMPT], jnp.int32)
    actual = jax.grad(tiny.loss)(params, tokens, implementation)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected_gradient), strict=True):
        assert np.abs(np.asarray(b)).max() > 1e-3
        np.testing.assert_allclose(a, b, atol=1e-5)
    by_gradient, by_differences = tiny.check_gradient(params, tokens, jax.random.key(1), implementation)
    assert abs(by_differences) > 0.1
    assert by_gradient == pytest.approx(by_differences, rel=0.02)


@pytest.fixture
def lengths(monkeypatch):
    """How many tokens each call of the model was given."""
    given, step = [], tiny.step

    def recorded(params, tokens, *arguments):
        given.append(tokens.shape[1])
        return step(params, tokens, *arguments)

    monkeypatch.setattr(tiny, "step", recorded)
    return given


def test_generation_is_the_full_forward(implementation, params, lengths):
    steps = list(tiny.generate(params, PROMPT, 9, implementation=implementation))
    assert lengths == [6, *[1] * 8]
    text = PROMPT + [token for token, _ in steps]
    expected = reference(params, np.array(text[:-1]))[len(PROMPT) - 1 :]
    np.testing.assert_allclose(jnp.stack([logits for _, logits in steps]), expected, atol=1e-4)
    assert [token for token, _ in steps] == expected.argmax(axis=-1).tolist()


def test_prefill_and_single_steps_agree(implementation, params):
    """A prefill's rows equal decoding from an empty cache, token by token."""
    cache = tiny.empty_cache(1, len(PROMPT))
    expected = reference(params, np.array(PROMPT))
    for offset, token in enumerate(PROMPT):
        logits, cache = tiny.step(params, jnp.array([[token]], jnp.int32), cache, offset, implementation)
        np.testing.assert_allclose(logits[0, 0], expected[offset], atol=1e-4)


@pytest.mark.parametrize("window", [8, 4])
def test_sliding_window_is_the_full_forward_over_it(implementation, window, params, lengths):
    """While it fills up, and from then on; with 4, the prompt is longer already."""
    steps = list(tiny.generate(params, PROMPT, 9, window, implementation))
    assert lengths == ([6, 1, 1, *[8] * 6] if window == 8 else [4] * 9)
    text = PROMPT + [token for token, _ in steps]
    for i, (token, logits) in enumerate(steps):
        end = len(PROMPT) + i
        start = max(0, end - window)
        expected = reference(params, np.array(text[start : start + window]))[end - start - 1]
        np.testing.assert_allclose(logits, expected, atol=1e-4)
        assert token == int(expected.argmax())
    whole = reference(params, np.array(text[:-1]))[-1]
    assert np.abs(np.asarray(whole - steps[-1][1])).max() > 0.1  # what lies before the window would matter
