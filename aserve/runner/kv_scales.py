"""What keys and values are divided by on their way into pages of few bits: what the checkpoint says, else measured."""

import torch

from aserve.attention.base import AttentionProblem, KVScales
from aserve.attention.torch_backend import TorchBackend
from aserve.errors import ConfigError, WeightsError
from aserve.kernels.nvfp4 import MAX_BLOCK_SCALE, MAX_ELEMENT, NVFP4
from aserve.kernels.operators import Operators
from aserve.models.decoder import Decoder
from aserve.runner.kv_pool import KVLayout, allocate_pool
from aserve.runner.lone_prompt import forward_prompt
from aserve.runner.resolve import log_choice

NUM_TOKENS = 256  # that are run to see how large keys and values get
SEED = 20
HEADROOM = 2.0  # other text may have larger ones; floats of 8 bits lose nothing by it
LARGEST = {torch.float8_e4m3fn: 448.0, NVFP4: MAX_ELEMENT * MAX_BLOCK_SCALE}  # what pages hold at scale 1


def resolve_kv_scales(
    model: Decoder, kv_dtype: torch.dtype, dtype: torch.dtype, device: torch.device, operators: Operators
) -> tuple[KVScales, ...]:
    """Return the scales of each layer. Raises WeightsError if the checkpoint has those of some layers only."""
    stored = model.stored_kv_scales()
    if kv_dtype not in LARGEST:
        return (KVScales(),) * len(stored)
    found = tuple(scales for scales in stored if scales is not None)
    if found:
        if len(found) < len(stored):
            raise WeightsError(f"the checkpoint has no scales for keys and values of layer {stored.index(None)}")
        kind = "per KV head" if any(scales.are_per_head for scales in found) else "per layer"
        log_choice("kv_scales", kind, "from the checkpoint")
        return found
    factor = HEADROOM / LARGEST[kv_dtype]
    num_tokens = min(NUM_TOKENS, model.config.max_context_len)
    extremes = measure_extremes(model, num_tokens, dtype, device, operators)
    (keys, values) = (f"{min(layer):.3g} to {max(layer):.3g}" for layer in zip(*extremes, strict=True))
    reason = f"the largest keys of a layer are {keys}, values {values}; {HEADROOM:g} times as much still fits"
    log_choice("kv_scales", "per layer", f"measured on {num_tokens} random tokens: {reason}")
    return tuple(KVScales(*(factor * extreme or 1.0 for extreme in pair)) for pair in extremes)


@torch.inference_mode()
def measure_extremes(
    model: Decoder, num_tokens: int, dtype: torch.dtype, device: torch.device, operators: Operators
) -> list[tuple[float, float]]:
    """Return the largest magnitudes of keys and of values of each layer while random tokens run as a prompt."""
    shape = model.config
    kinds = tuple(dict.fromkeys(spec.kind for spec in model.attention_specs()))
    backend = TorchBackend(AttentionProblem(device.type, dtype, dtype, num_tokens, kinds), device)
    layout = KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype, device)
    pool = allocate_pool(layout, num_tokens, 0)
    token_ids = torch.randint(shape.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(SEED))
    forward_prompt(model, token_ids.to(device), backend, pool, operators)
    extremes = torch.stack([pages[0].abs().amax().float() for layer in pool for pages in (layer.key, layer.value)])
    if not bool(extremes.isfinite().all()):
        raise ConfigError("kv_cache_dtype: no scales can be measured, since the model's keys or values are not finite")
    pairs: list[tuple[float, float]] = [tuple(pair) for pair in extremes.view(-1, 2).tolist()]
    return pairs
