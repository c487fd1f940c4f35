"""Keys in two halves, of which the second, rounded later, makes up for most of what rounding did to the first.

In a balanced basis channel i of keys and of queries has the variance s_i, and a few are far larger than others.
Rounded all at once, keys cost at least (s_1 + ... + s_D)^2 / D. Here a channel of size a is paired with one of size b:
their plane is turned, and its first direction goes to the first half of a stored key, the other to the second half. An
error of the first moves scores much less once the other, on which queries hardly depend, is moved to answer it. Turned
by sin^2 = b / (a + b), where keys are white, both halves cost the same: a pair counts 2 sqrt(a b) instead of a + b. An
error e is answered by (a - b) / sqrt(a b) e then.

Within a half channels are spread evenly.
"""

import torch
from torch import Tensor

from aserve.attention.rotation import spread


def pair_channels(key: Tensor, query: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return other bases for keys and for queries, and the feedback [K, D/2, D/2] of ``KeyTransform``.

    ``key`` and ``query`` [K, D, D], D even, are balanced bases; channels have ``sizes`` [K, D], the largest first.
    """
    half = sizes.shape[1] // 2
    large, small = sizes[:, :half].unsqueeze(1), sizes[:, half:].flip(1).unsqueeze(1)  # [K, 1, D / 2]
    middle = (large * small).sqrt()
    gain = (middle / (large + small)).sqrt()
    (key_large, key_small), (query_large, query_small) = (
        (basis[..., :half], basis[..., half:].flip(2)) for basis in (key, query)
    )
    rotation = spread(half).to(key)
    keys = (key_large + key_small, key_small * (large / small).sqrt() - key_large * (small / large).sqrt())
    queries = (query_large * (large / small).sqrt() + query_small * (small / large).sqrt(), query_small - query_large)
    feedback = rotation.T * ((large - small) / middle) @ rotation
    new_key, new_query = (torch.cat([part * gain @ rotation for part in parts], -1) for parts in (keys, queries))
    return new_key, new_query, feedback
