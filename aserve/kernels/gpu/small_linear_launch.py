"""Launch parameters of the small linear layers: what was measured, and a default for all else.

``python -m aserve.kernels.gpu.tune_small_linear`` prints the best for each shape on the GPU it runs on.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SmallLinearLaunch:
    """A program's share: rows of the result, and columns of the weight that it holds at a time; powers of two."""

    block_rows: int
    block_columns: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class SmallLinearShape:
    """What a launch is chosen by; ``token_slots`` is the number of tokens rounded up to a power of two."""

    num_outputs: int
    width: int
    token_slots: int
    is_gated: bool = False


MEASURED: dict[SmallLinearShape, SmallLinearLaunch] = {}

MIN_PROGRAMS = 512  # some two for each unit of a large GPU, and both can be at work while others start or end
MAX_BLOCK_ROWS = 4
BLOCK_COLUMNS = 1024


def choose_launch(num_outputs: int, width: int, token_slots: int, is_gated: bool) -> SmallLinearLaunch:
    """Return the launch parameters for a layer, see ``SmallLinearShape``."""
    shape = SmallLinearShape(num_outputs, width, token_slots, is_gated)
    return MEASURED.get(shape) or _default_launch(shape)


def _default_launch(shape: SmallLinearShape) -> SmallLinearLaunch:
    """Few rows a program where the layer has few, and where each holds sums for several tokens."""
    held = shape.token_slots * (2 if shape.is_gated else 1)
    block_rows = max(MAX_BLOCK_ROWS // held, 1)
    while block_rows > 1 and shape.num_outputs // block_rows < MIN_PROGRAMS:
        block_rows //= 2
    block_columns = 128
    while block_columns < min(shape.width, BLOCK_COLUMNS):
        block_columns *= 2
    return SmallLinearLaunch(block_rows, block_columns, num_warps=max(block_columns // 256, 1))
