"""Drafts by prompt lookup: what followed the same few tokens where they last stood in the sequence itself."""

from dataclasses import dataclass

from aserve.scheduler.drafter import Drafter
from aserve.scheduler.ngram_index import NgramIndex
from aserve.scheduler.sequence import Sequence

MAX_INDEXED_TOKENS = 512  # of new prompts, in one step: less than a millisecond of the event loop
MAX_REST = 15  # tokens
ENTRY_WEIGHT = 8  # an entry of an index takes as long to copy as so many tokens


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """How long drafts may be, and how long the runs of tokens that are looked up, the longest first."""

    num_tokens: int
    min_len: int
    max_len: int


@dataclass(slots=True)
class _History:
    """What is known of one sequence."""

    index: NgramIndex
    num_tokens: int  # of its next draft
    rest: int = 0  # tokens without drafts after the last ones, of which none was right
    wake_len: int = 0  # drafts are made again when it has so many tokens


class NgramDrafter(Drafter):
    """The next draft is as long as the last one was good; after one that was all wrong the sequence rests.

    A wrong draft costs its computation, and a row of it cannot be planned one step ahead.
    """

    def __init__(self, settings: NgramSettings) -> None:
        self._settings = settings
        self._histories: dict[Sequence, _History] = {}

    @property
    def weight(self) -> int:
        return ENTRY_WEIGHT * sum(history.index.num_entries for history in self._histories.values())

    def propose(self, batch: list[Sequence]) -> list[list[int]]:
        min_indexed = self._settings.num_tokens + 1  # what a step may bring
        num_left = MAX_INDEXED_TOKENS
        drafts: list[list[int]] = []
        for seq in batch:
            history = self._histories.get(seq) or self._enter(seq)
            num_left -= history.index.extend(seq.token_ids, max(num_left, min_indexed))
            drafts.append(_continue(seq, history))
        return drafts

    def learn(self, seq: Sequence, num_accepted: int) -> None:
        history = self._histories[seq]
        history.num_tokens = min(self._settings.num_tokens, 2 * num_accepted + 1)
        history.rest = 0 if num_accepted else min(MAX_REST, 2 * history.rest + 1)
        history.wake_len = len(seq.token_ids) + history.rest

    def leave(self, seq: Sequence) -> None:
        self._histories.pop(seq, None)

    def _enter(self, seq: Sequence) -> _History:
        settings = self._settings
        history = _History(NgramIndex(settings.min_len, settings.max_len), settings.num_tokens)
        self._histories[seq] = history
        return history


def _continue(seq: Sequence, history: _History) -> list[int]:
    """Return what may follow ``seq``; what is in flight is taken to be what is found for it."""
    token_ids = seq.token_ids
    num_known = len(token_ids)
    if num_known < history.wake_len or history.index.num_indexed < num_known - 1:
        return []
    end = history.index.find(token_ids)
    if end is None:
        return []
    period = num_known - end  # what runs into the end begins again: the text may repeat itself once more
    first = seq.num_pending
    return [token_ids[end + i % period] for i in range(first, first + history.num_tokens)]
