"""What the steps that launches are timed by have in common: sizes, random pages, and how far results may be off."""

from dataclasses import replace

import torch
from torch import Tensor

from aserve.kernels.cake.attention_call import KVPages
from aserve.kernels.nvfp4 import NVFP4, BlockScales, quantise

NUM_KV_HEADS, GROUP, PAGE_SIZE = 8, 4, 16
MAX_REL_ERROR = 2e-2
SEED = 0


def draw_pages(shape: tuple[int, int, int, int], kv_dtype: torch.dtype, generator: torch.Generator) -> KVPages:
    """Return keys and values, normal ones, for ``shape`` [pages, page_size, K, D] in ``kv_dtype``."""
    keys, values = (torch.randn(shape, generator=generator, device=generator.device) for _ in range(2))
    if kv_dtype != NVFP4:
        return KVPages(keys.to(kv_dtype), values.to(kv_dtype))
    (packed_keys, key_blocks), (packed_values, value_blocks) = quantise(keys, 1.0), quantise(values, 1.0)
    return KVPages(packed_keys, packed_values, block_scales=BlockScales(key_blocks, value_blocks))


def copy_pages(pages: KVPages) -> KVPages:
    """Return the same in memory of its own."""
    blocks = pages.block_scales
    copied = None if blocks is None else BlockScales(blocks.key.clone(), blocks.value.clone())
    return replace(pages, keys=pages.keys.clone(), values=pages.values.clone(), block_scales=copied)


def check_output(output: Tensor, expected: Tensor) -> None:
    """Raise ArithmeticError if ``output``, relative to all of it, is off by more than rounding explains."""
    error = ((output.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= MAX_REL_ERROR:
        raise ArithmeticError(f"the result is off by {error:.2g}")
