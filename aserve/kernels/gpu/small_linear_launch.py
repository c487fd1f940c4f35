"""Launch parameters of the small linear layers: what was measured, and a default for all else.

``python -m aserve.kernels.gpu.tune_small_linear`` prints the best for each shape on the GPU it runs on.
"""

from dataclasses import dataclass

WARP_COLUMNS = 256  # that a warp loads of a row at once, 16 bytes a thread, if values have 16 bits
MAX_WHOLE_WIDTH = 4096  # up to which a program holds all of the width by default
MAX_ROW_WARPS = 8  # that share a row by default
THREAD_VALUES = 32  # of a tile, by default
MIN_PROGRAMS = 512  # some four for each unit of a large GPU: some are at work while others start or end
MAX_PROGRAMS = 1536  # above which a program takes several blocks of outputs, so that starting costs less
MAX_STEPS = 16


@dataclass(frozen=True, slots=True)
class SmallLinearLaunch:
    """A program's share: outputs, and columns of the weight that it holds at a time; powers of two.

    If it holds the whole width it can take several blocks of outputs, ``num_steps`` of them.
    """

    block_rows: int
    block_columns: int
    num_warps: int
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class SmallLinearShape:
    """What a launch is chosen by; ``token_slots`` is the number of tokens rounded up to a power of two."""

    num_outputs: int
    width: int
    token_slots: int
    is_gated: bool = False


MEASURED: dict[SmallLinearShape, SmallLinearLaunch] = {  # on an H200, with overlapping launches
    # Qwen3-0.6B
    SmallLinearShape(4096, 1024, 1): SmallLinearLaunch(8, 1024, 4, 1),
    SmallLinearShape(1024, 2048, 1): SmallLinearLaunch(2, 2048, 4, 1),
    SmallLinearShape(3072, 1024, 1, is_gated=True): SmallLinearLaunch(1, 1024, 2, 2),
    SmallLinearShape(1024, 3072, 1): SmallLinearLaunch(2, 4096, 8, 1),
    SmallLinearShape(151936, 1024, 1): SmallLinearLaunch(4, 1024, 2, 2),
    # Qwen3-8B, Llama-3.1-8B
    SmallLinearShape(6144, 4096, 1): SmallLinearLaunch(2, 4096, 4, 2),
    SmallLinearShape(4096, 4096, 1): SmallLinearLaunch(2, 4096, 4, 4),
    SmallLinearShape(12288, 4096, 1, is_gated=True): SmallLinearLaunch(1, 4096, 8, 8),
    SmallLinearShape(4096, 12288, 1): SmallLinearLaunch(1, 16384, 16, 16),
}


def choose_launch(num_outputs: int, width: int, token_slots: int, is_gated: bool) -> SmallLinearLaunch:
    """Return the launch parameters for a layer, see ``SmallLinearShape``."""
    shape = SmallLinearShape(num_outputs, width, token_slots, is_gated)
    return MEASURED.get(shape) or _default_launch(shape)


def _default_launch(shape: SmallLinearShape) -> SmallLinearLaunch:
    block_columns = 128
    while block_columns < shape.width:
        block_columns *= 2
    is_whole = block_columns <= MAX_WHOLE_WIDTH
    if not is_whole:
        block_columns = 4 * WARP_COLUMNS
    num_warps = min(max(block_columns // WARP_COLUMNS, 1), MAX_ROW_WARPS)
    parts = 2 if shape.is_gated else 1
    held = parts if is_whole else parts * shape.token_slots  # sums of all tokens are kept along a row
    block_rows = max(THREAD_VALUES * 32 * num_warps // (block_columns * held), 1)
    while block_rows > 1 and shape.num_outputs // block_rows < MIN_PROGRAMS:
        block_rows //= 2
    num_steps = shape.num_outputs // block_rows // MAX_PROGRAMS if is_whole else 1
    return SmallLinearLaunch(block_rows, block_columns, num_warps, min(max(num_steps, 1), MAX_STEPS))
