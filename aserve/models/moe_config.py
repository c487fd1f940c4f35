"""What config.json says of a model's mixtures of experts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aserve.errors import ConfigError
from aserve.kernels.experts import SILU, Routing, SwiGlu
from aserve.models.fields import Fields

COUNTS = ("num_experts", "num_local_experts")  # the field has both names, in transformers too


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """The mixtures of a model, all of one shape; ``are_sparse`` has one entry per layer, False for a plain block."""

    routing: Routing
    intermediate_size: int  # of one expert
    are_sparse: tuple[bool, ...]
    swiglu: SwiGlu = SILU
    has_bias: bool = False  # of the router and of all projections
    is_interleaved: bool = False  # the checkpoint holds all experts in one, [E, in, out], gate and up part by turns


def moe_from_hf(config: Mapping[str, Any], num_layers: int, *, is_clamped: bool) -> MoeConfig:
    """Read the content of config.json, completed by what may be absent; ``is_clamped``: of experts as gpt-oss has them.

    Raises ConfigError naming the field for what is missing or makes no sense.
    """
    fields = Fields(config)
    num_experts = next((count for name in COUNTS if (count := fields.get_size(name))), None)
    if num_experts is None:
        raise ConfigError(f"the model's config lacks {COUNTS[0]}")
    experts_per_token = fields.require_size("num_experts_per_tok")
    if experts_per_token > num_experts:
        raise ConfigError(f"num_experts_per_tok is {experts_per_token}, but there are {num_experts} experts")
    return MoeConfig(
        routing=Routing(num_experts, experts_per_token, fields.require("norm_topk_prob", bool)),
        intermediate_size=fields.get_size("moe_intermediate_size") or fields.require_size("intermediate_size"),
        are_sparse=_sparse_layers(config, num_layers),
        swiglu=_clamped_swiglu(fields) if is_clamped else SILU,
        has_bias=is_clamped,
        is_interleaved=is_clamped,
    )


def _clamped_swiglu(fields: Fields) -> SwiGlu:
    return SwiGlu(fields.require("swiglu_alpha", float), fields.get_positive("swiglu_limit"), up_offset=1.0)


def _sparse_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    step = Fields(config).get_size("decoder_sparse_step") or 1
    plain = config.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(layer_idx) is int for layer_idx in plain):
        raise ConfigError(f"mlp_only_layers must be a list of layers, got {plain!r}")
    return tuple(layer_idx not in plain and (layer_idx + 1) % step == 0 for layer_idx in range(num_layers))
