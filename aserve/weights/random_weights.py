"""Weights that were never trained: a model of true size to measure speed with, and no file to read."""

import zlib

import torch

from aserve.layers.norm import NormWeight
from aserve.models.decoder import Decoder

STANDARD_DEVIATION = 0.02  # as models are initialised: activations neither vanish nor explode behind RMS norms


def fill_with_random(model: Decoder) -> None:
    """Draw every weight on the model's own device and in its own dtype, the same ones each time.

    Norms change no channel, all else is normal. A tensor's values depend on its name and shape alone (and on the
    device), not on the order of drawing.
    """
    for layer in model.weighted_layers():
        device, dtype = layer.weights.device, layer.weights.dtype
        generator = torch.Generator(device)
        for name, slot in layer.slots().items():
            if slot.is_optional:
                continue
            tensor = torch.empty(slot.shape, dtype=dtype, device=device)
            if isinstance(layer, NormWeight):
                tensor.fill_(layer.neutral)
            else:
                generator.manual_seed(zlib.crc32(name.encode()))
                tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)
            slot.write(tensor)
