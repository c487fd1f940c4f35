"""Bits of masks applied to logits, against Python's own bits."""

import pytest
import torch

from aserve.sampling.token_mask import ban_tokens, byte_bits

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 100, 1000])
@pytest.mark.parametrize("num_masks", [1, 5, 16, 33])
def test_exactly_the_tokens_whose_bit_is_not_set_are_banned(vocab_size: int, num_masks: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size * 100 + num_masks)
    logits = torch.randn(num_masks + 3, vocab_size, generator=generator)
    masks = torch.randint(-(2**31), 2**31, (num_masks, (vocab_size + 31) // 32), generator=generator, dtype=torch.int32)
    places = torch.randperm(num_masks + 3, generator=generator)[:num_masks]
    expected = logits.clone()
    for place, words in zip(places.tolist(), masks.tolist(), strict=True):
        bits = sum((word % 2**32) << 32 * i for i, word in enumerate(words))
        for token in range(vocab_size):
            if not bits >> token & 1:
                expected[place, token] = -torch.inf
    ban_tokens(logits, places, masks, byte_bits(CPU))
    assert torch.equal(logits, expected)
