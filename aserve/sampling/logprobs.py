"""Log probabilities for the client: of the model's own distribution, before penalties, temperature or filters."""

from typing import NamedTuple

import torch
from torch import Tensor

from aserve.request import LOWEST_LOGPROB, TokenLogprobs


class LogprobTensors(NamedTuple):
    """For N positions: the chosen token, its log probability and the K most likely tokens, best first."""

    token_ids: Tensor  # [N] int64
    chosen: Tensor  # [N] float32
    top: Tensor  # [N, K] float32
    top_ids: Tensor  # [N, K] int64


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """Report on ``token_ids`` [N] under ``logits`` [N, V] float32."""
    logprobs = torch.log_softmax(logits, -1)
    top, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]), -1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return LogprobTensors(token_ids, chosen.clamp_(min=LOWEST_LOGPROB), top.clamp_(min=LOWEST_LOGPROB), top_ids)


def list_logprobs(tensors: LogprobTensors, num_top: list[int]) -> list[TokenLogprobs]:
    """Turn ``tensors``, now on the host, into objects; position i reports its first ``num_top[i]`` alternatives."""
    token_ids, chosen, top, top_ids = (tensor.tolist() for tensor in tensors)
    return [
        TokenLogprobs(token_id, chosen[i], tuple(zip(top_ids[i][: num_top[i]], top[i][: num_top[i]], strict=True)))
        for i, token_id in enumerate(token_ids)
    ]
