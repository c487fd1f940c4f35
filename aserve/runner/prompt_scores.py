"""Log probabilities of prompt tokens, for the rows that ask for them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aserve.models.decoder import Decoder
from aserve.request import TokenLogprobs
from aserve.sampling.logprobs import LogprobTensors, compute_logprobs, list_logprobs
from aserve.scheduler.plan import RowStart, StepPlan

MAX_LOGIT_ROWS = 256  # positions whose logits exist at the same time


@dataclass(frozen=True, slots=True)
class ChunkScores:
    """Scores of one row of a step, still on the device: one position for each token that a prompt token follows."""

    place: int  # in the plan
    num_top: int
    tensors: LogprobTensors

    def report(self, on_host: Sequence[Tensor]) -> list[TokenLogprobs]:
        """Return one entry for each position; ``on_host`` are copies of ``tensors``."""
        copies = LogprobTensors(*on_host)
        return list_logprobs(copies, [self.num_top] * len(copies.token_ids))


class PromptScores:
    """Remembers which rows want scores, and computes them chunk by chunk as the prompt goes by."""

    def __init__(self, model: Decoder, token_pool: Tensor) -> None:
        self._model = model
        self._token_pool = token_pool
        self._wanted: dict[int, tuple[int, int]] = {}  # row -> (number of alternatives, prompt length)

    def start_row(self, start: RowStart) -> None:
        """Learn whether the sequence that enters wants scores."""
        self._wanted.pop(start.row, None)
        if start.params.prompt_logprobs is not None:
            self._wanted[start.row] = start.params.prompt_logprobs, start.prompt_len

    def score(self, plan: StepPlan, hidden: Tensor) -> list[ChunkScores]:
        """Score each scheduled token that a prompt token follows; nothing waits for the device."""
        if not self._wanted:
            return []
        scores = []
        first_tokens = itertools.accumulate(plan.num_scheduled, initial=0)
        for place, (row, first_token) in enumerate(zip(plan.rows, first_tokens, strict=False)):
            if row not in self._wanted:
                continue
            num_top, prompt_len = self._wanted[row]
            computed = plan.num_computed[place]
            count = min(plan.num_scheduled[place], prompt_len - 1 - computed)
            if count > 0:
                targets = self._token_pool[row, computed + 1 : computed + 1 + count].long()
                parts = self._score(hidden[first_token : first_token + count], targets, num_top)
                scores.append(ChunkScores(place, num_top, parts))
        return scores

    def _score(self, hidden: Tensor, targets: Tensor, num_top: int) -> LogprobTensors:
        parts = [
            compute_logprobs(self._model.compute_logits(rows), ids, num_top)
            for rows, ids in zip(torch.split(hidden, MAX_LOGIT_ROWS), torch.split(targets, MAX_LOGIT_ROWS), strict=True)
        ]
        return LogprobTensors(*map(torch.cat, zip(*parts, strict=True)))
