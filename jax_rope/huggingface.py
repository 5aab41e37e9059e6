"""What a model's ``config.json`` says about rotation, as one `jax_rope.Rotary`: see `read`."""

import json
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checks import shown
from .scaling import DynamicNTK, Linear, Llama3, LongRoPE, Proportional, Scaling, YaRN

if TYPE_CHECKING:
    from .rotary import Rotary

logger = logging.getLogger("jax_rope")
Config = dict[str, Any]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# How each family's modeling code pairs the elements of a head. Checked in transformers 5.24.0, function by function:
# rotate_half (or what stands for it) takes x[..., 0::2] and x[..., 1::2] and puts them back where they were, or
# (DeepSeek-V2, Llama 4) views pairs of neighbours as complex numbers. ChatGLM's code is published with its weights.
_INTERLEAVED = _names("""
    blt chatglm codegen cohere cohere2 cohere2_moe deepseek_v2 ernie4_5 ernie4_5_moe glm glm4
    glm4v glm_ocr gptj helium hy_v4_vl llama4 moonshine moonshine_streaming roformer
""")
# apply_rotary_pos_emb_interleave: neighbours are read, halves are written. sarvam_mla runs DeepSeek-V3's classes there;
# kimi_k2's published code is DeepSeek-V3's.
_INTERLEAVED_TO_HALF = _names("""
    axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 dots3_note glm4_moe_lite glm_moe_dsa kimi_k2 longcat_flash
    mistral4 mistral_large4 sarvam_mla youtu
""")
# rotate_half takes the first and the second half. Other families are taken to do the same, which is said in the log.
_HALF = _names("""
    afmoe apertus arcee aria bamba bitnet chameleon cohere_compass cosmos3_edge csm cwm dbrx dia diffllama doge dots1
    emu3 esm eurobert evolla exaone4 exaone_moe falcon falcon_h1 flex_olmo gemma gemma2 gemma3 gemma3n gemma4
    gemma4_unified glm4_moe glm4v_moe glm_image gpt_neox gpt_neox_japanese gpt_oss granite granitemoe granitemoehybrid
    granitemoeshared gte hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 hyperclovax jais2 jamba jetmoe
    jina_embeddings_v3 laguna lfm2 lfm2_moe llama mimi mimo_v2_flash minicpm3 minimax minimax_m2 ministral ministral3
    mistral mixtral mllama mllama_text_model modernbert modernbert_decoder moshi nemotron nemotron_h nomic_bert olmo
    olmo2 olmo3 olmoe paddleocr_vl persimmon phi phi3 phi4_multimodal phimoe pixtral qwen2 qwen2_5_omni qwen2_5_vl
    qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp
    recurrent_gemma seed_oss smollm3 solar_open stablelm starcoder2 t5gemma2 vaultgemma zamba2
""")
# Their code deals sections out in turn, whether or not the configuration says so.
_INTERLEAVED_SECTIONS = _names("""
    cohere_compass cosmos3_edge hy_v4_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen4_exp
""")

# What the package's configuration classes take where config.json is silent and the answer is not the usual one
# (published ones are: Gemma 3's names neither its thetas nor its head).
_GEMMA4 = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_SILENT: tuple[tuple[Config, frozenset[str]], ...] = (
    ({"head_dim": 64, "rope_theta": 1.5e5}, _names("gpt_oss")),
    ({"head_dim": 128}, _names("ernie4_5 glm glm4 helium hy_v3 llama4 minimax_m2 qwen3 qwen3_vl seed_oss solar_open")),
    ({"head_dim": 256}, _names("gemma gemma2 gemma3 gemma3n qwen3_5 qwen3_5_moe qwen3_next t5gemma2 vaultgemma")),
    ({"qk_rope_head_dim": 64}, _names("deepseek_v2 deepseek_v3")),
    ({"rotary_dim": 64}, _names("codegen gptj")),
    ({"rotary_pct": 0.25}, _names("gpt_neox")),
    ({"partial_rotary_factor": 0.25}, _names("qwen3_5 qwen3_5_moe qwen3_next stablelm")),
    ({"partial_rotary_factor": 0.5}, _names("bamba chatglm glm glm4 glm4_moe glm4v_moe nemotron persimmon phi")),
    ({"partial_rotary_factor": 0.5}, _names("recurrent_gemma")),
    ({"partial_rotary_factor": 0.9}, _names("moonshine")),
    ({"rope_theta": 1e5}, _names("helium")),
    ({"rope_theta": 5e5}, _names("bitnet blt cohere csm ernie4_5 ernie4_5_moe evolla flex_olmo llama4 mllama olmo3")),
    ({"rope_theta": 5e5}, _names("mllama_text_model paddleocr_vl qwen3_vl qwen3_vl_moe")),
    ({"rope_theta": 1e6}, _names("emu3 lfm2 lfm2_moe minimax mixtral phimoe qwen2_5_omni qwen2_5_vl qwen2_vl")),
    ({"rope_theta": 1e6}, _names("qwen3_omni_moe solar_open")),
    ({"rope_theta": 2e6}, _names("smollm3")),
    ({"rope_theta": 5e6}, _names("minimax_m2")),
    ({"rope_theta": 1e7}, _names("longcat_flash")),
    ({"rope_theta": 1.2e7}, _names("apertus")),
    ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, _names("gemma3 gemma3n t5gemma2")),
    ({"global_rope_theta": 1.6e5, "local_rope_theta": 1e4}, _names("modernbert modernbert_decoder")),
    ({"head_dim": 256, "global_head_dim": 512, "rope_parameters": _GEMMA4}, _names("gemma4 gemma4_unified")),
)

_NESTED = ("text_config", "thinker_config", "llm_config", "language_config")
_THETAS = ("rope_theta", "rotary_emb_base", "global_rope_theta", "rope_base")
_LOCAL_THETAS = ("rope_local_base_freq", "local_rope_theta", "swa_rope_theta")
_PARTS = ("partial_rotary_factor", "rotary_pct", "rope_pct")
# DeepSeek-V4 rotates the end of a head that is not split; ERNIE-VL and HunYuan-VL deal sections out in their own way.
_BEYOND_FAMILIES = ("deepseek_v4", "ernie4_5_vl_moe")
_BEYOND = ("compress_rope_theta", "layer_rope_theta", "partial_rotary_factors", "position_encoding_2d")
_ROTARY_KEYS = {"rope_parameters", "rope_scaling", "rotary_dim", "qk_rope_head_dim", "rope_ratio"}.union(
    _THETAS, _LOCAL_THETAS, _PARTS, _BEYOND
)

_EVERY_RULE = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "interleaved"}
_RULES: dict[str, set[str]] = {
    "default": set(),
    "mrope": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "alpha"},
    "yarn": {"factor", "original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim"}
    | {"beta_fast", "beta_slow", "truncate"},
    "longrope": {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    | {"short_mscale", "long_mscale"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "proportional": {"factor"},
}
_NO_RULE = {"finetuned", "llama_4_scaling_beta", "max_position_embeddings"}  # known, and not about rotation

_said: set[str] = set()


def read(config: Config | str | os.PathLike[str] | Any, layer_type: str | None = None) -> "Rotary":
    """What a model's ``config.json`` describes. Keys that are null count as absent.

    - The base: ``rope_theta``, or ``rotary_emb_base``, ``global_rope_theta``, ``rope_base``; else the family's.
    - The rule: ``rope_scaling`` or ``rope_parameters``, under ``rope_type`` or ``type``: default, mrope, linear,
      dynamic, yarn, longrope ("su"), llama3 or proportional, with that rule's keys. Each means what it means to the
      transformers package: the dynamic rule's original length is ``max_position_embeddings``, that of the others
      ``original_max_position_embeddings``, at the top level or in the rule, if it is there.
    - The window: ``head_dim``, or ``hidden_size`` over ``num_attention_heads``; of it ``partial_rotary_factor``,
      ``rotary_dim`` or ``rotary_pct``. With ``qk_rope_head_dim`` (multi-head latent attention) the Rotary describes
      that part of the head alone. The proportional rule keeps the whole head.
    - Sections: ``mrope_section``, in turn with ``mrope_interleaved``.
    - The pairing: that of the family's modeling code, by ``model_type``; ``"half"`` for unknown ones.

    Args:
      config: a dict, the path of a ``config.json`` or of its directory, or any object with ``to_dict()``. If it has
        no rotary keys of its own, those of its ``text_config``.
      layer_type: which kind of layer, where a model has several: by ``rope_parameters`` that name them, or by
        ``rope_local_base_freq`` or ``local_rope_theta`` (``"full_attention"`` and ``"sliding_attention"``).

    Returns:
      The Rotary of these layers.

    Raises:
      TypeError, ValueError: the configuration says something that is not known; the message names the key.
    """
    from .rotary import Rotary

    config = _text(_as_dict(config))
    family = str(config.get("model_type", "")).removesuffix("_text").replace("-", "_")
    for silent, families in _SILENT:
        if family in families:
            config = silent | config
    if family in _BEYOND_FAMILIES:
        raise ValueError(f"model_type must be one whose rotation one Rotary can describe, got {config['model_type']!r}")
    for key in _BEYOND:
        if config.get(key):
            raise ValueError(f"{key} must be absent, as one Rotary cannot describe it, got {shown(config[key])}")
    if config.get("rope_ratio", 1) != 1:
        got = shown(config["rope_ratio"])
        raise ValueError(f"rope_ratio must be 1 or absent, as its meaning varies by model, got {got}")
    rope = _layer(config, family, layer_type)
    rule = _rule(rope)
    rotary_dim = _window(config, rope, rule, layer_type)
    theta = _number("rope_theta", rope.get("rope_theta", _first(config, *_THETAS, otherwise=1e4)))
    if rule == "dynamic" and "alpha" in rope:  # HunYuan: the rule's name notwithstanding, the length does not matter
        if rotary_dim is None or rotary_dim <= 2:
            raise ValueError(f"head_dim must be known and above 2 for alpha, got rotary_dim {rotary_dim}")
        theta *= _number("alpha", rope["alpha"]) ** (rotary_dim / (rotary_dim - 2))
        rule = "default"
    sections, layout = _sections(family, rope, rotary_dim)
    return Rotary(
        theta=theta,
        pairing=_pairing(family, config),
        rotary_dim=rotary_dim,
        scaling=_scaling(config, rope, rule),
        sections=sections,
        section_layout=layout,
    )


def _as_dict(config: Any) -> Config:
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        config = json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    elif callable(getattr(config, "to_dict", None)):
        config = config.to_dict()
    if not isinstance(config, dict):
        raise TypeError(
            f"config must be a dict, the path of a config.json or an object with to_dict(), got {shown(config)}"
        )
    return {key: value for key, value in config.items() if value is not None}


def _text(config: Config) -> Config:
    if not config.keys() & _ROTARY_KEYS:
        for key in _NESTED:
            if key in config:
                return _text({"model_type": config.get("model_type", "")} | _as_dict(config[key]))
    return config


def _first(values: Config, *keys: str, otherwise: Any = None) -> Any:
    return next((values[key] for key in keys if key in values), otherwise)


def _number(key: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{key} must be a number, got {shown(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{key} must be finite, got {value}")
    return float(value)


def _need(values: Config, key: str, whose: str) -> Any:
    if key not in values:
        raise ValueError(f"{key} must be given for {whose}, got only {shown(sorted(values))}")
    return values[key]


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.info(message)


def _given(config: Config, form: str) -> Config:
    given = config.get(form, {})
    if not isinstance(given, dict):
        raise TypeError(f"{form} must be a dict or null, got {shown(given)}")
    given = {key: value for key, value in given.items() if value is not None}
    if "type" in given:
        given.setdefault("rope_type", given["type"])
        del given["type"]
    return given


def _layer(config: Config, family: str, layer_type: str | None) -> Config:
    """The rule's keys for this kind of layer."""
    old, new = _given(config, "rope_scaling"), _given(config, "rope_parameters")
    layers = {kind: _given(new, kind) for kind in new if isinstance(new[kind], dict)}
    for key in old:
        if layers:  # which of them would it scale?
            raise ValueError(f"rope_scaling must be absent where rope_parameters names layers, got {shown([*old])}")
        if new.get(key, old[key]) != old[key]:
            raise ValueError(
                f"rope_scaling and rope_parameters must be alike where both are given, "
                f"got {key} {shown(old[key])} and {shown(new[key])}"
            )
    rope = {kind: value for kind, value in new.items() if kind not in layers} | old
    if layers:
        layers = {kind: rope | layer for kind, layer in layers.items()}
    elif (local := _first(config, *_LOCAL_THETAS)) is not None:
        layers = {"full_attention": rope, "sliding_attention": {"rope_theta": local}}
    elif family == "olmo3" and old:  # as there, the rule is for full attention
        layers = {"full_attention": rope, "sliding_attention": {}}
    else:
        layer_types = config.get("layer_types")
        if layer_type is not None and layer_types and layer_type not in layer_types:
            raise ValueError(f"layer_type must be one of {sorted(set(layer_types))} or None, got {shown(layer_type)}")
        return rope
    if layer_type not in layers:
        raise ValueError(f"layer_type must be one of {sorted(layers)}, the rotary layers here, got {shown(layer_type)}")
    return layers[layer_type]


def _rule(rope: Config) -> str:
    rule = rope.get("rope_type", "default")
    if rule == "su" or (rule == "yarn" and "short_factor" in rope):  # Phi-3's first names for it
        rule = "longrope"
    if not isinstance(rule, str) or rule not in _RULES:
        raise ValueError(f"rope_type must be one of {', '.join(_RULES)}, got {shown(rule)}")
    known = _NO_RULE.union(*_RULES.values())
    for key in sorted(rope.keys() - _EVERY_RULE - _RULES[rule]):
        if key not in known:
            raise ValueError(f"{key} must be absent, as no frequency rule takes it, got {shown(rope[key])}")
        if "rope_type" not in rope and key not in _NO_RULE | {"original_max_position_embeddings"}:
            raise ValueError(f"rope_type must be a rule that takes {key}, got none")
        _say_once(f"{key} is ignored: the rule {rule!r} does not use it")
    if rule == "dynamic" and {"alpha", "factor"} <= rope.keys():
        _say_once("factor is ignored: the rule 'dynamic' does not use it beside alpha")
    return rule


def _window(config: Config, rope: Config, rule: str, layer_type: str | None) -> int | None:
    """How many elements are rotated, ``None`` for all of a head whose size is not known."""
    if config.get("qk_rope_head_dim"):  # a part of the head already: no fraction is taken of it again
        return config["qk_rope_head_dim"]
    head = _first(config, "head_dim", "kv_channels")
    if layer_type == "full_attention":
        head = config.get("global_head_dim", head)
    hidden = _first(config, "hidden_size", "n_embd")
    heads = _first(config, "num_attention_heads", "n_head", "encoder_num_attention_heads")
    if head is None and hidden and heads:
        head = hidden // heads
    if rule == "proportional":
        return head
    if "partial_rotary_factor" not in rope and "rotary_dim" in config:
        return config["rotary_dim"]
    part = _number("partial_rotary_factor", rope.get("partial_rotary_factor", _first(config, *_PARTS, otherwise=1.0)))
    if part == 1:
        return head
    if head is None:
        raise ValueError(f"head_dim must be known for partial_rotary_factor {part:g}, got None")
    width = int(head * part)
    if width <= 0 or width % 2 or width > head:
        raise ValueError(f"partial_rotary_factor must leave an even part of head_dim {head}, got {part:g}")
    return width


def _scaling(config: Config, rope: Config, rule: str) -> Scaling | None:
    def need(key: str) -> Any:
        return _need(rope, key, f"the rule {rule!r}")

    def given(*keys: str) -> Config:
        return {key: rope[key] for key in keys if key in rope}

    def longest() -> float:
        keys = ("max_position_embeddings", "n_positions")
        return _first(config, *keys) or _need(config, keys[0], f"the rule {rule!r}")

    def original() -> Any:
        # Phi-3 has it at the top level, which is what the package takes if there are two.
        key = "original_max_position_embeddings"
        return config[key] if key in config else rope[key] if key in rope else longest()

    def factor() -> float:
        return rope["factor"] if "factor" in rope else longest() / original()

    if rule == "linear":
        return Linear(need("factor"))
    if rule == "dynamic":
        return DynamicNTK(need("factor"), longest())  # type: ignore[arg-type]
    if rule == "yarn":
        keys = ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim")
        return YaRN(factor(), original(), **given(*keys))
    if rule == "longrope":
        factors = (need("short_factor"), need("long_factor"))
        return LongRoPE(*factors, original(), factor(), **given("attention_factor", "short_mscale", "long_mscale"))
    if rule == "llama3":
        return Llama3(need("factor"), need("low_freq_factor"), need("high_freq_factor"), original())
    if rule == "proportional":
        part = _first(rope, _PARTS[0], otherwise=_first(config, *_PARTS, otherwise=1.0))
        return Proportional(part, rope.get("factor", 1.0))
    return None


def _sections(family: str, rope: Config, rotary_dim: int | None) -> tuple[tuple[int, ...] | None, str]:
    sections = rope.get("mrope_section")
    if sections is None:
        return None, "contiguous"
    if family == "hunyuan_vl":
        raise ValueError(
            f"mrope_section must be absent for {family}, which deals it out as one Rotary cannot describe, "
            f"got {shown(sections)}"
        )
    if not isinstance(sections, list | tuple) or not all(isinstance(count, int) for count in sections):
        raise TypeError(f"mrope_section must be a list of numbers of pairs, got {shown(sections)}")
    if rotary_dim is not None and 2 * sum(sections) != rotary_dim:
        raise ValueError(f"mrope_section must add up to the {rotary_dim // 2} rotated pairs, got {shown(sections)}")
    in_turn = _first(rope, "mrope_interleaved", "interleaved", otherwise=family in _INTERLEAVED_SECTIONS)
    return tuple(sections), "interleaved" if in_turn else "contiguous"


def _pairing(family: str, config: Config) -> str:
    if family in _INTERLEAVED_TO_HALF:
        return "interleaved_to_half" if config.get("rope_interleave", True) else "half"
    if family == "deepseek_v2" and not config["qk_rope_head_dim"]:
        return "half"  # the variant without latent attention (DeepSeek-OCR) has Llama's
    if family in _INTERLEAVED:
        return "interleaved"
    if family not in _HALF:
        _say_once(f"model_type {config.get('model_type')!r} is not known: its weights are taken to want pairing 'half'")
    return "half"
