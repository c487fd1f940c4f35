"""Launch parameters of the products with experts, by how many rows an expert has on average.

Measured on an H200 with Qwen3-30B-A3B (128 experts of 768, 8 of them a token) in bfloat16, without overlap, at 1/16,
2, 16 and 128 rows an expert: docs/measurements.md. Not measured are the launch for up to 64 rows, where one takes over
from the other, other models and other GPUs; there it is what fits in a Hopper GPU's registers and shared memory.
"""

from dataclasses import dataclass, replace

SUM_PARTS = 2  # weight tiles of a gated product: the gate's and the up part's
RESERVED_BYTES = 1024  # of shared memory: barriers
MIN_STAGES = 2  # one is under way while the other is in use
MIN_WIDTH = 32  # columns, below which stages are not made narrower


@dataclass(frozen=True, slots=True)
class ProductLaunch:
    """A program's share of a product: ``block_outputs`` rows of an expert's weight, twice as many of a gated one.

    It takes ``block_width`` columns at a time, of which ``num_stages`` are under way or in use.
    """

    block_outputs: int
    block_width: int
    num_stages: int
    num_warps: int


@dataclass(frozen=True, slots=True)
class MoeLaunch:
    """``block_rows`` rows of one expert go through both products together."""

    block_rows: int
    gate_up: ProductLaunch
    down: ProductLaunch


LAUNCHES: dict[int, MoeLaunch] = {
    8: MoeLaunch(16, ProductLaunch(64, 128, 3, 4), ProductLaunch(64, 128, 4, 4)),
    24: MoeLaunch(32, ProductLaunch(128, 128, 3, 8), ProductLaunch(128, 64, 5, 4)),
    64: MoeLaunch(64, ProductLaunch(64, 128, 3, 4), ProductLaunch(128, 128, 4, 8)),
    1 << 30: MoeLaunch(128, ProductLaunch(128, 64, 4, 8), ProductLaunch(128, 64, 3, 8)),
}
"""The most rows an expert may have on average -> launch: from decodes of a few sequences to prompts."""

FLOAT32 = MoeLaunch(16, ProductLaunch(32, 32, 2, 4), ProductLaunch(32, 32, 2, 4))
"""Without matrix units, so for exactness only."""


def choose_moe_launch(mean_rows: float, itemsize: int, shared_bytes: int) -> MoeLaunch:
    """Return the parameters for ``mean_rows`` an expert and values of ``itemsize`` bytes.

    ``shared_bytes`` is the shared memory that a program can have; stages are left out until they fit, and made
    narrower where not even two do.
    """
    launch = FLOAT32 if itemsize == 4 else next(row for most, row in LAUNCHES.items() if mean_rows <= most)
    return replace(
        launch,
        gate_up=_fit(launch.gate_up, launch.block_rows, SUM_PARTS, itemsize, shared_bytes),
        down=_fit(launch.down, launch.block_rows, 1, itemsize, shared_bytes),
    )


def _fit(launch: ProductLaunch, block_rows: int, num_parts: int, itemsize: int, shared_bytes: int) -> ProductLaunch:
    stage_bytes = (launch.block_outputs * num_parts + block_rows) * launch.block_width * itemsize
    room = (shared_bytes - RESERVED_BYTES) // stage_bytes
    if room < MIN_STAGES and launch.block_width > MIN_WIDTH:
        narrower = replace(launch, block_width=launch.block_width // 2)
        return _fit(narrower, block_rows, num_parts, itemsize, shared_bytes)
    return replace(launch, num_stages=max(min(launch.num_stages, room), 1))
