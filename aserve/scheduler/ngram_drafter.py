"""Drafts by prompt lookup: what followed the same few tokens where they last stood in the sequence itself."""

from dataclasses import dataclass

from aserve.scheduler.drafter import Draft, Drafter
from aserve.scheduler.ngram_index import NgramIndex, agreeing_len
from aserve.scheduler.sequence import Sequence

MAX_INDEXED_RUNS = 1536  # of new prompts, in one step: about a millisecond of the event loop
ENTRY_WEIGHT = 8  # an entry of an index takes as long to copy as so many tokens
AGREEMENT_SHARE = 0.5  # after so many tokens that agree, about half as many more do; measured: 0.3 to 0.9


@dataclass(frozen=True, slots=True)
class NgramSettings:
    """How long drafts may be, and how long the runs of tokens that are looked up, the longest first."""

    num_tokens: int
    min_len: int
    max_len: int


class NgramDrafter(Drafter):
    """The longer the text agrees with what stood before, the longer the draft, and the more of it is expected.

    So text that only shares a few words here and there with itself expects little, and one that goes another way
    starts anew: what was drafted before need not be remembered.
    """

    def __init__(self, settings: NgramSettings) -> None:
        self._settings = settings
        self._indices: dict[Sequence, NgramIndex] = {}
        self._ended: list[dict[int, int]] = []  # parts of indices that nobody needs; freeing all at once takes long

    @property
    def weight(self) -> int:
        num_entries = sum(index.num_entries for index in self._indices.values())
        return ENTRY_WEIGHT * (num_entries + sum(map(len, self._ended)))

    def propose(self, batch: list[Sequence]) -> list[Draft | None]:
        del self._ended[-1:]  # more entries than a step takes in, so that they do not pile up
        min_indexed = self._settings.num_tokens + 1  # what a step may bring
        num_left = MAX_INDEXED_RUNS // (self._settings.max_len - self._settings.min_len + 1)  # tokens
        drafts: list[Draft | None] = []
        for seq in batch:
            index = self._indices.get(seq) or self._enter(seq)
            num_left -= index.extend(seq.token_ids, max(num_left, min_indexed))
            drafts.append(_continue(seq, index, self._settings.num_tokens))
        return drafts

    def leave(self, seq: Sequence) -> None:
        index = self._indices.pop(seq, None)
        if index is not None:
            self._ended += index.parts[1:]

    def _enter(self, seq: Sequence) -> NgramIndex:
        index = self._indices[seq] = NgramIndex(self._settings.min_len, self._settings.max_len)
        return index


def _continue(seq: Sequence, index: NgramIndex, max_tokens: int) -> Draft | None:
    """Return what may follow ``seq``; what is in flight is taken to be what is found for it."""
    token_ids = seq.token_ids
    num_known = len(token_ids)
    end = index.find(token_ids) if index.num_indexed >= num_known - 1 else None
    if end is None:
        return None
    num_agreeing = agreeing_len(token_ids, end, int(max_tokens / AGREEMENT_SHARE))
    num_tokens = min(max_tokens, num_agreeing)
    period = num_known - end  # what runs into the end begins again: the text may repeat itself once more
    first = seq.num_pending
    drafted = [token_ids[end + i % period] for i in range(first, first + num_tokens)]
    return Draft(drafted, min(num_tokens, AGREEMENT_SHARE * num_agreeing))
