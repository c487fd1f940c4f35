"""Whether a GPU has room for a model's weights: asked before the first is read, and said clearly if it runs out."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from aserve.errors import ConfigError
from aserve.layers.weighted import WeightFormat
from aserve.models.decoder import Decoder

GIB = 1 << 30
ADVICE = "stop what else uses the GPU, or choose a smaller model or dtype"


def check_memory(model: Decoder, weights: WeightFormat) -> None:
    """Raise ConfigError naming needed and free memory if ``weights`` are to lie on a CUDA device and do not fit.

    What loading needs for a moment beside them, at most the largest layer twice, is not counted.
    """
    device = weights.device
    if device.type != "cuda":
        return
    slots = model.slots().values()
    needed = sum(math.prod(slot.shape) for slot in slots if not slot.is_optional) * weights.dtype.itemsize
    # What an earlier engine of this process has given back counts as free. One whose start failed hangs in a cycle: its
    # error knows the frames that loaded it, and these the future that holds the error.
    gc.collect()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    if needed > free_bytes:
        raise ConfigError(
            f"the weights do not fit on the GPU: they need {needed / GIB:.2f} GiB, "
            f"{_describe(free_bytes, total_bytes)}; {ADVICE}"
        )


@contextmanager
def explain_exhaustion(device: torch.device, doing: str) -> Iterator[None]:
    """Turn torch's OutOfMemoryError into a ConfigError that says what the GPU was ``doing``."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        state = _describe(*torch.cuda.mem_get_info(device))
        raise ConfigError(f"out of GPU memory while {doing}: {state}; {ADVICE} ({error})") from error


def _describe(free_bytes: int, total_bytes: int) -> str:
    return f"{free_bytes / GIB:.2f} of {total_bytes / GIB:.2f} GiB are free"
