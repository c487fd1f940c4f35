"""Launch parameters of the medium linear layers: those with which they beat torch's matrix product.

``python -m aserve.kernels.gpu.tune_medium_linear`` prints them for the GPU it runs on. What is not in the table goes
to torch.
"""

from dataclasses import dataclass

TOKEN_BUCKETS = (16, 32, 64, 96, 128, 192, 256, 320)
"""Numbers of tokens that are measured; each stands for all from the one before it on."""


@dataclass(frozen=True, slots=True)
class MediumLinearLaunch:
    """A program's share and how it is worked off.

    A program multiplies ``block_outputs`` rows of the weight, twice as many of a gated layer, with ``token_blocks``
    times ``block_tokens`` tokens; powers of two but for ``token_blocks``. It takes ``block_width`` columns at a time,
    of which ``num_stages`` are under way or in use. ``num_parts`` programs share the width of the same outputs, and
    another kernel adds up what they found. ``ahead`` is how many steps' tiles of the weight are asked for while the
    kernel before is still at work.
    """

    block_outputs: int
    block_tokens: int
    token_blocks: int = 1
    block_width: int = 64
    num_stages: int = 4
    num_warps: int = 4
    num_parts: int = 1
    ahead: int = 4


@dataclass(frozen=True, slots=True)
class MediumLinearShape:
    """What a launch is chosen by; ``max_tokens`` is one of ``TOKEN_BUCKETS``."""

    num_outputs: int
    width: int
    max_tokens: int
    is_gated: bool = False


MEASURED: dict[MediumLinearShape, MediumLinearLaunch] = {
    MediumLinearShape(4096, 1024, 16): MediumLinearLaunch(64, 16, 1, 128, 5, 4, 1, 2),
    MediumLinearShape(4096, 1024, 32): MediumLinearLaunch(64, 32, 1, 128, 6, 4, 1, 2),
    MediumLinearShape(4096, 1024, 64): MediumLinearLaunch(64, 64, 1, 128, 6, 4, 1, 0),
    MediumLinearShape(4096, 1024, 96): MediumLinearLaunch(64, 32, 3, 128, 5, 4, 1, 2),
    MediumLinearShape(4096, 1024, 128): MediumLinearLaunch(64, 128, 1, 128, 4, 8, 1, 4),
    MediumLinearShape(4096, 1024, 256): MediumLinearLaunch(64, 128, 1, 128, 4, 8, 1, 2),
    MediumLinearShape(1024, 2048, 16): MediumLinearLaunch(64, 16, 1, 128, 6, 4, 4, 2),
    MediumLinearShape(1024, 2048, 32): MediumLinearLaunch(64, 32, 1, 128, 6, 4, 4, 2),
    MediumLinearShape(1024, 2048, 64): MediumLinearLaunch(64, 64, 1, 128, 6, 4, 4, 2),
    MediumLinearShape(1024, 2048, 96): MediumLinearLaunch(64, 32, 3, 64, 5, 4, 8, 4),
    MediumLinearShape(1024, 2048, 128): MediumLinearLaunch(64, 128, 1, 128, 4, 8, 4, 2),
    MediumLinearShape(1024, 2048, 256): MediumLinearLaunch(64, 128, 1, 128, 4, 8, 2, 2),
    MediumLinearShape(3072, 1024, 16, is_gated=True): MediumLinearLaunch(64, 16, 1, 128, 6, 4, 1, 0),
    MediumLinearShape(3072, 1024, 32, is_gated=True): MediumLinearLaunch(64, 32, 1, 128, 5, 4, 1, 2),
    MediumLinearShape(3072, 1024, 64, is_gated=True): MediumLinearLaunch(128, 64, 1, 128, 4, 8, 2, 2),
    MediumLinearShape(3072, 1024, 256, is_gated=True): MediumLinearLaunch(64, 128, 1, 128, 3, 8, 1, 2),
    MediumLinearShape(1024, 3072, 16): MediumLinearLaunch(64, 16, 1, 128, 5, 4, 4, 2),
    MediumLinearShape(1024, 3072, 32): MediumLinearLaunch(64, 32, 1, 128, 4, 4, 4, 2),
    MediumLinearShape(1024, 3072, 64): MediumLinearLaunch(64, 64, 1, 128, 6, 4, 4, 2),
    MediumLinearShape(1024, 3072, 96): MediumLinearLaunch(64, 32, 3, 64, 5, 4, 8, 4),
    MediumLinearShape(1024, 3072, 128): MediumLinearLaunch(64, 128, 1, 64, 6, 8, 8, 4),
    MediumLinearShape(151936, 1024, 16): MediumLinearLaunch(64, 16, 1, 128, 5, 4, 1, 2),
    MediumLinearShape(151936, 1024, 32): MediumLinearLaunch(64, 32, 1, 128, 4, 4, 1, 2),
    MediumLinearShape(151936, 1024, 64): MediumLinearLaunch(64, 64, 1, 128, 3, 4, 1, 2),
    MediumLinearShape(6144, 4096, 16): MediumLinearLaunch(64, 16, 1, 128, 6, 4, 1, 2),
    MediumLinearShape(6144, 4096, 32): MediumLinearLaunch(64, 32, 1, 128, 6, 4, 1, 2),
    MediumLinearShape(6144, 4096, 64): MediumLinearLaunch(64, 64, 1, 128, 6, 4, 1, 2),
    MediumLinearShape(4096, 4096, 16): MediumLinearLaunch(64, 16, 1, 128, 6, 4, 2, 2),
    MediumLinearShape(4096, 4096, 32): MediumLinearLaunch(64, 32, 1, 128, 6, 4, 1, 0),
    MediumLinearShape(4096, 4096, 64): MediumLinearLaunch(64, 64, 1, 128, 6, 4, 1, 2),
    MediumLinearShape(12288, 4096, 16, is_gated=True): MediumLinearLaunch(128, 16, 1, 128, 3, 8, 1, 0),
    MediumLinearShape(12288, 4096, 32, is_gated=True): MediumLinearLaunch(128, 32, 1, 128, 3, 8, 1, 0),
    MediumLinearShape(12288, 4096, 64, is_gated=True): MediumLinearLaunch(64, 64, 1, 64, 4, 8, 1, 4),
    MediumLinearShape(12288, 4096, 128, is_gated=True): MediumLinearLaunch(128, 128, 1, 64, 4, 8, 1, 0),
    MediumLinearShape(4096, 12288, 16): MediumLinearLaunch(64, 16, 1, 128, 6, 4, 2, 2),
    MediumLinearShape(4096, 12288, 32): MediumLinearLaunch(128, 32, 1, 128, 5, 4, 2, 2),
    MediumLinearShape(4096, 12288, 64): MediumLinearLaunch(128, 64, 1, 128, 4, 8, 4, 2),
    MediumLinearShape(4096, 12288, 192): MediumLinearLaunch(128, 64, 3, 64, 5, 8, 4, 0),
    MediumLinearShape(151936, 4096, 16): MediumLinearLaunch(128, 16, 1, 128, 3, 4, 1, 2),
    MediumLinearShape(151936, 4096, 32): MediumLinearLaunch(64, 32, 1, 128, 4, 4, 1, 2),
    MediumLinearShape(151936, 4096, 64): MediumLinearLaunch(128, 64, 1, 128, 4, 8, 1, 2),
}


def choose_medium_launch(num_outputs: int, width: int, num_tokens: int, is_gated: bool) -> MediumLinearLaunch | None:
    """Return the launch parameters for a layer, None where torch's matrix product is not slower."""
    max_tokens = next((bucket for bucket in TOKEN_BUCKETS if bucket >= num_tokens), None)
    if max_tokens is None:
        return None
    return MEASURED.get(MediumLinearShape(num_outputs, width, max_tokens, is_gated))
