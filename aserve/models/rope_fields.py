"""Rotary parameters as config.json (both spellings) and GGUF metadata write them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aserve.errors import ConfigError
from aserve.layers.rotary import RopeConfig, RopeScaling
from aserve.models.fields import Fields

HF_SCALINGS: dict[str, RopeScaling] = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",  # its name in Phi-3's first checkpoints
}
GGUF_SCALINGS: dict[str, RopeScaling] = {"none": "none", "linear": "linear", "yarn": "yarn"}
STRETCHING = ("linear", "dynamic", "yarn")  # max_position_embeddings may still say the context before scaling


def scaled_context_len(rope: RopeConfig, declared_len: int) -> int:
    """Return the context in tokens that a model of ``declared_len`` reaches with its rope scaling."""
    if rope.scaling in STRETCHING:
        return max(declared_len, int(rope.original_context_len * rope.factor))
    return declared_len


def rope_from_hf(config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Read "rope_parameters" (transformers 5) or "rope_theta" and "rope_scaling" (before)."""
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConfigError(f"unsupported rope parameters, one set for all layers is expected: {parameters!r}")
    fields = Fields(parameters)
    fields.refuse("mrope_section", "multimodal rope")
    kind = fields.get("rope_type", str) or fields.get("type", str, "default")
    if kind not in HF_SCALINGS:
        raise ConfigError(f"unsupported rope_type {kind!r}; known: {', '.join(HF_SCALINGS)}")
    outer = Fields(config)
    rope = RopeConfig(
        theta=fields.get("rope_theta", float) or outer.get("rope_theta", float, 10000.0),
        scaling=HF_SCALINGS[kind],
        original_context_len=max_position_embeddings,
        partial_rotary_factor=fields.get("partial_rotary_factor", float)
        or outer.get("partial_rotary_factor", float, 1.0),
    )
    if rope.scaling in ("none", "dynamic"):  # transformers' dynamic scaling starts at max_position_embeddings
        return rope if rope.scaling == "none" else replace(rope, factor=fields.require("factor", float))
    original_len = fields.get("original_max_position_embeddings", int, max_position_embeddings)
    if rope.scaling == "longrope":
        original_len = outer.get("original_max_position_embeddings", int, original_len)
    rope = replace(rope, original_context_len=original_len)
    if rope.scaling == "llama3":
        return replace(
            rope,
            factor=fields.require("factor", float),
            low_freq_factor=fields.require("low_freq_factor", float),
            high_freq_factor=fields.require("high_freq_factor", float),
        )
    if rope.scaling == "yarn":
        return _yarn_from_hf(rope, fields, max_position_embeddings)
    if rope.scaling == "longrope":
        return _longrope_from_hf(rope, fields, max_position_embeddings)
    return replace(rope, factor=fields.require("factor", float))


def ropes_by_window_from_hf(config: Mapping[str, Any], max_position_embeddings: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the parameters of layers that see all keys, and of those with a window.

    "rope_parameters" has one set for each (transformers 5); before, "rope_theta" and "rope_scaling" were about the
    former and "rope_local_base_freq" about the latter.
    """
    sets = config.get("rope_parameters") or {}
    if not isinstance(sets, Mapping) or not sets.keys() <= {"full_attention", "sliding_attention"}:
        raise ConfigError(f"unsupported rope_parameters, one set for each type of layer is expected: {sets!r}")
    fields = Fields(config)
    theta, local_theta = fields.require("rope_theta", float), fields.require("rope_local_base_freq", float)
    full = {"rope_theta": theta, "rope_parameters": config.get("rope_scaling") or sets.get("full_attention")}
    local = {"rope_theta": local_theta, "rope_parameters": sets.get("sliding_attention")}
    return rope_from_hf(full, max_position_embeddings), rope_from_hf(local, max_position_embeddings)


def _yarn_from_hf(rope: RopeConfig, fields: Fields, max_position_embeddings: int) -> RopeConfig:
    factor = fields.get("factor", float) or max_position_embeddings / rope.original_context_len
    attention_factor = fields.get("attention_factor", float)
    if attention_factor is None:
        mscale, mscale_all_dim = fields.get("mscale", float), fields.get("mscale_all_dim", float)
        attention_factor = _yarn_temperature(factor, mscale if mscale and mscale_all_dim else 1.0)
        if mscale and mscale_all_dim:
            attention_factor /= _yarn_temperature(factor, mscale_all_dim)
    return replace(
        rope,
        factor=factor,
        attention_factor=attention_factor,
        beta_fast=fields.get("beta_fast", float) or 32.0,
        beta_slow=fields.get("beta_slow", float) or 1.0,
        is_range_truncated=fields.get("truncate", bool, True),
    )


def _longrope_from_hf(rope: RopeConfig, fields: Fields, max_position_embeddings: int) -> RopeConfig:
    for name in ("short_mscale", "long_mscale"):
        fields.refuse(name, "attention factor of longrope")
    if rope.original_context_len < 2:
        raise ConfigError(f"original_max_position_embeddings must be above 1, got {rope.original_context_len}")
    factor = fields.get("factor", float) or max_position_embeddings / rope.original_context_len
    temperature = math.sqrt(1 + math.log(factor) / math.log(rope.original_context_len)) if factor > 1 else 1.0
    return replace(
        rope,
        factor=factor,
        attention_factor=fields.get("attention_factor", float, temperature),
        short_factors=fields.require_floats("short_factor"),
        long_factors=fields.require_floats("long_factor"),
    )


def rope_from_gguf(fields: Fields, context_len: int) -> RopeConfig:
    """Read "<arch>.rope.*". Llama 3's scaling is not among them: it comes as the tensor rope_freqs."""
    fields.refuse("rope.dimension_sections", "multimodal rope")
    kind = fields.get("rope.scaling.type", str, "none")
    factor = fields.get("rope.scaling.factor", float) or fields.get("rope.scale_linear", float) or 1.0
    if kind == "none" and "rope.scaling.type" not in fields and factor != 1.0:
        kind = "linear"  # files written before the type had a key
    if kind not in GGUF_SCALINGS:
        raise ConfigError(f"unsupported rope.scaling.type {kind!r}; known: {', '.join(GGUF_SCALINGS)}")
    rope = RopeConfig(
        theta=fields.get("rope.freq_base", float, 10000.0),
        scaling=GGUF_SCALINGS[kind],
        factor=factor,
        original_context_len=fields.get("rope.scaling.original_context_length", int, 0) or context_len,
    )
    if rope.scaling != "yarn":
        return rope
    return replace(
        rope,
        attention_factor=_yarn_temperature(factor) * fields.get("rope.scaling.attn_factor", float, 1.0),
        beta_fast=fields.get("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=fields.get("rope.scaling.yarn_beta_slow", float, 1.0),
    )


def _yarn_temperature(factor: float, mscale: float = 1.0) -> float:
    """The attention temperature of YaRN's section 3.4 as a factor on cosines and sines."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
