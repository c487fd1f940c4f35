"""The shape of a decoder, whatever file format and spelling it came in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aserve.errors import ConfigError
from aserve.gguf_header import GgufTensor
from aserve.kernels.operators import Activation
from aserve.layers.rotary import RopeConfig
from aserve.models.architectures import Architecture, find_architecture, find_gguf_architecture
from aserve.models.fields import Fields
from aserve.models.moe_config import COUNTS, MoeConfig, moe_from_hf
from aserve.models.rope_fields import rope_from_gguf, rope_from_hf, ropes_by_window_from_hf, scaled_context_len

ACTIVATIONS: dict[Activation, tuple[str, ...]] = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and flags of one model; ``sliding_windows`` has one entry per layer, in keys seen, None for all."""

    architecture: str  # as in ARCHITECTURES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context_len: int  # tokens, after rope scaling
    rope: RopeConfig
    local_rope: RopeConfig | None = None  # of layers with a window; None: the same
    sliding_windows: tuple[int | None, ...]
    has_qkv_bias: bool = False
    has_output_bias: bool = False  # of the attention's output projection
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_merged_projections: bool = False  # of the checkpoint's tensors; the model merges them anyway
    has_sandwich_norms: bool = False  # norms behind attention and feed-forward as well as before
    has_unit_offset_norms: bool = False  # the checkpoint keeps a norm's weight less 1
    scales_embeddings: bool = False  # by the square root of hidden_size
    moe: MoeConfig | None = None
    has_sinks: bool = False  # a learned logit per head takes part in the softmax of attention
    activation: Activation = "silu"
    attention_scale: float | None = None  # of scores; None: head_dim ** -0.5
    attention_softcap: float | None = None  # of scores
    logits_softcap: float | None = None
    is_head_tied: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd, which rotary embedding does not allow")
        self.rope.check(self.head_dim)
        if self.local_rope is not None:
            self.local_rope.check(self.head_dim)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "DecoderConfig":
        """Read the content of config.json.

        Raises ConfigError naming the field for what is unsupported.
        """
        model_type = Fields(config).get("model_type", str, "")
        name, architecture = find_architecture(config.get("architectures") or [], model_type)
        _refuse_quantised(config, architecture)
        if architecture.has_vision:
            config = _text_config(config, architecture)
        config = {**architecture.defaults, **config}
        fields = Fields(config)
        _check_for(architecture, fields)
        hidden_size, num_heads = fields.require_size("hidden_size"), fields.require_size("num_attention_heads")
        num_layers = fields.require_size("num_hidden_layers")
        head_dim = fields.get_size("head_dim") or _split(hidden_size, num_heads)
        max_context_len = fields.require_size("max_position_embeddings")
        local_rope = None
        if architecture.has_local_rope:
            rope, local_rope = ropes_by_window_from_hf(config, max_context_len)
        else:
            rope = rope_from_hf(config, max_context_len)
            max_context_len = scaled_context_len(rope, max_context_len)
        if rope.partial_rotary_factor != 1.0 and not architecture.may_rotate_partly:
            raise ConfigError(f"unsupported: partial_rotary_factor is {rope.partial_rotary_factor}")
        has_bias = fields.get("attention_bias", bool, False)
        query_scalar = fields.get_positive("query_pre_attn_scalar")
        return cls(
            architecture=name,
            vocab_size=fields.require_size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.require_size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.get_size("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.get("rms_norm_eps", float, 1e-6),
            max_context_len=max_context_len,
            rope=rope,
            local_rope=local_rope,
            sliding_windows=_windows_from_hf(config, architecture, num_layers),
            has_qkv_bias=has_bias or architecture.has_qkv_bias,
            has_output_bias=has_bias and not architecture.has_qkv_bias,
            has_mlp_bias=fields.get("mlp_bias", bool, False),
            has_qk_norm=architecture.has_qk_norm,
            has_merged_projections=architecture.has_merged_projections,
            has_sandwich_norms=architecture.has_sandwich_norms,
            has_unit_offset_norms=architecture.has_unit_offset_norms,
            scales_embeddings=architecture.scales_embeddings,
            moe=moe_from_hf(config, num_layers, is_clamped=architecture.has_clamped_experts)
            if architecture.has_experts
            else None,
            has_sinks=architecture.has_sinks,
            activation=architecture.activation,
            attention_scale=None if query_scalar is None else query_scalar**-0.5,
            attention_softcap=fields.get_positive("attn_logit_softcapping"),
            logits_softcap=fields.get_positive("final_logit_softcapping"),
            is_head_tied=fields.get("tie_word_embeddings", bool, False),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensors: Mapping[str, GgufTensor]) -> "DecoderConfig":
        """Read the metadata of a GGUF file; biases, head and vocabulary size show in its ``tensors``.

        Raises ConfigError naming the key for what is unsupported.
        """
        gguf_name = Fields(metadata).require("general.architecture", str)
        fields = Fields(metadata, prefix=f"{gguf_name}.")
        fields.refuse("expert_count", "mixture of experts in a GGUF file (safetensors are read)")
        name, architecture = find_gguf_architecture(gguf_name)
        hidden_size, num_heads = fields.require_size("embedding_length"), fields.require_size("attention.head_count")
        num_layers = fields.require_size("block_count")
        head_dim = fields.get_size("attention.key_length") or _split(hidden_size, num_heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if (other := fields.get(key, int, head_dim)) != head_dim:
                raise ConfigError(f"unsupported: {gguf_name}.{key} is {other}, but a key has {head_dim} channels")
        max_context_len = fields.require_size("context_length")
        rope = rope_from_gguf(fields, max_context_len)
        window = fields.get("attention.sliding_window", int, 0) or None
        embeddings = tensors.get("token_embd.weight")
        return cls(
            architecture=name,
            vocab_size=embeddings.shape[0] if embeddings else fields.require_size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.require_size("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.get_size("attention.head_count_kv") or num_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.require("attention.layer_norm_rms_epsilon", float),
            max_context_len=scaled_context_len(rope, max_context_len),
            rope=rope,
            sliding_windows=(window,) * num_layers,
            has_qkv_bias="blk.0.attn_q.bias" in tensors,
            has_output_bias="blk.0.attn_output.bias" in tensors,
            has_mlp_bias="blk.0.ffn_up.bias" in tensors,
            has_qk_norm=architecture.has_qk_norm,
            is_head_tied="output.weight" not in tensors,
        )


def is_mxfp4(config: Mapping[str, Any]) -> bool:
    """Whether the content of config.json says that experts are kept in MXFP4."""
    return Fields(config).get_fields("quantization_config").get("quant_method", str) == "mxfp4"


def _refuse_quantised(config: Mapping[str, Any], architecture: Architecture) -> None:
    fields = Fields(config)
    is_read = architecture.may_be_mxfp4 and is_mxfp4(config)
    if not is_read and not _quantises_kv_only(fields.get_fields("quantization_config")):
        fields.refuse("quantization_config", "quantised checkpoint")


def _quantises_kv_only(quantization: Fields) -> bool:
    """Whether weights are as they were and the checkpoint just adds scales for its keys and values."""
    is_known = quantization.get("quant_method", str) == "compressed-tensors"
    return is_known and "kv_cache_scheme" in quantization and not quantization.get_fields("config_groups")


def _text_config(config: Mapping[str, Any], architecture: Architecture) -> Mapping[str, Any]:
    """Return the fields of the text model in the config of one that sees images as well."""
    text_config = config.get("text_config")
    if not isinstance(text_config, Mapping):
        raise ConfigError(f"the model's config lacks text_config, got {text_config!r}")
    _refuse_quantised(text_config, architecture)
    return text_config


def _check_for(architecture: Architecture, fields: Fields) -> None:
    for name in architecture.refused:
        fields.refuse(name, "option")
    for name in () if architecture.has_experts else (*COUNTS, "n_routed_experts"):
        fields.refuse(name, "mixture of experts")
    # The field "hidden_act" of Gemma is older than its activation and counts for nothing.
    names = ("hidden_act", "hidden_activation") if architecture.activation == "silu" else ("hidden_activation",)
    spellings = ACTIVATIONS[architecture.activation]
    for name in names:
        if (activation := fields.get(name, str, spellings[0])) not in spellings:
            raise ConfigError(f"unsupported activation: {name} is {activation!r}")


def _split(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ConfigError(f"hidden size {hidden_size} does not divide by {num_heads} heads, and head_dim is absent")
    return hidden_size // num_heads


def _windows_from_hf(config: Mapping[str, Any], architecture: Architecture, num_layers: int) -> tuple[int | None, ...]:
    fields = Fields(config)
    window = fields.get_size("sliding_window")
    has_switch = architecture.window in ("switched", "by_layer")
    if architecture.window == "none" or (has_switch and not fields.get("use_sliding_window", bool, False)):
        return (None,) * num_layers
    if architecture.window in ("all", "switched"):
        return (window,) * num_layers
    kinds = config.get("layer_types") or _default_layer_types(fields, architecture, num_layers)
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(f"unsupported layer_types for {num_layers} layers: {kinds!r}")
    if window is None:
        window = fields.require_size("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _default_layer_types(fields: Fields, architecture: Architecture, num_layers: int) -> list[str]:
    if architecture.window == "by_pattern":
        pattern = fields.require_size("sliding_window_pattern")
        are_sliding = [(layer_idx + 1) % pattern != 0 for layer_idx in range(num_layers)]
    else:
        first = fields.get("max_window_layers", int, 28)
        are_sliding = [layer_idx >= first for layer_idx in range(num_layers)]
    return ["sliding_attention" if is_sliding else "full_attention" for is_sliding in are_sliding]
