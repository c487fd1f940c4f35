"""What is read from config.json and GGUF metadata, and what is refused by name."""

import math
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from aserve.errors import ConfigError
from aserve.gguf_header import GgufTensor
from aserve.models.config import DecoderConfig

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN = LLAMA_8B | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_scaling": None}

MIXTRAL = LLAMA_8B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "rope_scaling": None,
}

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}

PHI3 = {  # Phi-3-mini-128k-instruct, without its factors
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
GEMMA2 = {  # gemma-2-9b-it, without what its config.json leaves to the defaults
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA3: dict[str, Any] = {  # gemma-3-4b-it, its text part whole
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "mm_tokens_per_image": 256,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
}


def changed(config: dict[str, Any] = LLAMA_8B, **changes: Any) -> dict[str, Any]:
    return config | changes


def longrope(**changes: Any) -> dict[str, Any]:
    scaling = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    return changed(PHI3, rope_scaling=scaling | changes)


def gemma3_text(**changes: Any) -> dict[str, Any]:
    return GEMMA3["text_config"] | {"architectures": ["Gemma3ForCausalLM"]} | changes


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in LLAMA_8B.items() if key != name}


def test_llama_3_1_8b() -> None:
    config = DecoderConfig.from_hf(LLAMA_8B)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.num_layers, config.hidden_size, config.intermediate_size) == (32, 4096, 14336)
    assert config.max_context_len == 131072
    assert (config.rope.scaling, config.rope.factor, config.rope.original_context_len) == ("llama3", 8.0, 8192)
    assert not config.is_head_tied
    assert config.sliding_windows == (None,) * 32


def test_model_type_stands_in_for_missing_architectures() -> None:
    assert DecoderConfig.from_hf(without("architectures")).architecture == "LlamaForCausalLM"


def test_integers_are_fine_where_floats_are_expected() -> None:
    assert DecoderConfig.from_hf(changed(rope_theta=1000000)).rope.theta == 1e6


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (changed(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
        (changed(architectures=["LlamaForSequenceClassification"]), "LlamaForSequenceClassification"),
        (changed(architectures=[], model_type="gemma3n"), "gemma3n"),
        (changed(num_local_experts=8), "num_local_experts"),
        (changed(GPT_OSS_20B, swiglu_limit=0), "swiglu_limit must be positive"),
        (changed(GPT_OSS_20B, swiglu_alpha="x"), "swiglu_alpha must be of type float"),
        (changed(GPT_OSS_20B, quantization_config={"quant_method": "awq"}), "quantization_config.*awq"),
        (changed(MIXTRAL, num_local_experts=None), "lacks num_experts"),
        (changed(MIXTRAL, num_local_experts=-1), "num_local_experts must be positive"),
        (changed(MIXTRAL, num_experts_per_tok=9), "num_experts_per_tok is 9, but there are 8 experts"),
        (changed(MIXTRAL, mlp_only_layers=3), "mlp_only_layers must be a list of layers, got 3"),
        (changed(MIXTRAL, decoder_sparse_step=0), "decoder_sparse_step must be positive"),
        (changed(MIXTRAL, norm_topk_prob="yes"), "norm_topk_prob must be of type bool"),
        (changed(quantization_config={"quant_method": "awq"}), "quantization_config.*awq"),
        (changed(hidden_act="gelu"), "hidden_act.*gelu"),
        (changed(partial_rotary_factor=0.5), "partial_rotary_factor"),
        (changed(rope_scaling={"rope_type": "longrope", "factor": 2.0}), "lacks short_factor"),
        (changed(PHI3, partial_rotary_factor=0.31), "partial_rotary_factor 0.31 rotates 29 of 96"),
        (changed(PHI3, partial_rotary_factor=1.5), "partial_rotary_factor"),
        (longrope(short_factor=[1.0] * 47), "short_factor must be 48 positive numbers"),
        (longrope(long_factor=[0.0] * 48), "long_factor must be 48 positive numbers"),
        (longrope(long_factor="all"), "long_factor must be a list of numbers"),
        (longrope(long_mscale=1.2), "long_mscale"),
        (changed(GEMMA2, hidden_activation="gelu"), "hidden_activation.*gelu"),
        (changed(GEMMA2, attn_logit_softcapping=0.0), "attn_logit_softcapping must be positive"),
        (changed(GEMMA2, query_pre_attn_scalar=-1), "query_pre_attn_scalar must be positive"),
        (changed(GEMMA2, use_bidirectional_attention=True), "use_bidirectional_attention"),
        (changed(GEMMA2, sliding_window=None), "lacks sliding_window"),
        (changed(GEMMA3, text_config=None), "lacks text_config"),
        (changed(GEMMA3, quantization_config={"bits": 4}), "quantization_config"),
        (gemma3_text(attn_logit_softcapping=50.0), "attn_logit_softcapping is 50"),
        (gemma3_text(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (gemma3_text(rope_parameters={"rope_theta": 1.0}), "one set for each type of layer"),
        (gemma3_text(rope_parameters={"sliding_attention": {"rope_type": "su"}}), "lacks short_factor"),
        (changed(rope_scaling={"rope_type": "default", "mrope_section": [16, 24, 24]}), "mrope_section"),
        (changed(rope_scaling={"rope_type": "linear"}), "lacks factor"),
        (changed(rope_scaling=None, rope_parameters={"full_attention": {"rope_theta": 1.0}}), "one set for all layers"),
        (changed(QWEN, use_sliding_window=True, sliding_window=8, layer_types=["chunked_attention"] * 32), "chunked"),
        (changed(QWEN, use_sliding_window=True, sliding_window=8, layer_types=["full_attention"]), "layer_types"),
        (changed(QWEN, use_sliding_window=True, max_window_layers=0), "sliding_window"),
        (changed(hidden_size="4096"), "hidden_size must be of type int"),
        (changed(num_hidden_layers=0), "num_hidden_layers must be positive"),
        (changed(num_attention_heads=True), "num_attention_heads must be of type int"),
        (changed(num_key_value_heads=0), "num_key_value_heads must be positive"),
        (changed(rope_theta=-1.0), "rope theta must be positive"),
        (changed(num_key_value_heads=5), "5 key-value heads"),
        (changed(head_dim=63), "head_dim 63"),
        (changed(hidden_size=4097), "4097 does not divide by 32 heads"),
        (without("vocab_size"), "lacks vocab_size"),
        (without("max_position_embeddings"), "lacks max_position_embeddings"),
    ],
)
def test_unsupported_configs_are_refused_by_name(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DecoderConfig.from_hf(config)


@pytest.mark.parametrize(
    ("scaling", "context_len"),
    [
        (None, 32768),
        ({"type": "linear", "factor": 4.0}, 131072),
        ({"type": "dynamic", "factor": 2.0}, 65536),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),  # Qwen2.5's own advice
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
    ],
)
def test_context_after_rope_scaling(scaling: dict[str, Any] | None, context_len: int) -> None:
    config = changed(QWEN, max_position_embeddings=32768, rope_scaling=scaling)
    assert DecoderConfig.from_hf(config).max_context_len == context_len


def test_phi_3_mini_128k() -> None:
    config = DecoderConfig.from_hf(longrope())
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 96)
    assert config.max_context_len == 131072
    assert config.rope.original_context_len == 4096
    assert config.rope.attention_factor == pytest.approx((1 + math.log(32) / math.log(4096)) ** 0.5)
    assert config.sliding_windows == (262144,) * 32


def test_gemma_2_9b() -> None:
    config = DecoderConfig.from_hf(GEMMA2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 8, 256)
    assert config.is_head_tied
    assert config.attention_scale == 1 / 16
    assert (config.attention_softcap, config.logits_softcap) == (50.0, 30.0)
    assert config.sliding_windows == (4096, None) * 21
    assert DecoderConfig.from_hf(changed(GEMMA2, hidden_act="gelu")).activation == "gelu_tanh"  # as in the first files


def test_gemma_3_4b() -> None:
    """With the values that transformers gives what its config.json leaves out."""
    config = DecoderConfig.from_hf(GEMMA3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_context_len) == (262208, 131072)
    assert config.is_head_tied
    assert config.local_rope is not None
    assert (config.rope.theta, config.rope.scaling, config.rope.factor) == (1e6, "linear", 8.0)
    assert (config.local_rope.theta, config.local_rope.scaling) == (1e4, "none")
    assert (config.attention_softcap, config.logits_softcap) == (None, None)
    assert config.sliding_windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4


def test_layers_with_experts() -> None:
    moe = DecoderConfig.from_hf(MIXTRAL).moe
    assert moe is not None
    assert (moe.routing.num_experts, moe.routing.experts_per_token, moe.routing.is_renormalised) == (8, 2, True)
    assert (moe.intermediate_size, moe.are_sparse) == (14336, (True,) * 32)
    qwen = changed(
        architectures=["Qwen3MoeForCausalLM"],
        num_hidden_layers=6,
        num_experts=128,
        rope_scaling=None,
        decoder_sparse_step=2,
        mlp_only_layers=[1],
    )
    moe = DecoderConfig.from_hf(qwen).moe
    assert moe is not None
    assert (moe.routing.experts_per_token, moe.routing.is_renormalised, moe.intermediate_size) == (8, False, 768)
    assert moe.are_sparse == (False, False, False, True, False, True)
    assert DecoderConfig.from_hf(LLAMA_8B).moe is None


def test_gpt_oss() -> None:
    """As its first checkpoints write it, and with what transformers takes for fields that are left out."""
    from transformers import GptOssConfig

    config = DecoderConfig.from_hf(GPT_OSS_20B)
    assert config.moe is not None
    assert (config.moe.routing.num_experts, config.moe.routing.experts_per_token) == (32, 4)
    assert (config.moe.swiglu.alpha, config.moe.swiglu.limit, config.moe.swiglu.up_offset) == (1.702, 7.0, 1.0)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (64, 8, 64)
    assert (config.has_sinks, config.has_qkv_bias, config.has_output_bias) == (True, True, True)
    assert config.sliding_windows == (128, None) * 12
    assert config.max_context_len == 131072
    rope = config.rope
    assert (rope.scaling, rope.theta, rope.factor, rope.original_context_len) == ("yarn", 150000.0, 32.0, 4096)
    assert not rope.is_range_truncated
    assert rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    kept = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    sizes = ("num_attention_heads", "num_hidden_layers", "num_local_experts")
    sparse = {name: GPT_OSS_20B[name] for name in (*kept, *sizes)}
    assert DecoderConfig.from_hf(sparse) == config
    assert DecoderConfig.from_hf(GptOssConfig(**sparse).to_dict()) == config


def test_sliding_windows() -> None:
    mistral = changed(architectures=["MistralForCausalLM"], num_hidden_layers=4)
    assert DecoderConfig.from_hf(mistral).sliding_windows == (4096,) * 4  # transformers' default
    assert DecoderConfig.from_hf(mistral | {"sliding_window": None}).sliding_windows == (None,) * 4
    qwen = changed(QWEN, num_hidden_layers=4, sliding_window=32, max_window_layers=3)
    assert DecoderConfig.from_hf(qwen).sliding_windows == (None,) * 4
    assert DecoderConfig.from_hf(qwen | {"use_sliding_window": True}).sliding_windows == (None, None, None, 32)


GGUF = {
    "general.architecture": "qwen2",
    "qwen2.block_count": 2,
    "qwen2.context_length": 1024,
    "qwen2.embedding_length": 64,
    "qwen2.feed_forward_length": 96,
    "qwen2.attention.head_count": 4,
    "qwen2.attention.head_count_kv": 2,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-6,
    "qwen2.rope.freq_base": 1000.0,
}


def gguf_tensors(*names: str) -> dict[str, GgufTensor]:
    return {name: GgufTensor((99, 64), GGMLQuantizationType.F32, 0, 99 * 64 * 4) for name in names}


def test_gguf_metadata() -> None:
    config = DecoderConfig.from_gguf(GGUF, gguf_tensors("token_embd.weight", "blk.0.attn_q.bias"))
    assert (config.architecture, config.vocab_size, config.head_dim) == ("Qwen2ForCausalLM", 99, 16)
    assert config.has_qkv_bias
    assert not config.has_output_bias
    assert config.is_head_tied
    assert config.rope.theta == 1000.0
    assert not DecoderConfig.from_gguf(GGUF, gguf_tensors("token_embd.weight", "output.weight")).is_head_tied


@pytest.mark.parametrize(
    ("keys", "scaling", "factor", "original_len"),
    [
        ({}, "none", 1.0, 1024),
        ({"rope.scaling.type": "none"}, "none", 1.0, 1024),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, "linear", 4.0, 1024),
        ({"rope.scale_linear": 2.0}, "linear", 2.0, 1024),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 256,
            },
            "yarn",
            4.0,
            256,
        ),
    ],
)
def test_gguf_rope_scaling(keys: dict[str, Any], scaling: str, factor: float, original_len: int) -> None:
    metadata = GGUF | {f"qwen2.{key}": value for key, value in keys.items()}
    rope = DecoderConfig.from_gguf(metadata, gguf_tensors("token_embd.weight")).rope
    assert (rope.scaling, rope.factor, rope.original_context_len) == (scaling, factor, original_len)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "phi3"}, "unsupported GGUF architecture 'phi3'"),
        ({"general.architecture": "gemma2"}, "unsupported GGUF architecture 'gemma2'"),
        ({"general.architecture": "gemma3"}, "unsupported GGUF architecture 'gemma3'"),
        ({"qwen2.expert_count": 8}, "qwen2.expert_count"),
        (
            {"general.architecture": "qwen3moe", "qwen3moe.expert_count": 128},
            r"mixture of experts in a GGUF file \(safetensors are read\): qwen3moe.expert_count is 128",
        ),
        ({"qwen2.rope.scaling.type": "longrope"}, "longrope"),
        ({"qwen2.rope.dimension_sections": [8, 4, 4]}, "dimension_sections"),
        ({"qwen2.rope.dimension_count": 8}, "rope.dimension_count is 8"),
        ({"qwen2.attention.value_length": 8}, "attention.value_length is 8"),
        ({"qwen2.attention.head_count": [4, 2]}, "head_count must be of type int"),
        ({"qwen2.context_length": None}, "lacks qwen2.context_length"),
    ],
)
def test_unsupported_gguf_metadata_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DecoderConfig.from_gguf(GGUF | changes, gguf_tensors("token_embd.weight"))
