"""The kinds of mistakes that other implementations of RoPE have shipped, each with the test that would find it here.

`KINDS` says for each kind which test that is. Those that have none under a name of their own elsewhere are in this
file, in the same order. Right values come from algebra, from 40 digits or from published numbers. The reports are
public; what is said about them is in our words.
"""

import ast
import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from test_processes import finish, start

from jax_rope import Rotary, rope, rope_cached, rope_qk, scaling
from jax_rope.arguments import canonical
from jax_rope.webgpu import device, kernels, offload
from jax_rope.webgpu.call import ByAngles, Call, length

KINDS = {
    # Precision
    "inverse frequencies in half precision (EleutherAI/gpt-neox#1003)": "test_inverse_frequencies_in_half_precision",
    "a model that was cast (huggingface/transformers#25681)": "test_tables_of_a_model_cast_to_half_precision",
    "on a growth path only (huggingface/transformers#29496)": "test_a_longer_sequence_after_a_shorter_one",
    "ambient low precision (huggingface/transformers#29285)": "test_ambient_low_precision",
    "256 and 257 coincide (keras-team/keras-hub#1544)": "test_positions::test_256_and_257_differ",
    "sines wrong near a quarter turn (doitsujin/dxvk#4866)": "test_sines_near_multiples_of_a_quarter_turn",
    "sines wrong at every size": "test_accuracy::test_every_quadrant_and_magnitude",
    "|sine| above 1 far out (tenstorrent/tt-metal#55318)": "test_no_sine_or_cosine_is_above_one",
    "relative positions lost in bfloat16 (KellerJordan/modded-nanogpt#39)": (
        "test_properties::test_scores_depend_on_relative_positions_only"
    ),
    # Scaling rules
    "a long prompt remembered (huggingface/transformers#25306)": "test_dynamic_ntk_does_not_remember_a_long_prompt",
    "a base that ignores the length (vllm-project/vllm#41236)": "test_dynamic_ntk_base_follows_the_length",
    "the length of the wrong axis (ml-explore/mlx-lm#1545)": "test_length_is_read_from_the_sequence_axis",
    "an explicit attention factor ignored (vllm-project/vllm#46280)": "test_huggingface::test_attention_factor_of_yarn",
    "an attention factor multiplied on (sgl-project/sglang#33558)": "test_scaling::test_attention_factors",
    "mscale ignored (vllm-project/vllm#48621)": "test_mscale_is_not_ignored",
    "the clamp or truncation of YaRN's ramp (keras-team/keras-hub#2981)": "test_yarn_ramp_is_clamped_and_truncated",
    "the softmax scale of latent attention (NVIDIA/Megatron-LM#1429)": (
        "test_softmax_scale_of_latent_attention_is_not_in_cosine_and_sine"
    ),
    "LongRoPE switching at the original length (unslothai/unsloth#10681)": (
        "test_longrope_switches_above_the_original_length_not_at_it"
    ),
    "Llama 3's factor built in (pytorch/executorch#7265)": "test_huggingface::test_no_number_of_llama3_is_built_in",
    "a rule silently not applied (felafax/felafax#59)": "test_every_scaling_rule_is_applied",
    "an unknown rule taken": "test_huggingface::test_unknown_rule",
    # Pairing and partial rotation
    "the other pairing: right at the first token only (NeuraLegion/shainet#111)": (
        "test_pairings_differ_from_the_second_token_on"
    ),
    "head_dim in the exponent or the pairs' distance (pie-project/pie#602)": (
        "test_exponent_and_pair_distance_count_rotary_dim_not_head_dim"
    ),
    "a partial rotation confused with a proportional one (apple/coreai-models#66)": (
        "test_partial_rotation_is_not_proportional"
    ),
    "sections with the whole head (AI-Hypercomputer/maxtext#4616)": (
        "test_frequencies::test_sections_with_a_partial_rotation"
    ),
    "a part taken of a part (vllm-project/vllm#41185)": (
        "test_huggingface::test_no_part_is_taken_of_latent_attention_s_part"
    ),
    "odd sizes accepted (huggingface/transformers#48101)": "test_odd_sizes_are_refused_at_once",
    # Positions
    "one token and several rows (ml-explore/mlx#3494)": "test_positions::test_every_row_of_a_batch_with_one_token",
    "a cache that forgets offset or theta (lucidrains/rotary-embedding-torch#11)": (
        "test_no_cache_forgets_offset_or_theta"
    ),
    "left-padded rows that share positions (unslothai/unsloth#3699)": (
        "test_positions::test_left_padded_rows_are_rotated_as_if_alone"
    ),
    "decoding without the start (keras-team/keras-hub#1544)": (
        "test_positions::test_a_decode_step_equals_the_prefill_row"
    ),
    "only row 0 of the tables is read (linkedin/Liger-Kernel#477)": "test_tables_of_every_row_are_read",
    "packed documents that go on counting (allenai/OLMo-core#591)": (
        "test_positions::test_packed_documents_are_rotated_as_if_alone"
    ),
    "position ids whose values do not matter (NVIDIA/Megatron-LM#453)": "test_values_of_position_ids_matter",
    "reading beyond a table (microsoft/onnxruntime#28205)": (
        "test_examples::test_a_traced_offset_beyond_the_tables_gives_nan"
    ),
    # Sections
    "sections of the first row only (linkedin/Liger-Kernel#464)": "test_sections_of_every_row_are_read",
    "sections that are one-dimensional (ml-explore/mlx-lm#1768)": "test_frequencies::test_sections",
    "equal streams": "test_frequencies::test_equal_streams_are_one_dimensional",
    # Layout and size
    "operands that are not contiguous (ggml-org/llama.cpp#19292)": (
        "test_layouts::test_transposed_and_sliced_operands"
    ),
    "arrays without elements (ggml-org/llama.cpp#26146)": "test_layouts::test_empty",
    "more than 65 535 in a dimension (microsoft/onnxruntime#20204)": "test_layouts::test_large_extents",
    "k written with q's size (microsoft/onnxruntime#28501)": "test_layouts::test_grouped_queries",
    "a single head (linkedin/Liger-Kernel#342)": "test_a_single_head",
    "32-bit indices that wrap (fla-org/flash-linear-attention#1080)": "test_indices_beyond_32_bits",
    "twice the workgroups (ggml's WGSL shader)": "test_no_more_workgroups_than_needed",
    "a shader that needs 16-bit floats (ggml's WGSL shader)": "test_kernels_need_no_feature",
    # Gradients
    "no gradient (huggingface/candle#3568)": "test_gradients::test_against_an_independent_formula",
    "recomputation of what was changed in place (unslothai/unsloth#5001)": (
        "test_gradients::test_recomputation_is_not_corrupted"
    ),
    "a variant whose backward never ran (Dao-AILab/flash-attention#569)": "test_backward_of_every_variant",
    "the transpose taken for the inverse": "test_scaling::test_the_factor_forward_backward_and_undone",
    # JAX and wgpu
    "callbacks that wait for themselves (jax-ml/jax#24255, jax-ml/jax#25861, pasteurlabs/tesseract-jax#177)": (
        "test_processes::test_one_core"
    ),
    "the same with either transport": "test_soak::test_many_calls_in_flight_on_one_core",
    "vmap over other axes, or of colliding sizes (jax-ml/jax#19978, jax-ml/jax#17187)": "test_transforms::test_vmap",
    "varying axes lost under shard_map (google-deepmind/mujoco#3426)": "test_sharding::test_a_replicated_operand",
    "a new trace at each call (jax-ml/jax#31319)": "test_transforms::test_equal_arguments_do_not_retrace",
    "a cache that leaks tracers (patrick-kidger/equinox#568)": "test_no_cache_filled_while_tracing_keeps_a_tracer",
    "a buffer still mapped when it is used again (pygfx/wgpu-py#781)": (
        "test_webgpu::test_a_failed_call_leaves_the_next_one_well"
    ),
    "buffers and devices that pile up (pygfx/wgpu-py#405)": "test_webgpu::test_objects_do_not_pile_up",
    "bindings beyond the limit (gfx-rs/wgpu#6221)": "test_layouts::test_more_than_a_binding_holds",
    "a process that does not end, or whose children hang (pygfx/wgpu-py#797, rerun-io/rerun#6223)": (
        "test_processes_end_and_spawn_others"
    ),
}
TESTS = Path(__file__).parent


@functools.cache
def names_in(module: str) -> set[str]:
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_kind_has_its_test():
    here = Path(__file__).stem
    for kind, test in KINDS.items():
        module, _, name = test.rpartition("::")
        assert name in names_in(module or here), f"{kind}: there is no {test}"
    named = {test for test in KINDS.values() if "::" not in test}
    assert {name for name in names_in(here) if re.match("test_(?!every_kind)", name)} == named


def draw(rng, *shape, dtype=jnp.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def first_pairs(angles, factor=1.0):
    """What pairs (1, 0) become, interleaved: cosines and sines."""
    return factor * np.stack((np.cos(angles), np.sin(angles)), axis=-1).reshape(*np.shape(angles)[:-1], -1)


# Precision


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_inverse_frequencies_in_half_precision(implementation, dtype, rng):
    """At position 1857, where the usual formula in bfloat16 is off by most of a turn."""
    x = draw(rng, 1, 2, 64, dtype=dtype)
    y = rope(x, 1857, implementation=implementation)
    oracle.assert_exact(y, oracle.rotate(x, np.array([1857])), x)
    halved = np.asarray(Rotary().inv_freq(64)).astype(dtype).astype(np.float64)
    assert np.abs(np.cos(1857 * halved) - oracle.cos_sin(1e4, 64, np.array(1857))[0]).max() > 0.1


def test_tables_of_a_model_cast_to_half_precision(implementation, rng):
    """A cast reaches the weights, and what is rotated; nothing that angles are made of is among them."""
    rotary = Rotary(theta=5e5)
    model = {"w": draw(rng, 16, 2, 64), "rotary": jax.tree.leaves(rotary)}
    cast = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if hasattr(leaf, "astype") else leaf, model)
    assert cast["rotary"] == [rotary]
    y = rope(cast["w"], 100_000, cast["rotary"][0], implementation=implementation)
    oracle.assert_exact(y, oracle.rotate(cast["w"], 100_000 + np.arange(16), 5e5), cast["w"])
    cos, sin = rotary.tables(np.arange(3), 64)
    assert cos.dtype == sin.dtype == jnp.float32


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_longer_sequence_after_a_shorter_one(implementation, dtype, rng):
    f = jax.jit(lambda x: rope(x, implementation=implementation))
    for size in (4, 2100, 8):
        x = draw(rng, size, 1, 32, dtype=dtype)
        oracle.assert_exact(f(x), oracle.rotate(x, np.arange(size)), x)


def test_ambient_low_precision(implementation, rng):
    x = draw(rng, 3, 2, 32)
    with jax.default_matmul_precision("bfloat16"):
        y = jax.jit(lambda x, offset: rope(x, offset, implementation=implementation))(x, 70_000)
    oracle.assert_exact(y, oracle.rotate(x, 70_000 + np.arange(3)), x)


def test_sines_near_multiples_of_a_quarter_turn(implementation):
    """Numerators of the continued fractions of pi and of pi / 2: the positions nearest to multiples of a quarter
    turn of the first pair, where a float32 reduction has no digit left."""
    near = np.array([11, 22, 33, 344, 355, 710, 51_819, 103_993, 104_348, 208_341, 312_689, 573_204, 165_707_065])
    x = np.zeros((len(near), 2, 2), np.float32)
    x[:, 0, 0] = x[:, 1, 1] = 1
    y = np.asarray(rope(x, near, implementation=implementation), np.float64)
    cos, sin = (np.array([np.ravel(part)[0] for part in parts]) for parts in zip(*map(exact_first, near), strict=True))
    assert min(np.abs(cos).min(), np.abs(sin).min()) < 1e-7
    np.testing.assert_allclose(y[:, 0], np.stack((cos, sin), -1), rtol=0, atol=4 * 2.0**-24)
    np.testing.assert_allclose(y[:, 1], np.stack((-sin, cos), -1), rtol=0, atol=4 * 2.0**-24)


def exact_first(position):
    """Cosine and sine of the first pair, from 40 digits."""
    return oracle.exact_cos_sin(1e4, 2, int(position))


def test_no_sine_or_cosine_is_above_one(implementation, rng):
    """Beyond 1.7e7, where float32 cannot tell positions apart; and all around one turn, where they are largest."""
    far = np.concatenate([np.arange(17_000_000, 17_000_600), rng.integers(-(2**31), 2**31, 600)])
    around = np.float32(np.linspace(0, 7, 1800))
    x = np.zeros((1, 2, 128), np.float32)
    x[:, 0, 0::2] = x[:, 1, 1::2] = 1
    for positions in (far, around):
        y = rope(np.repeat(x, len(positions), 0), positions, implementation=implementation)
        assert np.abs(np.asarray(y)).max() <= 1
    cos, sin = map(np.asarray, Rotary().tables(far, 128))
    assert max(np.abs(cos).max(), np.abs(sin).max()) <= 1


# Scaling rules


def bases(length, factor, original, n, theta=1e4):
    """The frequencies of n pairs as bloc97 and emozilla published them: a base for each length."""
    if length > original:
        theta *= (factor * length / original - (factor - 1)) ** (2 * n / (2 * n - 2))
    return theta ** (-np.arange(n) / n)


def test_dynamic_ntk_does_not_remember_a_long_prompt(implementation, rng):
    rotary = Rotary(scaling=scaling.DynamicNTK(4, 16))
    x = draw(rng, 40, 2, 8)
    expected = first_pairs(np.arange(9)[:, None] * bases(9, 4, 16, 4))
    ones = jnp.broadcast_to(jnp.float32([1, 0] * 4), (9, 1, 8))

    def short():
        return np.asarray(rope(ones, None, rotary, implementation=implementation))

    before = short()
    long = rope(x, 5000, rotary, implementation=implementation)
    assert not np.allclose(long, rope(x, 5000, implementation=implementation), atol=1e-2)
    np.testing.assert_array_equal(short(), before)
    np.testing.assert_allclose(before[:, 0], expected, atol=3e-7)


@pytest.mark.parametrize("length", [16, 17, 64, 100_000])
def test_dynamic_ntk_base_follows_the_length(implementation, length):
    rotary = Rotary(scaling=scaling.DynamicNTK(4, 16))
    np.testing.assert_allclose(rotary.inv_freq(8, length), bases(length, 4, 16, 4), rtol=1e-13)
    x = np.float32([[[1, 0] * 4]])
    y = rope(x, length - 1, rotary, implementation=implementation)
    np.testing.assert_allclose(np.asarray(y)[0], first_pairs((length - 1) * bases(length, 4, 16, 4)[None]), atol=3e-7)


@pytest.mark.parametrize("seq_axis", [-3, -2])
def test_length_is_read_from_the_sequence_axis(implementation, seq_axis):
    """Nine tokens are within the original length, 16; forty heads, rows or elements are not."""
    rule = scaling.LongRoPE((1.0,) * 20, (8.0,) * 20, 16)
    for rotary in (Rotary(scaling=scaling.DynamicNTK(4, 16)), Rotary(scaling=rule)):
        x = np.broadcast_to(np.float32([1, 0] * 20), (40, *((9, 40) if seq_axis == -3 else (40, 9)), 40))
        y = np.asarray(rope(x, None, rotary, seq_axis=seq_axis, implementation=implementation))
        y = y if seq_axis == -3 else y.swapaxes(1, 2)
        expected = first_pairs(np.arange(9)[:, None] * 1e4 ** (-np.arange(20) / 20))
        np.testing.assert_allclose(y, np.broadcast_to(expected[None, :, None], y.shape), rtol=0, atol=3e-7)


def test_mscale_is_not_ignored(implementation, rng):
    """0.1 mscale ln(factor) + 1, over the same of mscale_all_dim: forward, and twice in a score."""
    rotary = Rotary(scaling=scaling.YaRN(40, 4096, mscale=0.707, mscale_all_dim=0.25))
    factor = (0.0707 * math.log(40) + 1) / (0.025 * math.log(40) + 1)
    q, k = draw(rng, 3, 2, 32), draw(rng, 3, 2, 32)
    q_out, k_out = (np.asarray(y, np.float64) for y in rope_qk(q, k, 9, rotary, implementation=implementation))
    scores, plain = (q_out * k_out).sum(-1), (np.asarray(q, np.float64) * np.asarray(k)).sum(-1)
    np.testing.assert_allclose(scores, factor**2 * plain, atol=2e-5)


def test_yarn_ramp_is_clamped_and_truncated():
    """Of 32 pairs, within 4096 positions, those of index 10.47 and 22.51 turn 32 times and once. Within 40, none turns
    32 times, and the ramp begins at the first pair."""
    plain = 1e4 ** (-np.arange(32) / 32)

    def ramp(original, **options):
        kept = Rotary(scaling=scaling.YaRN(4, original, **options)).inv_freq(64) / plain
        return (1 - kept) / (1 - 1 / 4)

    def index(turns, original):
        return 32 * math.log(original / (2 * math.pi * turns)) / math.log(1e4)

    assert (round(index(32, 4096), 2), round(index(1, 4096), 2)) == (10.47, 22.51)
    i = np.arange(32)
    np.testing.assert_allclose(ramp(4096), np.clip((i - 10) / (23 - 10), 0, 1), atol=1e-12)
    low, high = index(32, 4096), index(1, 4096)
    np.testing.assert_allclose(ramp(4096, truncate=False), np.clip((i - low) / (high - low), 0, 1), atol=1e-12)
    assert index(32, 40) < 0
    np.testing.assert_allclose(ramp(40), np.clip(i / math.ceil(index(1, 40)), 0, 1), atol=1e-12)


def test_softmax_scale_of_latent_attention_is_not_in_cosine_and_sine(implementation, rng):
    """DeepSeek-V3: mscale and mscale_all_dim are both 1, so norms are kept; the softmax scale is the attention's."""
    config = {
        "model_type": "deepseek_v3",
        "qk_rope_head_dim": 64,
        "max_position_embeddings": 163_840,
        "rope_theta": 1e4,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    x = draw(rng, 4, 2, 64)
    y = rope(x, 77, Rotary.from_hf(config), implementation=implementation)
    np.testing.assert_allclose(np.linalg.norm(y, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


@pytest.mark.parametrize("traced", [False, True])
def test_longrope_switches_above_the_original_length_not_at_it(implementation, traced):
    rotary = Rotary(scaling=scaling.LongRoPE((2.0,), (5.0,), 16))
    x = np.float32([[[1, 0]]])
    f = functools.partial(rope, rotary=rotary, implementation=implementation)
    for last, factor in ((14, 2), (15, 2), (16, 5)):  # lengths 15, 16 and 17
        y = jax.jit(f)(x, last) if traced else f(x, last)
        np.testing.assert_allclose(np.asarray(y)[0], first_pairs([[last / factor]]), atol=3e-7)


RULES = {
    "linear": scaling.Linear(4),
    "dynamic": scaling.DynamicNTK(4, 64),
    "yarn": scaling.YaRN(4, 64),
    "longrope": scaling.LongRoPE((1.0,) * 8, (4.0,) * 8, 64, 4),
    "llama3": scaling.Llama3(4, 1, 4, 64),
    "proportional": scaling.Proportional(0.5, 4),
}


@pytest.mark.parametrize("name", RULES)
def test_every_scaling_rule_is_applied(implementation, name):
    """At the end of four times the original length, every rule has slowed some pair to a quarter of its frequency:
    to what it makes of them without a rule at a quarter of the position."""
    rotary = Rotary(scaling=RULES[name])
    x = np.float32([[[1, 0] * 8]])
    y = np.asarray(rope(x, 252, rotary, implementation=implementation), np.float64)
    y /= np.hypot(*y[0, 0, :2])  # the attention factor
    omega = 1e4 ** (-np.arange(8) / 8)
    slow = {"linear": [0, 7], "yarn": [7], "longrope": [0, 7], "llama3": [7], "proportional": [0, 3]}.get(name, [])
    for pair in slow:
        np.testing.assert_allclose(y[0, 0, 2 * pair : 2 * pair + 2], first_pairs(252 / 4 * omega[[pair]]), atol=1e-6)
    assert np.abs(y - np.asarray(rope(x, 252, implementation=implementation))).max() > 1e-3
    if name == "proportional":
        np.testing.assert_allclose(y[0, 0, 8:], x[0, 0, 8:], atol=1e-6)
    if name == "dynamic":
        np.testing.assert_allclose(y[0], first_pairs(252 * bases(253, 4, 64, 8)[None]), atol=1e-6)


# Pairing and partial rotation


def test_pairings_differ_from_the_second_token_on(implementation, rng):
    """At position 0 both are the identity, which hides the wrong one."""
    x = draw(rng, 3, 2, 16)
    results = {}
    for pairing in ("interleaved", "half"):
        y = rope(x, None, Rotary(pairing=pairing), implementation=implementation)
        oracle.assert_exact(y, oracle.rotate(x, np.arange(3), pairing=pairing), x, pairing)
        results[pairing] = np.asarray(y)
    np.testing.assert_array_equal(results["half"][0], results["interleaved"][0])
    assert np.all(np.abs(results["half"] - results["interleaved"])[1:].max(-1) > 0.1)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
def test_exponent_and_pair_distance_count_rotary_dim_not_head_dim(implementation, pairing):
    """Of a head of 32, 8 turn: pair i by 10000 ** (-i / 4), its elements 1 or 4 apart."""
    x = np.zeros((4, 4, 32), np.float32)  # a token for each pair's first element
    apart, step = (1, 2) if pairing == "interleaved" else (4, 1)
    for pair in range(4):
        x[pair, :, pair * step] = 1
    y = np.asarray(rope(x, [300] * 4, Rotary(pairing=pairing, rotary_dim=8), implementation=implementation))
    for pair in range(4):
        expected = np.zeros(32)
        expected[[pair * step, pair * step + apart]] = first_pairs([300 * 10.0**-pair])
        np.testing.assert_allclose(y[pair], np.broadcast_to(expected, (4, 32)), rtol=0, atol=3e-7)


def test_partial_rotation_is_not_proportional(implementation):
    """A quarter of a head of 32 either way: a prefix turns pairs 4 apart by 10000 ** (-i / 4), Gemma's proportion
    pairs 16 apart by 10000 ** (-i / 16)."""
    x = np.zeros((1, 1, 32), np.float32)
    x[..., 1] = 1  # the first element of pair 1
    partial = rope(x, 7, Rotary(pairing="half", rotary_dim=8), implementation=implementation)
    whole = rope(x, 7, Rotary(pairing="half", scaling=scaling.Proportional(0.25)), implementation=implementation)
    for y, apart, omega in ((partial, 4, 1e4 ** (-1 / 4)), (whole, 16, 1e4 ** (-1 / 16))):
        expected = np.zeros(32)
        expected[[1, 1 + apart]] = first_pairs([7 * omega])
        np.testing.assert_allclose(np.asarray(y)[0, 0], expected, atol=3e-7)


@pytest.mark.parametrize("shape", [(2, 1, 7), (2, 1, 9)])
def test_odd_sizes_are_refused_at_once(shape):
    """Not when a kernel runs, nor only where the program is compiled."""
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(ValueError, match="head_dim must leave an even number above 0 from start 0 on"):
        jax.eval_shape(rope, x)
    with pytest.raises(ValueError, match="rotary_dim must be even and above 0, got 5"):
        Rotary(rotary_dim=5)
    with pytest.raises(ValueError, match="head_dim must leave an even number above 0 from start 1 on"):
        jax.eval_shape(lambda x: rope(x, 0, Rotary(start=1)), jax.ShapeDtypeStruct((2, 1, 8), jnp.float32))


# Positions


def test_no_cache_forgets_offset_or_theta(implementation, rng):
    """One shape, again and again with another offset, base, pairing or window, compiled and not."""
    x = draw(rng, 3, 2, 16)
    for _ in range(2):
        for theta, pairing, first in ((1e4, "interleaved", 0), (1e4, "half", 0), (5e5, "half", 0), (5e5, "half", 4)):
            rotary = Rotary(theta=theta, pairing=pairing, rotary_dim=12, start=first)
            window = {"pairing": pairing, "rotary_dim": 12, "start": first}
            f = functools.partial(rope, rotary=rotary, implementation=implementation)
            for offset in (0, 1000, 3):
                expected = oracle.rotate(x, offset + np.arange(3), theta, **window)
                oracle.assert_exact(f(x, offset), expected, x, **window)
            oracle.assert_exact(jax.jit(f)(x, 3), expected, x, **window)


def test_tables_of_every_row_are_read(implementation, rng):
    """In any of two batch axes."""
    x = draw(rng, 3, 2, 4, 1, 8)
    for lead in ((3, 2), (3, 1), (1, 2)):
        positions = rng.permutation(1000)[: 4 * math.prod(lead)].reshape(*lead, 4)
        cos, sin = (jnp.asarray(table, jnp.float32) for table in oracle.cos_sin(1e4, 8, positions))
        y = rope_cached(x, cos, sin, implementation=implementation)
        oracle.assert_exact(y, oracle.rotate(x, np.broadcast_to(positions, (3, 2, 4))), x)


def test_values_of_position_ids_matter(implementation, rng):
    """Ids in another order put the tokens' rotations into that order; equal ids turn all tokens alike."""
    x = jnp.broadcast_to(draw(rng, 1, 2, 16), (6, 2, 16))
    order = np.array([3, 0, 5, 1, 4, 2])
    f = jax.jit(lambda x, ids: rope(x, ids, implementation=implementation))
    counted = np.asarray(f(x, np.arange(6, dtype=np.int32)))
    np.testing.assert_array_equal(np.asarray(f(x, order.astype(np.int32))), counted[order])
    alike = np.asarray(f(x, np.full(6, 4, np.int32)))
    np.testing.assert_array_equal(alike, np.broadcast_to(counted[4], (6, 2, 16)))
    oracle.assert_exact(counted, oracle.rotate(x, np.arange(6)), x)


# Sections


@pytest.mark.parametrize("section_layout", ["contiguous", "interleaved"])
def test_sections_of_every_row_are_read(implementation, section_layout):
    """Pairs that follow streams 0, 0, 1, 2 or 0, 1, 2, 0; each row and stream elsewhere."""
    rotary = Rotary(sections=(2, 1, 1), section_layout=section_layout)
    streams = [0, 0, 1, 2] if section_layout == "contiguous" else [0, 1, 2, 0]
    positions = np.arange(3 * 5 * 2).reshape(3, 5, 2) ** 2
    x = np.broadcast_to(np.float32([1, 0] * 4), (5, 2, 3, 8))
    y = np.asarray(rope(x, positions, rotary, implementation=implementation))
    angles = np.moveaxis(positions, 0, -1)[..., streams] * 10.0 ** -np.arange(4)
    expected = first_pairs(angles)
    np.testing.assert_allclose(y, np.broadcast_to(expected[:, :, None], y.shape), rtol=0, atol=3e-7)


# Layout and size


@pytest.mark.parametrize("seq_axis", [-3, -2])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_single_head(implementation, seq_axis, dtype, rng):
    """Of k beside many of q, of both, and with a single token and a single pair."""
    positions = np.array([[9], [70_000]])
    for q_heads, width in ((5, 16), (1, 16), (1, 2)):
        q, k = draw(rng, 2, 1, q_heads, width, dtype=dtype), draw(rng, 2, 1, 1, width, dtype=dtype)
        arranged = (q, k) if seq_axis == -3 else (jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2))
        results = rope_qk(*arranged, positions, seq_axis=seq_axis, implementation=implementation)
        for x, y in zip((q, k), results, strict=True):
            y = y if seq_axis == -3 else jnp.swapaxes(y, 1, 2)
            oracle.assert_exact(y, oracle.rotate(x, positions), x)


def plain_call(x, y, layout, positions, table):
    return Call(layout, [x], ByAngles(layout, x.shape, positions, table, None), [y])


def test_indices_beyond_32_bits(monkeypatch):
    """Five thousand million bytes: every element is in one piece, none exceeds the limits, and those that lie beyond
    2^32 bytes and 2^31 elements are right. No such array is in memory: x repeats one token, and of y only the last
    pieces are written to."""
    tokens, heads, width = 40_000, 16, 4096
    token = np.random.default_rng(0).standard_normal((1, 1, heads, width)).astype(np.float16)
    layout, _, angles, _ = canonical({"x": token}, np.int32(7), Rotary(), -3, None, False)
    x, y = np.broadcast_to(token, (1, tokens, heads, width)), np.empty((1, tokens, heads, width), np.float16)
    assert x.nbytes > 2**32 and x.size > 2**31
    rotator = offload.rotator()
    call = plain_call(x, y, layout, angles.positions, angles.table)
    pieces = list(call.pieces(rotator.limits))
    at = 0
    for piece in pieces:
        assert (piece.rows, piece.heads) == (slice(0, 1), ((0, slice(0, heads)),))
        assert piece.tokens.start == at
        at = piece.tokens.stop
        assert length(piece.tokens) * heads * width * 2 <= rotator.limits.bytes
        assert call.threads(piece) <= rotator.limits.threads < 2**31
        assert call.uniform(piece, [0, rotator.limits.bytes]).dtype == np.uint32
    assert at == tokens
    monkeypatch.setattr(call, "pieces", lambda limits: pieces[-2:])
    rotator.run(call)
    some = np.array([pieces[-2].tokens.start, tokens - 2, tokens - 1])
    assert some[0] * heads * width > 2**31
    oracle.assert_exact(y[0, some], oracle.rotate(x[0, some], 7 + some), x[0, some])


class Recorder:
    """An encoder and its pass, which note what is dispatched."""

    def __init__(self):
        self.workgroups = []

    def begin_compute_pass(self):
        return self

    def dispatch_workgroups(self, *counts):
        self.workgroups.append(counts)

    def set_pipeline(self, pipeline): ...

    def set_bind_group(self, index, group): ...

    def end(self): ...


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tokens", [1, 31, 2048])
def test_no_more_workgroups_than_needed(dtype, tokens):
    """A thread turns two pairs, or four, of up to 16 heads of one token; less than a workgroup of them is idle."""
    x = np.zeros((1, tokens, 32, 128), dtype)
    layout, _, angles, _ = canonical({"x": x}, np.int32(7), Rotary(), -3, None, False)
    call, recorder = plain_call(x, x, layout, angles.positions, angles.table), Recorder()
    rotator = offload.rotator()
    data = rotator.device.handle.create_buffer(size=1 << 16, usage="STORAGE")
    with rotator.device.lock:
        limits = rotator.limits._replace(bytes=1 << 40)
        (piece,) = call.pieces(limits)
        rotator.kernel(call, piece, [0, x.nbytes], data)(recorder)
    ((width, height, depth),) = recorder.workgroups
    needed = tokens * 2 * (64 // (2 if dtype == np.float32 else 4))
    assert 0 <= width * height * depth * kernels.WORKGROUP_SIZE - needed < kernels.WORKGROUP_SIZE
    rotator.kernels.forget_bind_groups()
    data.destroy()


def test_kernels_need_no_feature():
    """Not 16-bit floats, nor subgroups. The one feature that is asked for, where there is one, is of buffers."""
    source = re.sub("//.*", "", kernels.source("rope.wgsl"))
    assert not re.search(r"\b(enable|requires|f16|subgroup\w*)\b", source)
    assert not re.search(r"\b(sin|cos|tan|pow|exp|exp2)\(", source)
    assert set(offload.rotator().device.handle.features) <= {device.MAPPABLE}


# Gradients


@pytest.mark.parametrize("by_tables", [False, True])
@pytest.mark.parametrize(("head_dim", "dtype"), [(16, jnp.float32), (16, jnp.bfloat16), (16, jnp.float16), (6, "f4")])
def test_backward_of_every_variant(monkeypatch, by_tables, head_dim, dtype, rng):
    """Each entry point runs backwards, and what it gives is the transpose."""
    offload.rotator()  # which may try its kernels when it is made
    ran = []
    pipeline = kernels.Kernels.pipeline
    monkeypatch.setattr(
        kernels.Kernels,
        "pipeline",
        lambda self, entry_point, **constants: ran.append(entry_point) or pipeline(self, entry_point, **constants),
    )
    positions = np.array([3, 0, 77_000])
    tables = [jnp.asarray(table, jnp.float32) for table in oracle.cos_sin(1e4, head_dim, positions)]
    x, ct = (draw(rng, 3, 2, head_dim, dtype=dtype) for _ in range(2))

    def f(x):
        if by_tables:
            return rope_cached(x, *tables, implementation="webgpu")
        return rope(x, positions, implementation="webgpu")

    y, vjp = jax.vjp(f, x)
    oracle.assert_exact(y, oracle.rotate(x, positions), x)
    oracle.assert_exact(vjp(ct)[0], oracle.rotate(ct, positions, direction=-1), ct)
    kind = "_scalar" if head_dim == 6 else "" if dtype == jnp.float32 else "_packed"
    assert ran == [f"{way}{kind}{'_tables' if by_tables else ''}" for way in ("forward", "backward")]


# JAX and wgpu


def test_no_cache_filled_while_tracing_keeps_a_tracer(implementation, rng):
    """What was never used before is used inside a trace first, then in another, and outside."""
    x = draw(rng, 3, 2, 20)
    rotary = Rotary(theta=12_345.0, scaling=scaling.LongRoPE((1.0,) * 10, (2.0,) * 10, 9))
    f = functools.partial(rope, rotary=rotary, implementation=implementation)
    with jax.checking_leaks():
        first = jax.jit(jax.vmap(f, in_axes=(0, None)))(x[None], 2)[0]
        second = jax.jit(lambda x, p: f(x, p))(x, np.arange(2, 5, dtype=np.int32))
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(f(x, 2) ** 2)))(x)
    expected = oracle.rotate(x, np.arange(2, 5), 12_345.0)
    for y in (first, second, f(x, 2)):
        oracle.assert_exact(y, expected, x)
    np.testing.assert_allclose(np.asarray(gradient), 2 * np.asarray(x), atol=1e-5)


SPAWNS = """
import multiprocessing
import numpy as np
from jax_rope import rope

def rotated(offset):
    return float(np.asarray(rope(np.float32([[[1, 0]]]), offset, implementation="webgpu"))[0, 0, 0])

if __name__ == "__main__":
    mine = rotated(1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(mine, pool.apply(rotated, (2,)))
"""


def test_processes_end_and_spawn_others(tmp_path):
    """Neither waits for a device or a thread at its end; a child that is spawned after the device was made has its
    own (after a fork, JAX itself hangs: rerun-io/rerun#6223)."""
    program = tmp_path / "spawns.py"
    program.write_text(SPAWNS)
    mine, child = map(float, finish(start([str(program)]), 60).split())
    assert (mine, child) == (pytest.approx(math.cos(1), abs=3e-7), pytest.approx(math.cos(2), abs=3e-7))
