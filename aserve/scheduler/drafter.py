"""Where drafts come from: guesses of the next tokens of a sequence, several of which one step can verify.

A step samples after each draft as it would without it, and drafts count as far as they are what was sampled. So
the tokens of a sequence are the same with drafts or without, if a sample depends on logits, seed and position alone.
"""

from abc import ABC, abstractmethod

from aserve.request import SamplingParams
from aserve.scheduler.sequence import Sequence


class Drafter(ABC):
    """Called on the event loop for every step, so it must not take more than microseconds a sequence."""

    @property
    def weight(self) -> int:
        """How much there is to copy, in tokens."""
        return 0

    @abstractmethod
    def propose(self, batch: list[Sequence]) -> list[list[int]]:
        """Return for each sequence the tokens that may follow those which are known or in flight, perhaps none."""

    def learn(self, seq: Sequence, num_accepted: int) -> None:  # noqa: B027 - not every drafter learns
        """Hear how many drafts of ``seq`` the last step that verified any has accepted."""

    def leave(self, seq: Sequence) -> None:  # noqa: B027 - not every drafter remembers
        """Forget ``seq``, which has ended."""


def can_verify(params: SamplingParams) -> bool:
    """Whether samples are the same wherever a step draws them: not if the output before them counts by itself."""
    has_penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return not has_penalties and params.grammar is None
