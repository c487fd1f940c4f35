"""How keys and values come into pages of few bits: divided by what the checkpoint says, else as is measured here."""

from typing import Any

import torch
from torch import Tensor

from aserve.attention.balance import balance_keys
from aserve.attention.base import AttentionProblem, AttentionSpec, KVScales, LayerKV
from aserve.attention.torch_backend import TorchBackend
from aserve.distributed.group import RankGroup
from aserve.errors import ClientError, ConfigError, WeightsError
from aserve.kernels.key_transform import KeyTransform
from aserve.kernels.nvfp4 import MAX_BLOCK_SCALE, MAX_ELEMENT, NVFP4, dequantise, feed_back, quantise
from aserve.kernels.operators import Operators
from aserve.model_files import ModelFiles
from aserve.models.config import DecoderConfig
from aserve.models.decoder import Decoder
from aserve.runner.kv_pool import KVLayout, allocate_pool
from aserve.runner.lone_prompt import forward_prompt
from aserve.runner.resolve import log_choice
from aserve.runner.sample_text import TEXT
from aserve.tokenizer.load import load_tokenizer

NUM_TOKENS = 1024  # that are run to see what keys, values and queries are like
MIN_TEXT_TOKENS = 256
SEED = 20
HEADROOM = 2.0  # other text may have larger ones; floats of 8 bits lose nothing by it
LARGEST = {torch.float8_e4m3fn: 448.0, NVFP4: MAX_ELEMENT * MAX_BLOCK_SCALE}  # what pages hold at scale 1


def resolve_kv_scales(
    model: Decoder,
    files: ModelFiles,
    kv_dtype: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    operators: Operators,
) -> tuple[KVScales, ...]:
    """Return the scales of each layer, and the transform of its keys unless the checkpoint's scales are for plain ones.

    Raises WeightsError if the checkpoint has the scales of some layers only.
    """
    stored = model.stored_kv_scales()
    if kv_dtype not in LARGEST:
        return (KVScales(),) * len(stored)
    found = tuple(scales for scales in stored if scales is not None)
    if found:
        if len(found) < len(stored):
            raise WeightsError(f"the checkpoint has no scales for keys and values of layer {stored.index(None)}")
        kind = "per KV head" if any(scales.are_per_head for scales in found) else "per layer"
        log_choice("kv_scales", kind, "from the checkpoint; keys are stored as they are")
        return found
    token_ids, kind = _sample_tokens(files, model.config)
    scales = measure_kv_scales(model, kv_dtype, token_ids.to(device), dtype, operators)
    reason = f"measured on {len(token_ids)} {kind}, as is how keys are transformed; {HEADROOM:g} times as much fits"
    log_choice("kv_scales", "per layer", reason)
    return scales


def _sample_tokens(files: ModelFiles, config: DecoderConfig) -> tuple[Tensor, str]:
    """Return token ids [T] to measure on, the same on every rank, and what they are."""
    num_tokens = min(NUM_TOKENS, config.max_context_len)
    try:
        token_ids = load_tokenizer(files).encode(TEXT)[:num_tokens]
    except (ConfigError, ClientError):  # the latter of text that the model has no embeddings for
        token_ids = []
    if len(token_ids) >= min(MIN_TEXT_TOKENS, num_tokens):
        return torch.tensor(token_ids), "tokens of a text"
    # The files have no tokenizer of use; an engine may be given another.
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(config.vocab_size, (num_tokens,), generator=generator), "random tokens"


def take_from_first_rank(scales: tuple[KVScales, ...], group: RankGroup) -> tuple[KVScales, ...]:
    """Return what rank 0 of ``group`` measured; waits for all ranks.

    Offsets that differ by a rounding would count keys of one rank for more than those of another.
    """

    def take(tensor: Tensor) -> Tensor:
        return group.all_gather(tensor)[0]

    def take_layer(layer: KVScales) -> KVScales:
        transform = layer.key_transform
        if transform is None:
            return layer
        numbers = torch.tensor([layer.key, layer.value], dtype=torch.float64, device=transform.key.device)
        key, value = take(numbers).tolist()
        feedback = None if transform.feedback is None else take(transform.feedback)
        taken = KeyTransform(take(transform.key), take(transform.query), take(transform.offset), feedback)
        return KVScales(key, value, taken)

    return tuple(take_layer(layer) for layer in scales)


@torch.inference_mode()
def measure_kv_scales(
    model: Decoder, kv_dtype: torch.dtype, token_ids: Tensor, dtype: torch.dtype, operators: Operators
) -> tuple[KVScales, ...]:
    """Run ``token_ids`` [T] as a prompt; return scales with which ``HEADROOM`` times its numbers fit a ``kv_dtype``."""
    shape, num_tokens, device = model.config, len(token_ids), token_ids.device
    kinds = tuple(dict.fromkeys(spec.kind for spec in model.attention_specs()))
    problem = AttentionProblem(device.type, dtype, dtype, num_tokens, kinds)
    backend = _MeasuringBackend(problem, device, kv_dtype)
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype, device)
    pool = allocate_pool(layout, num_tokens, 0)
    forward_prompt(model, token_ids, backend, pool, operators)
    return tuple(backend.scales)


class _MeasuringBackend(TorchBackend):
    """Looks at what each layer of one prompt, in a page of its size, attends with; layers come in order."""

    def __init__(self, problem: AttentionProblem, device: torch.device, kv_dtype: torch.dtype) -> None:
        super().__init__(problem, device)
        self.scales: list[KVScales] = []
        self._kv_dtype = kv_dtype

    def forward(
        self, q: Tensor, layer_kv: LayerKV, plan: Any, spec: AttentionSpec, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        keys, values = layer_kv.key[0], layer_kv.value[0]
        if not all(bool(x.isfinite().all()) for x in (q, keys, values)):
            raise ConfigError("kv_cache_dtype: no scales can be measured: the model's keys or values are not finite")
        transform = balance_keys(q, keys, values, spec, feeds_back=self._kv_dtype == NVFP4)
        key, value = (self._scale(x) for x in (self._to_be_rounded(transform, keys), values))
        self.scales.append(KVScales(key, value, transform))
        return super().forward(q, layer_kv, plan, spec, **options)

    def _to_be_rounded(self, transform: KeyTransform, keys: Tensor) -> Tensor:
        """Return keys [T, K, D] as they are before they are rounded, the second halves after the first ones are."""
        stored = transform.transform_keys(keys)
        if transform.feedback is None:
            return stored
        first, second = stored.float().chunk(2, dim=-1)
        scale = self._scale(first)
        errors = dequantise(*quantise(first, scale)) * scale - first
        return torch.cat((first, second + feed_back(errors, transform.feedback)), dim=-1)

    def _scale(self, stored: Tensor) -> float:
        return HEADROOM * float(stored.abs().amax()) / LARGEST[self._kv_dtype] or 1.0
