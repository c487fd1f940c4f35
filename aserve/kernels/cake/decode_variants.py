"""The table of paged decode variants: what each serves, and how it is compiled. Fastest first."""

from dataclasses import dataclass

import torch

from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.variant import Variant
from aserve.kernels.nvfp4 import NVFP4

HALF, BF16, FP32, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn
SAME_16_BIT = ((HALF, HALF), (BF16, BF16))
ON_8_BIT = ((HALF, FP8), (BF16, FP8))
ON_4_BIT = ((HALF, NVFP4), (BF16, NVFP4))
UP_TO_128 = (80, 96, 112, 128)  # multiples of 16, so that keys are copied 16 bytes at a time in 8 bits too
ALL_DTYPES = (*SAME_16_BIT, *ON_8_BIT, *ON_4_BIT, (FP32, FP32), (FP32, FP8), (FP32, NVFP4))


@dataclass(frozen=True, slots=True)
class DecodeVariant(Variant):
    """One row. Windows, soft-caps, sinks, scales and page sizes are constants or arguments of every kernel here."""

    launch: SplitLaunch | None  # of the split kernel; None is the plain kernel


# Launches that compile for Hopper without spilling; the files of launches (tuned_launches.py) say what was measured.
DECODE_VARIANTS = (
    DecodeVariant("decode-16-d64-short", SAME_16_BIT, (64,), 16, SplitLaunch(128, 4, 3, 3, 1), max_keys=128),
    DecodeVariant("decode-16-d64", SAME_16_BIT, (64,), 64, SplitLaunch(128, 4, 5, 2)),
    DecodeVariant("decode-16-d128-short", SAME_16_BIT, UP_TO_128, 16, SplitLaunch(128, 4, 2, 3, 1), max_keys=128),
    DecodeVariant("decode-16-d128", SAME_16_BIT, UP_TO_128, 64, SplitLaunch(64, 4, 5, 2)),
    DecodeVariant("decode-16-d256-few", SAME_16_BIT, (256,), 32, SplitLaunch(32, 4, 5, 2, 1), max_seqs=4),
    DecodeVariant("decode-16-d256", SAME_16_BIT, (256,), 32, SplitLaunch(32, 4, 5, 2)),
    DecodeVariant("decode-16-d512", SAME_16_BIT, (512,), 16, SplitLaunch(32, 8, 3, 2)),
    DecodeVariant("decode-8-d64", ON_8_BIT, (64,), 64, SplitLaunch(128, 4, 5, 4)),
    DecodeVariant("decode-8-d128", ON_8_BIT, UP_TO_128, 64, SplitLaunch(64, 2, 5, 5)),
    DecodeVariant("decode-8-d256", ON_8_BIT, (256,), 32, SplitLaunch(64, 4, 5, 2)),
    DecodeVariant("decode-4-d64", ON_4_BIT, (64,), 64, SplitLaunch(128, 4, 5, 4)),
    DecodeVariant("decode-4-d128", ON_4_BIT, (96, 128), 64, SplitLaunch(64, 2, 5, 6)),
    DecodeVariant("decode-4-d256", ON_4_BIT, (256,), 32, SplitLaunch(64, 4, 5, 2)),
    DecodeVariant("decode-plain", ALL_DTYPES, range(1, 513), 1024, None),
)

MAX_QUERIES = 8  # of a sequence

# For the last few queries of each sequence, as when drafts are verified. What they do not serve, prefill does.
SEVERAL_VARIANTS = (
    DecodeVariant("several-16-d64", SAME_16_BIT, (64,), 64, SplitLaunch(128, 4, 4, 2)),
    DecodeVariant("several-16-d128", SAME_16_BIT, UP_TO_128, 64, SplitLaunch(64, 4, 4, 2)),
    DecodeVariant("several-16-d256", SAME_16_BIT, (256,), 64, SplitLaunch(32, 4, 4, 1)),
    DecodeVariant("several-8-d64", ON_8_BIT, (64,), 64, SplitLaunch(64, 4, 4, 2)),
    DecodeVariant("several-8-d128", ON_8_BIT, UP_TO_128, 64, SplitLaunch(64, 4, 4, 2)),
    DecodeVariant("several-8-d256", ON_8_BIT, (256,), 64, SplitLaunch(32, 4, 4, 1)),
    DecodeVariant("several-4-d64", ON_4_BIT, (64,), 64, SplitLaunch(64, 4, 4, 2)),
    DecodeVariant("several-4-d128", ON_4_BIT, (96, 128), 64, SplitLaunch(64, 4, 4, 2)),
    DecodeVariant("several-4-d256", ON_4_BIT, (256,), 64, SplitLaunch(32, 8, 3, 1)),
)
