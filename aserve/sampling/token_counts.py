"""What each row has seen, on the device, for the penalties; the sampler itself keeps the counts up to date."""

import torch
from torch import Tensor


class TokenCounts:
    """Counts of output tokens and marks of prompt tokens, [rows, V].

    Allocated by ``reserve``, else when the first row needs them.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._outputs: Tensor | None = None  # int32
        self._is_in_prompt: Tensor | None = None

    def reserve(self) -> int:
        """Allocate the tables now and return their bytes, so that no row has to when memory is short."""
        return sum(table.numel() * table.element_size() for table in self._tables())

    def start_row(self, row: int, prompt_ids: Tensor, output_ids: Tensor) -> None:
        """Forget what ``row`` held and count the tokens it starts with (int64 ids)."""
        outputs, is_in_prompt = self._tables()
        outputs[row].zero_()
        outputs[row].index_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))
        is_in_prompt[row].zero_()
        is_in_prompt[row].index_fill_(0, prompt_ids, True)

    def penalize(self, logits: Tensor, rows: Tensor, penalties: Tensor) -> Tensor:
        """Return ``logits`` [N, V] of ``rows`` [N] with ``penalties`` [N, 3] applied: repetition, presence, frequency.

        Repetition divides positive and multiplies negative logits of every token seen in prompt or
        output; presence and frequency are subtracted for tokens of the output, once and per occurrence.
        """
        outputs, is_in_prompt = self._tables()
        repetition, presence, frequency = penalties.unsqueeze(-1).unbind(1)  # [N, 1] each
        counts = outputs[rows]
        is_output = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(is_output | is_in_prompt[rows], repeated, logits)
        return logits - frequency * counts - presence * is_output

    def add(self, rows: Tensor, token_ids: Tensor, is_valid: Tensor) -> None:
        """Count one output token for each of ``rows`` [N] where ``is_valid``; no row stands twice among them."""
        outputs, _ = self._tables()
        outputs[rows, token_ids] += is_valid

    def _tables(self) -> tuple[Tensor, Tensor]:
        if self._outputs is None or self._is_in_prompt is None:
            self._outputs = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
            self._is_in_prompt = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        return self._outputs, self._is_in_prompt
