"""The decoder architectures that aserve runs, one row each, and how they differ."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aserve.builtin_models import DEFAULT_VOCAB_SIZES
from aserve.errors import ConfigError
from aserve.kernels.operators import Activation


@dataclass(frozen=True, slots=True)
class Architecture:
    """What the name of an architecture decides; everything else stands in the checkpoint's own config."""

    model_type: str  # in config.json
    gguf_name: str | None = None  # "general.architecture" of its GGUF files
    has_qkv_bias: bool = False  # always; others follow "attention_bias", which also covers the output projection
    has_qk_norm: bool = False
    window: Literal["none", "all", "switched", "by_layer", "by_pattern"] = "none"  # whose "sliding_window" it is
    activation: Activation = "silu"
    has_sandwich_norms: bool = False  # norms behind attention and feed-forward as well as before
    has_unit_offset_norms: bool = False  # the checkpoint keeps a norm's weight less 1
    scales_embeddings: bool = False  # by the square root of hidden_size
    has_local_rope: bool = False  # layers with a window have rotary parameters of their own
    has_vision: bool = False  # its text model, which is what runs, has a "text_config" and tensor names of its own
    has_merged_projections: bool = False  # the checkpoint holds qkv_proj and gate_up_proj instead of their parts
    has_experts: bool = False  # feed-forward blocks may be mixtures of experts
    has_clamped_experts: bool = False  # these have biases and cut gates; one tensor has the rows of all by turns
    may_be_mxfp4: bool = False  # so may its experts be quantised
    has_sinks: bool = False  # a learned logit per head takes part in the softmax of attention
    may_rotate_partly: bool = False  # heeds "partial_rotary_factor"
    defaults: Mapping[str, Any] = field(
        default_factory=dict
    )  # fields of config.json that may be absent, as transformers
    refused: tuple[str, ...] = ()  # fields of config.json that must be off
    renamed: Mapping[str, str] = field(default_factory=dict)  # parts of its tensors' names -> what the slots call them
    has_permuted_gguf: bool = False  # its GGUF files hold query and key rows for the interleaved rotary style


GEMMA3 = Architecture(
    "gemma3_text",
    has_qk_norm=True,
    window="by_pattern",
    activation="gelu_tanh",
    has_sandwich_norms=True,
    has_unit_offset_norms=True,
    scales_embeddings=True,
    has_local_rope=True,
    defaults={
        "vocab_size": DEFAULT_VOCAB_SIZES["gemma3_text"],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    refused=("use_bidirectional_attention", "attn_logit_softcapping"),
)

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", "llama", has_permuted_gguf=True),
    # Its GGUF files say "llama".
    "MistralForCausalLM": Architecture("mistral", window="all", defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Architecture("qwen2", "qwen2", has_qkv_bias=True, window="by_layer"),
    "Qwen3ForCausalLM": Architecture("qwen3", "qwen3", has_qk_norm=True, window="by_layer", defaults={"head_dim": 128}),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        window="all",
        has_experts=True,
        defaults={
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        renamed={
            ".block_sparse_moe.": ".mlp.",
            ".w1.weight": ".gate_proj.weight",
            ".w2.weight": ".down_proj.weight",
            ".w3.weight": ".up_proj.weight",
        },
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        has_qk_norm=True,
        window="switched",
        has_experts=True,
        defaults={
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "sliding_window": 4096,
        },
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        window="by_pattern",
        has_experts=True,
        has_clamped_experts=True,
        may_be_mxfp4=True,
        has_sinks=True,
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        renamed={".mlp.router.": ".mlp.gate."},
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        window="all",
        has_merged_projections=True,
        may_rotate_partly=True,
        defaults={"sliding_window": None, "rms_norm_eps": 1e-5},
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
        window="by_pattern",
        activation="gelu_tanh",
        has_sandwich_norms=True,
        has_unit_offset_norms=True,
        scales_embeddings=True,
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        refused=("use_bidirectional_attention",),
    ),
    "Gemma3ForCausalLM": GEMMA3,
    "Gemma3ForConditionalGeneration": replace(GEMMA3, model_type="gemma3", has_vision=True),
}


def find_architecture(names: list[str], model_type: str) -> tuple[str, Architecture]:
    """Return the row for ``architectures`` of config.json or, where it names none, for ``model_type``."""
    for name, architecture in ARCHITECTURES.items():
        if name in names or (not names and architecture.model_type == model_type):
            return name, architecture
    raise ConfigError(f"unsupported architecture {', '.join(names) or model_type!r}; known: {', '.join(ARCHITECTURES)}")


def find_gguf_architecture(gguf_name: str) -> tuple[str, Architecture]:
    """Return the row for ``general.architecture`` of a GGUF file."""
    for name, architecture in ARCHITECTURES.items():
        if architecture.gguf_name == gguf_name:
            return name, architecture
    known = ", ".join(row.gguf_name for row in ARCHITECTURES.values() if row.gguf_name)
    raise ConfigError(f"unsupported GGUF architecture {gguf_name!r}; known: {known}")
