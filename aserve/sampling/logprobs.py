"""Log probabilities for the client: of the model's own distribution, before penalties, temperature or filters."""

from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.request import LOWEST_LOGPROB, TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """For N positions on the device: the chosen token's log probability and the K most likely tokens, best first."""

    chosen: Tensor  # [N] float32
    top: Tensor  # [N, K] float32
    top_ids: Tensor  # [N, K] int64


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobTensors:
    """Report on ``token_ids`` [N] under ``logits`` [N, V] float32."""
    logprobs = torch.log_softmax(logits, -1)
    top, top_ids = logprobs.topk(min(num_top, logprobs.shape[1]), -1)
    chosen = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return LogprobTensors(chosen.clamp_(min=LOWEST_LOGPROB), top.clamp_(min=LOWEST_LOGPROB), top_ids)


def read_logprobs(tensors: LogprobTensors, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Bring ``tensors`` to the host; position i reports its first ``num_top[i]`` alternatives. Waits for the device."""
    chosen, top, top_ids = tensors.chosen.tolist(), tensors.top.tolist(), tensors.top_ids.tolist()
    return [
        TokenLogprobs(token_id, chosen[i], tuple(zip(top_ids[i][: num_top[i]], top[i][: num_top[i]], strict=True)))
        for i, token_id in enumerate(token_ids)
    ]
