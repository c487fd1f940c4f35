"""The decoder-only transformer behind all of ARCHITECTURES: one class, differences as flags."""

from dataclasses import replace

import torch
from torch import Tensor

from aserve.attention.base import AttentionSpec, KVScales
from aserve.attention.context import ForwardContext
from aserve.kernels.operators import HeadLayout, HeadNorms, KVTarget, Operators
from aserve.layers.embedding import Embedding, TiedEmbedding, TokenEmbedding
from aserve.layers.experts import Experts
from aserve.layers.linear import Linear
from aserve.layers.norm import NormWeight
from aserve.layers.rotary import RotaryTable, pair_halves
from aserve.layers.sinks import AttentionSinks
from aserve.layers.stored_kv_scales import StoredKVScales
from aserve.layers.weighted import WeightedLayer, WeightFormat, WeightSlot
from aserve.models.config import DecoderConfig
from aserve.models.moe_config import MoeConfig
from aserve.quantization.unquantized import Unquantized

MLP_NORM = "post_attention_layernorm"  # which says where it stands
SANDWICH_NORMS = ("pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm")


class Decoder:
    """Inference only; call it under ``torch.inference_mode``. T tokens, N rows to sample, E hidden, V vocabulary."""

    def __init__(self, config: DecoderConfig, weights: WeightFormat, operators: Operators) -> None:
        self.config = config
        self._operators = operators
        self._rotary = RotaryTable(config.rope, config.head_dim, config.max_context_len, weights)
        # Keeps no weights: what a checkpoint may say of frequencies is about the other one.
        self._local_rotary = (
            self._rotary
            if config.local_rope is None
            else RotaryTable(config.local_rope, config.head_dim, config.max_context_len, weights)
        )
        self._layers = [DecoderLayer(config, layer_idx, weights) for layer_idx in range(config.num_layers)]
        self._norm = _norm_weight("model.norm", config.hidden_size, config, weights)
        head_name = "model.embed_tokens" if config.is_head_tied else "lm_head"
        self._head = Linear(head_name, config.hidden_size, {head_name: config.vocab_size}, weights)
        self._embed: TokenEmbedding = (
            TiedEmbedding(self._head)
            if config.is_head_tied
            else Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, weights)
        )

        # Rounded to the activations' dtype, as the models were trained.
        scale = torch.tensor(config.hidden_size**0.5).to(weights.dtype).item()
        self._embedding_scale = scale if config.scales_embeddings else None

    def forward(self, token_ids: Tensor, ctx: ForwardContext, *, out: Tensor | None = None) -> Tensor:
        """Run token_ids [T] int64 through all layers; return what ``compute_logits`` takes, [T, E], in ``out``."""
        update = self._embed(token_ids)
        if self._embedding_scale is not None:
            update = update * self._embedding_scale
        residual: Tensor | None = None
        for layer in self._layers:
            rotary = self._rotary if layer.attention_spec.sliding_window is None else self._local_rotary
            update, residual = layer.forward(update, residual, rotary.cos_sin, ctx)
        assert residual is not None  # a model has layers
        return torch.add(residual, update, out=out) if out is not None else residual + update

    def compute_logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [N, V], in ``out``, for those rows of ``forward``'s result that are needed, [N, E]."""
        logits = self._operators.norm_logits(hidden, self._norm.weight, self.config.rms_norm_eps, self._head, out=out)
        cap = self.config.logits_softcap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def fit(self, max_model_len: int) -> None:
        """Choose what depends on how long a sequence may get, in tokens; before the first forward that counts."""
        self._rotary.fit(max_model_len)
        self._local_rotary.fit(max_model_len)

    def weighted_layers(self) -> list[WeightedLayer]:
        """Every layer that keeps weights, each once."""
        own: list[WeightedLayer] = [self._rotary, self._norm, self._head]
        if isinstance(self._embed, Embedding):
            own.append(self._embed)
        return own + [weighted for layer in self._layers for weighted in layer.weighted_layers()]

    def attention_specs(self) -> list[AttentionSpec]:
        """What each layer asks of the attention backend."""
        return [layer.attention_spec for layer in self._layers]

    def stored_kv_scales(self) -> list[KVScales | None]:
        """What the checkpoint says of each layer; see ``StoredKVScales.scales``."""
        return [layer.stored_kv_scales.scales for layer in self._layers]

    def slots(self) -> dict[str, WeightSlot]:
        """Map the tensor names of a checkpoint, as transformers spells them, to their slots."""
        return {name: slot for layer in self.weighted_layers() for name, slot in layer.slots().items()}


class DecoderLayer:
    """Attention and feed-forward; the residual stream is added inside the norms."""

    def __init__(self, config: DecoderConfig, layer_idx: int, weights: WeightFormat) -> None:
        name = f"model.layers.{layer_idx}"
        self._eps = config.rms_norm_eps
        self._attention_norm = _norm_weight(f"{name}.input_layernorm", config.hidden_size, config, weights)
        self._attention = Attention(config, layer_idx, weights)
        self.attention_spec = self._attention.spec
        self.stored_kv_scales = self._attention.stored_kv_scales
        first, *behind = SANDWICH_NORMS if config.has_sandwich_norms else (MLP_NORM,)
        self._mlp_norm = _norm_weight(f"{name}.{first}", config.hidden_size, config, weights)
        self._norms_behind = [_norm_weight(f"{name}.{other}", config.hidden_size, config, weights) for other in behind]
        self._mlp: Mlp | SparseMlp = (
            SparseMlp(config, config.moe, f"{name}.mlp", weights)
            if config.moe is not None and config.moe.are_sparse[layer_idx]
            else Mlp(config, f"{name}.mlp", weights)
        )

    def forward(
        self, update: Tensor, residual: Tensor | None, cos_sin: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor]:
        """Return (what this layer adds, the stream it is to be added to), each [T, E]."""
        operators = ctx.operators
        qkv, residual = operators.add_norm_linear(
            update, residual, self._attention_norm.weight, self._eps, self._attention.qkv
        )
        attended = self._attention.forward(qkv, cos_sin, ctx)
        if self._norms_behind:
            attended = operators.rms_norm(attended, self._norms_behind[0].weight, self._eps)
        update, residual = self._mlp.forward(attended, residual, self._mlp_norm.weight, self._eps, operators)
        if self._norms_behind:
            update = operators.rms_norm(update, self._norms_behind[1].weight, self._eps)
        return update, residual

    def weighted_layers(self) -> list[WeightedLayer]:
        """Every layer that keeps weights, each once."""
        norms: list[WeightedLayer] = [self._attention_norm, self._mlp_norm, *self._norms_behind]
        return norms + self._attention.weighted_layers() + self._mlp.weighted_layers()


class Attention:
    """Grouped-query attention over the paged pool, with optional biases, QK norm, sliding window and sinks."""

    def __init__(self, config: DecoderConfig, layer_idx: int, weights: WeightFormat) -> None:
        name = f"model.layers.{layer_idx}.self_attn"
        self._heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        merged_name = f"{name}.qkv_proj"
        parts = {f"{name}.q_proj": query_size, f"{name}.k_proj": key_size, f"{name}.v_proj": key_size}
        self._rotary_dim = config.rope.rotary_dim(config.head_dim)
        self.qkv = Linear(
            merged_name,
            config.hidden_size,
            {merged_name: sum(parts.values())} if config.has_merged_projections else parts,
            weights,
            has_bias=config.has_qkv_bias,
            arrange=self._pair_halves if self._rotary_dim < config.head_dim else None,
        )
        output_name = f"{name}.o_proj"
        self._output = Linear(
            output_name, query_size, {output_name: config.hidden_size}, weights, has_bias=config.has_output_bias
        )
        self._qk_norms = (
            (
                _norm_weight(f"{name}.q_norm", config.head_dim, config, weights),
                _norm_weight(f"{name}.k_norm", config.head_dim, config, weights),
            )
            if config.has_qk_norm
            else None
        )
        self.stored_kv_scales = StoredKVScales(name, config.num_kv_heads, weights)
        self._sinks = AttentionSinks(f"{name}.sinks", config.num_heads, weights) if config.has_sinks else None
        self.spec = AttentionSpec(
            layer_idx=layer_idx,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            sliding_window=config.sliding_windows[layer_idx],
            softcap=config.attention_softcap,
            sinks=None if self._sinks is None else self._sinks.logits,
        )

    def forward(self, qkv: Tensor, cos_sin: Tensor, ctx: ForwardContext) -> Tensor:
        """Write this step's keys and values to the pool, attend; qkv is the merged projection, the result [T, E]."""
        operators, layer_kv = ctx.operators, ctx.layers_kv[self.spec.layer_idx]
        target = KVTarget(
            layer_kv.key,
            layer_kv.value,
            ctx.slot_mapping,
            layer_kv.key_scale,
            layer_kv.value_scale,
            layer_kv.block_scales,
            layer_kv.key_transform,
        )
        q = operators.rope_store(qkv, self._heads, self._norms(), cos_sin, ctx.positions, target)
        attended, _ = ctx.backend.forward(q, layer_kv, ctx.plan, self.spec)
        return operators.linear(attended.flatten(1), self._output)

    def _pair_halves(self, merged: Tensor) -> Tensor:
        """Reorder the rows of the query and key heads of the merged projection."""
        heads = self._heads
        num_rows = (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        return torch.cat((pair_halves(merged[:num_rows], heads.head_dim, self._rotary_dim), merged[num_rows:]))

    def _norms(self) -> HeadNorms | None:
        if self._qk_norms is None:
            return None
        query, key = self._qk_norms
        return HeadNorms(query.weight, key.weight, self._eps)

    def weighted_layers(self) -> list[WeightedLayer]:
        """Every layer that keeps weights, each once."""
        sinks = [] if self._sinks is None else [self._sinks]
        return [self.qkv, self._output, self.stored_kv_scales, *(self._qk_norms or ()), *sinks]


class Mlp:
    """The gated feed-forward block, with the norm before it."""

    def __init__(self, config: DecoderConfig, name: str, weights: WeightFormat) -> None:
        self._activation = config.activation
        size = config.intermediate_size
        merged_name = f"{name}.gate_up_proj"
        self._gate_up = Linear(
            merged_name,
            config.hidden_size,
            {merged_name: 2 * size}
            if config.has_merged_projections
            else {f"{name}.gate_proj": size, f"{name}.up_proj": size},
            weights,
            has_bias=config.has_mlp_bias,
        )
        down_name = f"{name}.down_proj"
        self._down = Linear(down_name, size, {down_name: config.hidden_size}, weights, has_bias=config.has_mlp_bias)

    def forward(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, operators: Operators
    ) -> tuple[Tensor, Tensor]:
        """Return what the block makes of the norm of x + residual, and that sum, each [T, E]."""
        hidden, residual = operators.add_norm_gate_up(x, residual, norm, eps, self._gate_up, self._activation)
        return operators.linear(hidden, self._down), residual

    def weighted_layers(self) -> list[WeightedLayer]:
        """Every layer that keeps weights, each once."""
        return [self._gate_up, self._down]


class SparseMlp:
    """The experts in the place of the feed-forward block, and the router that chooses among them."""

    def __init__(self, config: DecoderConfig, moe: MoeConfig, name: str, weights: WeightFormat) -> None:
        # Small, and rounding its weight would change which experts a token takes.
        exact = replace(weights, method=Unquantized())
        router_name = f"{name}.gate"
        self._router = Linear(
            router_name, config.hidden_size, {router_name: moe.routing.num_experts}, exact, has_bias=moe.has_bias
        )
        self._experts = Experts(
            f"{name}.experts",
            config.hidden_size,
            moe.intermediate_size,
            moe.routing,
            weights,
            swiglu=moe.swiglu,
            has_bias=moe.has_bias,
            is_interleaved=moe.is_interleaved,
        )

    def forward(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, operators: Operators
    ) -> tuple[Tensor, Tensor]:
        """Return what the experts make of the norm of x + residual, and that sum, each [T, E]."""
        x, residual = operators.add_rms_norm(x, residual, norm, eps)
        return operators.moe(x, operators.linear(x, self._router), self._experts), residual

    def weighted_layers(self) -> list[WeightedLayer]:
        """Every layer that keeps weights, each once."""
        return [self._router, self._experts]


def _norm_weight(name: str, size: int, config: DecoderConfig, weights: WeightFormat) -> NormWeight:
    return NormWeight(name, size, weights, has_unit_offset=config.has_unit_offset_norms)
