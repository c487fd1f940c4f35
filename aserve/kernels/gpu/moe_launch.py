"""Launch parameters of the products with experts, by how many rows an expert has on average.

Chosen by what fits in registers and shared memory of a Hopper GPU; none has been measured.
"""

from dataclasses import dataclass, replace

SUM_PARTS = 2  # weight tiles of a gated product: the gate's and the up part's
RESERVED_BYTES = 1024  # of shared memory: barriers


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
    24: MoeLaunch(32, ProductLaunch(64, 128, 3, 4), ProductLaunch(64, 128, 4, 4)),
    64: MoeLaunch(64, ProductLaunch(64, 128, 3, 4), ProductLaunch(128, 128, 4, 8)),
    1 << 30: MoeLaunch(128, ProductLaunch(128, 64, 4, 8), ProductLaunch(128, 64, 4, 8)),
}
"""The most rows an expert may have on average -> launch: from decodes of a few sequences to prompts."""

FLOAT32 = MoeLaunch(16, ProductLaunch(32, 32, 2, 4), ProductLaunch(32, 32, 2, 4))
"""Without matrix units, so for exactness only."""


def choose_moe_launch(mean_rows: float, itemsize: int, shared_bytes: int) -> MoeLaunch:
    """Return the parameters for ``mean_rows`` an expert and values of ``itemsize`` bytes.

    ``shared_bytes`` is the shared memory that a program can have; stages are left out until they fit.
    """
    launch = FLOAT32 if itemsize == 4 else next(row for most, row in LAUNCHES.items() if mean_rows <= most)
    return replace(
        launch,
        gate_up=_fit(launch.gate_up, launch.block_rows, SUM_PARTS, itemsize, shared_bytes),
        down=_fit(launch.down, launch.block_rows, 1, itemsize, shared_bytes),
    )


def _fit(launch: ProductLaunch, block_rows: int, num_parts: int, itemsize: int, shared_bytes: int) -> ProductLaunch:
    stage_bytes = (launch.block_outputs * num_parts + block_rows) * launch.block_width * itemsize
    return replace(launch, num_stages=max(min(launch.num_stages, (shared_bytes - RESERVED_BYTES) // stage_bytes), 1))
