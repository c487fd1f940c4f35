"""A whole prompt as one step on the first pages of a pool, beside all scheduling."""

import torch
from torch import Tensor

from aserve.attention.base import AttentionBackend, AttentionBatch, LayerKV
from aserve.attention.context import ForwardContext
from aserve.kernels.operators import Operators
from aserve.models.decoder import Decoder


def forward_prompt(
    model: Decoder, token_ids: Tensor, backend: AttentionBackend, layers_kv: list[LayerKV], operators: Operators
) -> Tensor:
    """Return the hidden states [T, E] of token_ids [T] int64; keys and values fill the pages 0, 1, 2 ... in order."""
    num_tokens, page_size, device = len(token_ids), layers_kv[0].key.shape[1], token_ids.device
    batch = AttentionBatch(
        query_lens=[num_tokens],
        key_lens=[num_tokens],
        num_decodes=0,
        cu_query_lens=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        key_lens_device=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        page_table=torch.arange(-(-num_tokens // page_size), dtype=torch.int32, device=device).unsqueeze(0),
        page_size=page_size,
    )
    places = torch.arange(num_tokens, device=device)  # in the sequence and in the pool
    return model.forward(token_ids, ForwardContext(places, places, backend, backend.plan(batch), layers_kv, operators))
