"""Log probabilities of prompt tokens, for the rows that ask for them."""

import torch
from torch import Tensor

from aserve.models.decoder import Decoder
from aserve.request import TokenLogprobs
from aserve.runner.inputs import StepInputs
from aserve.sampling.logprobs import compute_logprobs, read_logprobs
from aserve.scheduler.plan import RowStart, StepPlan

MAX_LOGIT_ROWS = 256  # positions whose logits exist at the same time


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

    def score(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor) -> dict[int, list[TokenLogprobs]] | None:
        """Return, per place in the plan, one entry for each scheduled token that a prompt token follows."""
        if not self._wanted:
            return None
        scores = {}
        for place, row in enumerate(plan.rows):
            if row not in self._wanted:
                continue
            num_top, prompt_len = self._wanted[row]
            computed = plan.num_computed[place]
            count = min(plan.num_scheduled[place], prompt_len - 1 - computed)
            if count > 0:
                first_token = int(inputs.cu_query_lens[place])
                targets = self._token_pool[row, computed + 1 : computed + 1 + count].long()
                scores[place] = self._score(hidden[first_token : first_token + count], targets, num_top)
        return scores or None

    def _score(self, hidden: Tensor, targets: Tensor, num_top: int) -> list[TokenLogprobs]:
        scores: list[TokenLogprobs] = []
        for rows, ids in zip(torch.split(hidden, MAX_LOGIT_ROWS), torch.split(targets, MAX_LOGIT_ROWS), strict=True):
            tensors = compute_logprobs(self._model.compute_logits(rows), ids, num_top)
            scores += read_logprobs(tensors, ids.tolist(), [num_top] * len(ids))
        return scores
