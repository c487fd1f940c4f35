"""What the steps that launches are timed by have in common: sizes, random pages, and how far results may be off."""

from dataclasses import replace

import torch
from torch import Tensor

from aserve.kernels.cake.attention_call import KVPages, prefers_head_major
from aserve.kernels.nvfp4 import NVFP4, BlockScales, quantise

NUM_KV_HEADS, GROUP, PAGE_SIZE = 8, 4, 16
MAX_REL_ERROR = 2e-2
SEED = 0


def draw_pages(shape: tuple[int, int, int, int], kv_dtype: torch.dtype, generator: torch.Generator) -> KVPages:
    """Return keys and values, normal ones, for ``shape`` [pages, page_size, K, D] in ``kv_dtype``, as they lie best."""
    order = (0, 2, 1, 3) if prefers_head_major(kv_dtype) else (0, 1, 2, 3)
    sizes = [shape[place] for place in order]
    keys, values = (torch.randn(sizes, generator=generator, device=generator.device) for _ in range(2))
    if kv_dtype != NVFP4:
        return KVPages(keys.to(kv_dtype).permute(order), values.to(kv_dtype).permute(order))
    packed = [part.permute(order) for drawn in (keys, values) for part in quantise(drawn, 1.0)]
    return KVPages(packed[0], packed[2], block_scales=BlockScales(packed[1], packed[3]))


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
