"""Grammar masks, a bit for each token, applied to logits on any device."""

import torch
from torch import Tensor

ROWS_AT_ONCE = 16  # bounds the memory that bits take once they are bytes


def byte_bits(device: torch.device) -> Tensor:
    """Return the values of a byte's bits [8], lowest first, for ``ban_tokens``."""
    return torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)


def ban_tokens(logits: Tensor, places: Tensor, masks: Tensor, bits: Tensor) -> None:
    """Set to minus infinity what ``masks`` [M, ceil(V / 32)] int32 do not allow at ``places`` [M] of ``logits`` [N, V].

    Bit i of a mask, counted from the lowest of its first word, stands for token i.
    """
    vocab_size = logits.shape[1]
    for start in range(0, len(places), ROWS_AT_ONCE):
        at, words = places[start : start + ROWS_AT_ONCE], masks[start : start + ROWS_AT_ONCE]
        is_banned = (words.view(torch.uint8).unsqueeze(-1) & bits) == 0  # [m, bytes, 8]; words are little-endian
        logits[at] = logits[at].masked_fill_(is_banned.flatten(1)[:, :vocab_size], -torch.inf)
