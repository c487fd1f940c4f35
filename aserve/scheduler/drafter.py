"""Where drafts come from: guesses of the next tokens of a sequence, several of which one step can verify.

A step samples after each draft as it would without it, and drafts count as far as they are what was sampled. So
the tokens of a sequence are the same with drafts or without, if a sample depends on logits, seed and position alone.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from aserve.request import SamplingParams
from aserve.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draft:
    """What may follow a sequence, and how much of it is likely right."""

    token_ids: list[int]
    num_expected: float  # of its tokens, those before the first wrong one

    def cut(self, num_tokens: int) -> "Draft":
        """Return its first ``num_tokens``, all if it has fewer; as much is expected of them as there can be."""
        if num_tokens >= len(self.token_ids) >= self.num_expected:
            return self
        token_ids = self.token_ids[: max(num_tokens, 0)]
        return Draft(token_ids, min(self.num_expected, len(token_ids)))


class Drafter(ABC):
    """Called on the event loop for every step, so it must not take more than microseconds a sequence."""

    @property
    def weight(self) -> int:
        """How much there is to copy, in tokens."""
        return 0

    @abstractmethod
    def propose(self, batch: list[Sequence]) -> list[Draft | None]:
        """Return for each sequence what may follow the tokens that are known or in flight; None without a guess."""

    def leave(self, seq: Sequence) -> None:  # noqa: B027 - not every drafter remembers
        """Forget ``seq``, which has ended."""


def can_verify(params: SamplingParams) -> bool:
    """Whether samples are the same wherever a step draws them: not if the output before them counts by itself."""
    has_penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return not has_penalties and params.grammar is None
