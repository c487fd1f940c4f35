"""A change of basis of each KV head's keys, and of the queries that meet them, which leaves attention as it is."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeyTransform:
    """A key k of KV head h is stored as ``k @ key[h] - offset[h]``; its queries q meet it as ``q @ query[h]``.

    ``query[h]`` is the inverse of ``key[h]``'s transpose, so their products stay, but for what the offset takes from
    all scores of a query alike: softmax does not see it. All are float32.

    With a feedback, which is for nvfp4, a key is rounded in halves: what its first half is moved by, times
    ``feedback[h]``, is added to the second half before that is rounded, too, so that scores change less.
    """

    key: Tensor  # [K, D, D]
    query: Tensor  # [K, D, D]
    offset: Tensor  # [K, D]
    feedback: Tensor | None = None  # [K, D / 2, D / 2]

    def transform_keys(self, k: Tensor) -> Tensor:
        """Return what is stored of k [T, K, D], in its dtype."""
        products = torch.baddbmm(-self.offset.unsqueeze(1), k.float().transpose(0, 1), self.key)
        return products.transpose(0, 1).to(k.dtype)

    def transform_queries(self, q: Tensor) -> Tensor:
        """Return what meets stored keys of q [T, H, D], in its dtype and contiguous; H is a multiple of K."""
        num_tokens, num_heads, head_dim = q.shape
        num_kv_heads = len(self.query)
        grouped = q.float().view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1)
        products = torch.bmm(grouped.reshape(num_kv_heads, -1, head_dim), self.query)
        parted = products.view(num_kv_heads, num_tokens, -1, head_dim).transpose(0, 1)
        return parted.reshape(num_tokens, num_heads, head_dim).to(q.dtype)
