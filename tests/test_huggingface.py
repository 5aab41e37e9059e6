"""What `Rotary.from_hf` makes of configurations: against what the transformers package holds, and against formulas."""

import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest

from jax_rope import Rotary, huggingface
from jax_rope.scaling import DynamicNTK, Linear, LongRoPE, Proportional, YaRN

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "hf_frequencies.json").read_text())["cases"]
ROTATIONS = json.loads((GOLDEN / "hf_rotations.json").read_text())["cases"]

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 4096}
GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 64,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
DEEPSEEK = {"model_type": "deepseek_v3", "hidden_size": 512, "num_attention_heads": 4, "qk_rope_head_dim": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
FACTORS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}


@pytest.fixture
def said(caplog, monkeypatch):
    """What is logged, as if nothing had been said before."""
    monkeypatch.setattr(huggingface, "_said", set())
    caplog.set_level(logging.INFO, logger="jax_rope")
    return caplog


def scaled(rope: dict, **more) -> Rotary:
    return Rotary.from_hf({**LLAMA, "rope_scaling": rope, **more})


def omega(theta: float, rotary_dim: int) -> np.ndarray:
    return theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)


def head_dim(case: dict) -> int:
    config = case["config"]
    if case["layer_type"] == "full_attention" and "global_head_dim" in config:
        return config["global_head_dim"]
    for key in ("qk_rope_head_dim", "head_dim"):
        if key in config:
            return config[key]
    return config["hidden_size"] // config["num_attention_heads"]


@pytest.mark.parametrize("case", CASES, ids=[f"{case['name']}-{case['layer_type']}" for case in CASES])
def test_frequencies_are_those_of_transformers(case):
    rotary = Rotary.from_hf(case["config"], case["layer_type"])
    seq_len = case["seq_len"]
    actual = rotary.inv_freq(head_dim(case), seq_len)
    expected = np.array(case["inv_freq"])
    assert rotary.rotary_dim == 2 * len(expected)
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=0)
    assert ((actual == 0) == (expected == 0)).all()
    assert rotary.attention_factor(seq_len) == pytest.approx(case["attention_factor"], rel=1e-6)


@pytest.mark.parametrize("case", ROTATIONS, ids=[case["name"] for case in ROTATIONS])
def test_pairing_and_sections_are_those_of_transformers(case):
    rotary = Rotary.from_hf(case["config"])
    assert rotary.pairing == case["pairing"].replace("->", "_to_")
    assert rotary.sections == (tuple(case["mrope_section"]) if "mrope_section" in case else None)
    assert rotary.section_layout == "contiguous"


@pytest.mark.parametrize(
    "pairing, families",
    [
        ("interleaved", "cohere cohere2 glm glm4 glm4v_text gptj codegen helium ernie4_5 ernie4_5_moe llama4_text"),
        ("interleaved", "moonshine roformer chatglm blt deepseek_v2"),
        (
            "half",
            "llama mistral qwen2 qwen3 gpt_neox glm4_moe glm4v_moe_text phi3 gemma2 olmo2 falcon minicpm3 gpt_oss",
        ),
        ("interleaved_to_half", "deepseek_v3 deepseek_v32 kimi_k2 longcat_flash glm4_moe_lite youtu mistral4"),
    ],
)
def test_pairing_by_family(said, pairing, families):
    for family in families.split():
        config = {"model_type": family, "hidden_size": 160, "num_attention_heads": 4, "rope_theta": 1e4}
        assert Rotary.from_hf(config).pairing == pairing, family
    assert not said.records


def test_every_family_has_one_pairing():
    tables = (huggingface._INTERLEAVED, huggingface._INTERLEAVED_TO_HALF, huggingface._HALF)
    assert sum(map(len, tables)) == len(frozenset.union(*tables))
    assert frozenset.union(*tables) >= huggingface._INTERLEAVED_SECTIONS


@pytest.mark.parametrize(
    "told, pairing",
    [
        ({}, "interleaved_to_half"),
        ({"rope_interleave": None}, "interleaved_to_half"),
        ({"rope_interleave": True}, "interleaved_to_half"),
        ({"rope_interleave": False}, "half"),
    ],
)
def test_deepseek_says_whether_its_weights_are_interleaved(told, pairing):
    assert Rotary.from_hf({**DEEPSEEK, **told}).pairing == pairing


def test_deepseek_v2_without_latent_attention():
    config = {"model_type": "deepseek_v2", "hidden_size": 512, "num_attention_heads": 4, "qk_rope_head_dim": 0}
    assert Rotary.from_hf(config) == Rotary(pairing="half", rotary_dim=128)


def test_unknown_family_is_half_and_said_once(said):
    for _ in range(3):
        assert Rotary.from_hf({**LLAMA, "model_type": "nobody"}).pairing == "half"
    (record,) = said.records
    assert record.levelno == logging.INFO and "model_type 'nobody'" in record.getMessage()


class Object:
    def __init__(self, config):
        self.config = config

    def to_dict(self):
        return self.config


def test_dict_path_directory_and_object(tmp_path):
    config = {**LLAMA, "rope_theta": 5e5, "rope_scaling": YARN}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = Rotary(theta=5e5, pairing="half", rotary_dim=128, scaling=YaRN(4.0, 4096))
    for form in (config, tmp_path, str(tmp_path), tmp_path / "config.json", str(tmp_path / "config.json")):
        assert Rotary.from_hf(form) == expected
    assert Rotary.from_hf(Object(config)) == expected


@pytest.mark.parametrize("config", [None, 3, [LLAMA], Object([LLAMA])])
def test_anything_else_is_refused(config):
    with pytest.raises(TypeError, match=r"config must be a dict, the path of a config\.json or an object"):
        Rotary.from_hf(config)


def test_nested_text_config():
    text = {**LLAMA, "rope_theta": 3e4}
    assert Rotary.from_hf({"model_type": "llava", "text_config": text}).theta == 3e4
    assert Rotary.from_hf({"model_type": "llava", "text_config": Object(text)}).theta == 3e4
    own = {**LLAMA, "rope_theta": 7e4, "text_config": text}
    assert Rotary.from_hf(own).theta == 7e4
    del text["model_type"]
    assert Rotary.from_hf({"model_type": "glm4", "text_config": text}).pairing == "interleaved"


RULES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    YARN,
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, **FACTORS},
    {
        "rope_type": "llama3",
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 2048,
    },
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
]


@pytest.mark.parametrize("rule", RULES, ids=[rule["rope_type"] for rule in RULES])
def test_old_and_new_forms_are_equal(rule):
    old = Rotary.from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": rule})
    new = Rotary.from_hf({**LLAMA, "rope_parameters": {**rule, "rope_theta": 5e5}})
    legacy = {"type" if key == "rope_type" else key: value for key, value in rule.items()}
    assert old == new == Rotary.from_hf({**LLAMA, "rope_theta": 5e5, "rope_scaling": legacy})
    assert old.theta == 5e5
    assert (old.scaling is None) == (rule["rope_type"] == "default")


def test_both_forms_must_agree():
    assert scaled(YARN, rope_parameters={**YARN, "rope_theta": 1e6}).theta == 1e6
    with pytest.raises(ValueError, match=r"rope_parameters must be alike .* given, got factor 4\.0 and 8\.0"):
        scaled(YARN, rope_parameters={**YARN, "factor": 8.0})
    with pytest.raises(
        ValueError, match="rope_scaling must be absent where rope_parameters names layers"
    ):  # which layers would it scale?
        Rotary.from_hf(
            {**LLAMA, "rope_scaling": YARN, "rope_parameters": {"sliding_attention": {}}}, "sliding_attention"
        )


def test_nulls_count_as_absent():
    nulls = dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "finetuned"))
    assert scaled({**YARN, **nulls}, head_dim=None, rope_theta=None) == scaled(YARN)
    assert scaled(None) == scaled({}) == Rotary(pairing="half", rotary_dim=128)


@pytest.mark.parametrize("key", ["rope_theta", "rotary_emb_base", "rope_base"])
def test_names_of_the_base(key):
    assert Rotary.from_hf({**LLAMA, key: 12345}).theta == 12345


def test_layers_that_rope_parameters_names():
    layers = {"full_attention": {**YARN, "rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}, "nope": None}
    config = {**LLAMA, "rope_parameters": layers, "layer_types": ["sliding_attention", "full_attention"]}
    assert Rotary.from_hf(config, "full_attention").scaling == YaRN(4.0, 4096)
    assert Rotary.from_hf(config, "full_attention").theta == 1e6
    assert Rotary.from_hf(config, "sliding_attention") == Rotary(pairing="half", rotary_dim=128)
    for layer_type in (None, "nope", "chunked_attention"):
        with pytest.raises(ValueError, match=r"layer_type must be one of \['full_attention', 'sliding_attention'\]"):
            Rotary.from_hf(config, layer_type)


def test_layers_of_gemma3():
    assert Rotary.from_hf(GEMMA3, "full_attention") == Rotary(1e6, "half", 64, scaling=Linear(8.0))
    assert Rotary.from_hf(GEMMA3, "sliding_attention") == Rotary(1e4, "half", 64)
    with pytest.raises(ValueError, match=r"layer_type must be one of \['full_attention', 'sliding_attention'\].*None"):
        Rotary.from_hf(GEMMA3)


def test_gemma3_as_published_says_neither_head_nor_thetas():
    text = {"model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16}
    config = {"model_type": "gemma3", "text_config": {**text, "rope_scaling": GEMMA3["rope_scaling"]}}
    assert Rotary.from_hf(config, "full_attention") == Rotary(1e6, "half", 256, scaling=Linear(8.0))
    assert Rotary.from_hf(config, "sliding_attention") == Rotary(1e4, "half", 256)


def test_layers_of_modernbert():
    config = {"model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12}
    config |= {"global_rope_theta": 2e5, "local_rope_theta": 3e4}
    assert Rotary.from_hf(config, "full_attention") == Rotary(2e5, "half", 64)
    assert Rotary.from_hf(config, "sliding_attention") == Rotary(3e4, "half", 64)
    with pytest.raises(ValueError, match="layer_type"):
        Rotary.from_hf(config)


def test_olmo3_scales_full_attention_alone():
    config = {**LLAMA, "model_type": "olmo3", "rope_theta": 5e5, "rope_scaling": YARN}
    assert Rotary.from_hf(config, "full_attention").scaling == YaRN(4.0, 4096)
    assert Rotary.from_hf(config, "sliding_attention") == Rotary(5e5, "half", 128)


def test_layer_type_of_a_model_with_one_kind():
    listed = {**LLAMA, "layer_types": ["full_attention", "full_attention"]}
    assert Rotary.from_hf(listed, "full_attention") == Rotary.from_hf(LLAMA, "anything") == Rotary.from_hf(LLAMA)
    with pytest.raises(ValueError, match=r"layer_type must be one of \['full_attention'\] or None, got 'sliding"):
        Rotary.from_hf(listed, "sliding_attention")


def test_proportional_keeps_the_whole_head():
    layer = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config = {"model_type": "gemma4_text", "head_dim": 256, "global_head_dim": 512}
    config["rope_parameters"] = {"full_attention": layer, "sliding_attention": {"rope_theta": 1e4}}
    assert Rotary.from_hf(config, "full_attention") == Rotary(1e6, "half", 512, scaling=Proportional(0.25))
    assert Rotary.from_hf(config, "sliding_attention") == Rotary(1e4, "half", 256)


@pytest.mark.parametrize(
    "told, rotary_dim",
    [
        ({"partial_rotary_factor": 0.5}, 64),
        ({"rotary_pct": 0.25}, 32),
        ({"rotary_dim": 96}, 96),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}, 96),
        ({"rope_scaling": {"partial_rotary_factor": 0.75}, "partial_rotary_factor": 0.5}, 96),
        ({"head_dim": 80, "partial_rotary_factor": 0.4}, 32),
    ],
)
def test_part_of_the_head(told, rotary_dim):
    rotary = Rotary.from_hf({**LLAMA, **told})
    assert rotary.rotary_dim == rotary_dim
    # The exponent's denominator is the part, not the head.
    np.testing.assert_allclose(rotary.inv_freq(128), omega(1e4, rotary_dim), rtol=1e-12)


def test_part_of_the_head_by_family():
    for family in ("gptj", "codegen"):
        config = {"model_type": family, "n_embd": 4096, "n_head": 16}
        assert Rotary.from_hf(config) == Rotary(rotary_dim=64)
        assert Rotary.from_hf({**config, "rotary_dim": 32}) == Rotary(rotary_dim=32)
    neox = {"model_type": "gpt_neox", "hidden_size": 512, "num_attention_heads": 4}
    assert Rotary.from_hf(neox).rotary_dim == 32
    assert Rotary.from_hf({**neox, "rotary_pct": 1.0}).rotary_dim == 128


def test_no_part_is_taken_of_latent_attention_s_part():
    config = {**DEEPSEEK, "head_dim": 192, "partial_rotary_factor": 0.5}
    rotary = Rotary.from_hf({**config, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 1e4}})
    assert (rotary.rotary_dim, rotary.start) == (64, 0)


def test_numbers_that_are_not_finite():
    for key in ("rope_theta", "partial_rotary_factor"):
        with pytest.raises(ValueError, match=f"{key} must be finite, got inf"):
            Rotary.from_hf({**LLAMA, key: math.inf})


def test_alpha_without_a_head():
    config = {"model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1000.0}}
    with pytest.raises(ValueError, match="head_dim must be known and above 2 for alpha, got rotary_dim None"):
        Rotary.from_hf(config)


def test_unknown_head():
    assert Rotary.from_hf({"model_type": "llama"}) == Rotary(pairing="half")
    with pytest.raises(ValueError, match=r"head_dim must be known for partial_rotary_factor 0\.5, got None"):
        Rotary.from_hf({"model_type": "llama", "partial_rotary_factor": 0.5})


@pytest.mark.parametrize("part", [0.01, 0.3, 1.5])
def test_impossible_parts(part):
    with pytest.raises(ValueError, match=r"partial_rotary_factor must leave an even part of head_dim 90"):
        Rotary.from_hf({**LLAMA, "head_dim": 90, "partial_rotary_factor": part})


@pytest.mark.parametrize("rope", [{"rope_type": "wavy"}, {"type": "wavy", "factor": 2.0}, {"rope_type": ["yarn"]}])
def test_unknown_rule(rope):
    with pytest.raises(ValueError, match=r"rope_type must be one of default, .*longrope.*, got .*(wavy|yarn)"):
        scaled(rope)


@pytest.mark.parametrize("rule", RULES, ids=[rule["rope_type"] for rule in RULES])
def test_unknown_key(rule):
    with pytest.raises(ValueError, match=r"^beta_medium must be absent, as no frequency rule takes it, got 3"):
        scaled({**rule, "beta_medium": 3})


def test_ignored_keys_are_named_once_each(said):
    rope = {"rope_type": "linear", "factor": 2.0, "original_max_position_embeddings": 1024, "finetuned": True}
    for _ in range(3):
        assert scaled(rope).scaling == Linear(2.0)
    assert scaled({**rope, "rope_type": "dynamic"}).scaling == DynamicNTK(2.0, 4096)
    messages = [record.getMessage() for record in said.records]
    for rule in ("linear", "dynamic"):
        for key in ("original_max_position_embeddings", "finetuned"):
            assert messages.count(f"{key} is ignored: the rule {rule!r} does not use it") == 1
    assert len(messages) == 4
    assert {record.name for record in said.records} == {"jax_rope"}


def test_used_keys_are_not_named(said):
    for rule in RULES:
        scaled(rule)
    assert not said.records


@pytest.mark.parametrize(
    "rule, key",
    [("linear", "factor"), ("dynamic", "factor"), ("longrope", "short_factor"), ("longrope", "long_factor")]
    + [("llama3", key) for key in ("factor", "low_freq_factor", "high_freq_factor")],
)
def test_missing_keys(rule, key):
    (rope,) = (r for r in RULES if r["rope_type"] == rule)
    with pytest.raises(ValueError, match=rf"^{key} must be given for the rule '{rule}', got only \["):
        scaled({k: v for k, v in rope.items() if k != key})


def test_missing_length_and_rule():
    with pytest.raises(ValueError, match=r"^max_position_embeddings must be given for the rule 'dynamic'"):
        scaled({"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=None)
    with pytest.raises(ValueError, match="rope_type must be a rule that takes factor, got none"):
        scaled({"factor": 2.0})


@pytest.mark.parametrize(
    "config, key",
    [
        ({**LLAMA, "rope_theta": [1e4, 1e6]}, "rope_theta"),
        ({**LLAMA, "rope_theta": "1e4"}, "rope_theta"),
        ({**LLAMA, "rope_scaling": "yarn"}, "rope_scaling"),
        ({**LLAMA, "rope_scaling": {"mrope_section": 64}}, "mrope_section"),
        ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor"),
        ({**LLAMA, "rope_scaling": {"rope_type": "longrope", "short_factor": 1, "long_factor": [1]}}, "^short_factor"),
    ],
)
def test_values_of_the_wrong_type(config, key):
    with pytest.raises(TypeError, match=key):
        Rotary.from_hf(config)


@pytest.mark.parametrize(
    "config, key",
    [
        ({"model_type": "deepseek_v4", "compress_rope_theta": 1.6e5}, "model_type"),
        ({"model_type": "ernie4_5_vl_moe_text"}, "model_type"),
        ({**LLAMA, "model_type": "hunyuan_vl", "rope_scaling": {"mrope_section": [16] * 4}}, "mrope_section"),
        ({**LLAMA, "layer_rope_theta": [1e4, 1e6]}, "layer_rope_theta"),
        ({**LLAMA, "model_type": "chatglm", "rope_ratio": 50}, "rope_ratio"),
    ],
)
def test_what_one_rotary_cannot_describe(config, key):
    with pytest.raises(ValueError, match=rf"^{key} must be "):
        Rotary.from_hf(config)


@pytest.mark.parametrize("factor, low, high, original", [(8, 1, 4, 8192), (32, 1, 4, 8192), (8, 2, 5, 1024)])
def test_no_number_of_llama3_is_built_in(factor, low, high, original):
    rope = {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    expected = []
    for w in omega(5e5, 128):
        wavelength = 2 * math.pi / w
        if wavelength < original / high:
            expected.append(w)
        elif wavelength > original / low:
            expected.append(w / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            expected.append((1 - smooth) * w / factor + smooth * w)
    rotary = scaled({**rope, "original_max_position_embeddings": original}, rope_theta=5e5)
    np.testing.assert_allclose(rotary.inv_freq(128), expected, rtol=1e-12)


@pytest.mark.parametrize("rule", ["yarn", "longrope", "llama3"])
def test_original_length_in_either_place(rule):
    (rope,) = (r for r in RULES if r["rope_type"] == rule)
    outside = {key: value for key, value in rope.items() if key != "original_max_position_embeddings"}
    original = rope["original_max_position_embeddings"]
    assert scaled(rope) == scaled(outside, original_max_position_embeddings=original)
    assert scaled(rope).scaling.original_max_position_embeddings == original
    assert scaled(outside).scaling.original_max_position_embeddings == 4096
    # The package prefers the one outside.
    assert scaled(rope, original_max_position_embeddings=512).scaling.original_max_position_embeddings == 512


def test_factor_is_the_ratio_of_lengths_unless_given():
    for rope in ({**YARN, "factor": None}, {"type": "longrope", "original_max_position_embeddings": 4096, **FACTORS}):
        assert scaled(rope, max_position_embeddings=32768).scaling.factor == 8
        assert scaled({**rope, "factor": 3.0}, max_position_embeddings=32768).scaling.factor == 3


def test_attention_factor_of_yarn():
    assert scaled(YARN).attention_factor() == pytest.approx(0.1 * math.log(4) + 1)
    for given in (1.0, 0.7, 2):  # it replaces the default, and is not multiplied onto it
        assert scaled({**YARN, "attention_factor": given}).attention_factor() == given
    both = {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}
    expected = (0.15 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert scaled(both).attention_factor() == pytest.approx(expected)
    assert scaled({**both, "attention_factor": 1.25}).attention_factor() == 1.25


def test_other_numbers_of_yarn():
    rotary = scaled({**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False})
    assert rotary.scaling == YaRN(4.0, 4096, beta_fast=16, beta_slow=2, truncate=False)


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_longrope_and_its_old_names(name):
    rope = {"type": name, "original_max_position_embeddings": 2048, **FACTORS}
    rotary = scaled(rope)
    assert rotary.scaling == LongRoPE((1.0,) * 64, (2.0,) * 64, 2048, 2.0)
    assert rotary.attention_factor(1) == pytest.approx(math.sqrt(1 + math.log(2) / math.log(2048)))
    assert scaled({**rope, "attention_factor": 1.5}).attention_factor(1) == 1.5
    np.testing.assert_allclose(rotary.inv_freq(128, 2048), omega(1e4, 128), rtol=1e-12)
    np.testing.assert_allclose(rotary.inv_freq(128, 2049), omega(1e4, 128) / 2, rtol=1e-12)


def test_mscales_of_phi_moe():
    rope = {"type": "longrope", "original_max_position_embeddings": 2048, "short_mscale": 1.2, "long_mscale": 1.3}
    rotary = scaled({**rope, **FACTORS}, model_type="phimoe")
    assert (rotary.attention_factor(2048), rotary.attention_factor(2049)) == (1.2, 1.3)


def test_alpha_of_hunyuan(said):
    rope = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    rotary = scaled(rope, model_type="hunyuan_v1_dense")
    assert not rotary.depends_on_length
    np.testing.assert_allclose(rotary.inv_freq(128), omega(1e4 * 1000 ** (128 / 126), 128), rtol=1e-12)
    assert {record.getMessage().split()[0] for record in said.records} == {"factor", "beta_fast", "mscale"}


@pytest.mark.parametrize(
    "family, told, layout",
    [
        ("qwen2_vl", {}, "contiguous"),
        ("qwen2_vl", {"mrope_interleaved": False}, "contiguous"),
        ("qwen2_5_vl_text", {"rope_type": "mrope"}, "contiguous"),
        ("qwen3_vl_text", {"mrope_interleaved": True}, "interleaved"),
        ("qwen3_omni_moe_text", {"interleaved": True}, "interleaved"),
        ("qwen3_vl_moe_text", {}, "interleaved"),
    ],
)
def test_sections(family, told, layout):
    rotary = scaled({"mrope_section": [24, 20, 20], **told}, model_type=family, head_dim=128)
    assert (rotary.sections, rotary.section_layout, rotary.pairing) == ((24, 20, 20), layout, "half")


def test_sections_of_a_part_of_the_head():
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    config = {"model_type": "qwen3_5_text", "head_dim": 256, "rope_parameters": {**rope, "mrope_interleaved": True}}
    expected = Rotary(1e7, "half", 64, sections=(11, 11, 10), section_layout="interleaved")
    assert Rotary.from_hf(config) == expected
    np.testing.assert_allclose(expected.inv_freq(256), omega(1e7, 64), rtol=1e-12)
    glm = {"model_type": "glm4v_text", "head_dim": 128, "partial_rotary_factor": 0.5}
    glm["rope_scaling"] = {"type": "default", "mrope_section": [8, 12, 12]}
    assert Rotary.from_hf(glm) == Rotary(rotary_dim=64, sections=(8, 12, 12))
    with pytest.raises(ValueError, match=r"mrope_section must add up to the 64 rotated pairs, got \[8, 12, 12\]"):
        Rotary.from_hf({**glm, "partial_rotary_factor": 1.0})


def test_sections_with_a_rule():
    rotary = scaled({**YARN, "mrope_section": [16, 24, 24]}, model_type="qwen2_5_vl_text")
    assert rotary.sections == (16, 24, 24) and rotary.scaling == YaRN(4.0, 4096)
