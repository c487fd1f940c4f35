"""Launch parameters of the medium linear layers: those with which they beat torch's matrix product.

``python -m aserve.kernels.gpu.tune_medium_linear`` prints them for the GPU it runs on. What is not in the table goes
to torch.
"""

from dataclasses import dataclass

TOKEN_BUCKETS = (16, 32, 64, 128, 192, 256, 320)
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


MEASURED: dict[MediumLinearShape, MediumLinearLaunch] = {}


def choose_medium_launch(num_outputs: int, width: int, num_tokens: int, is_gated: bool) -> MediumLinearLaunch | None:
    """Return the launch parameters for a layer, None where torch's matrix product is not slower."""
    max_tokens = next((bucket for bucket in TOKEN_BUCKETS if bucket >= num_tokens), None)
    if max_tokens is None:
        return None
    return MEASURED.get(MediumLinearShape(num_outputs, width, max_tokens, is_gated))
