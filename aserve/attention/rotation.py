"""A rotation that mixes all channels evenly."""

import math

import torch
from torch import Tensor


def spread(size: int) -> Tensor:
    """Return a symmetric rotation [size, size] whose entries are as even as they can be: a Hadamard matrix if one is.

    It is the product of Hadamard's for the powers of two in ``size`` and Hartley's for the rest.
    """
    odd = size // (size & -size)
    angles = 2 * math.pi / odd * torch.outer(*[torch.arange(odd, dtype=torch.float64)] * 2)
    rotation: Tensor = (angles.cos() + angles.sin()) / odd**0.5
    while len(rotation) < size:
        rotation = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5, rotation)
    return rotation
