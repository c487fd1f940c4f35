"""Where the tokens at the end of a sequence stood before in it: bounded dicts, kept up to date token by token."""

from itertools import compress, count

MAX_PART_ENTRIES = 8192  # but for those of one call: a dict that grows or is freed takes as long as it has entries


class NgramIndex:
    """The latest end of each run of ``min_len`` to ``max_len`` tokens that another token follows.

    Keys are hashes, so that a run costs one entry and no object; a hit is compared token by token. ``parts`` map them
    to ends; what a later part says holds.
    """

    __slots__ = ("_lens", "num_indexed", "parts")

    def __init__(self, min_len: int, max_len: int) -> None:
        self.num_indexed = 0  # all runs that end among the first so many tokens are known
        self.parts: list[dict[int, int]] = [{}]
        self._lens = tuple(range(min_len, max_len + 1))

    @property
    def num_entries(self) -> int:
        """Runs that are known; one that later parts know anew counts again."""
        return sum(map(len, self.parts))

    def extend(self, token_ids: list[int], max_tokens: int) -> int:
        """Take in up to ``max_tokens`` more of the sequence's tokens, all but its last; return how many."""
        if len(self.parts[-1]) >= MAX_PART_ENTRIES:
            self.parts.append({})
        start, ends = self.num_indexed, self.parts[-1]
        self.num_indexed = min(len(token_ids) - 1, start + max_tokens)
        for end in range(start + 1, self.num_indexed + 1):
            for length in self._lens:
                if length <= end:
                    ends[hash(tuple(token_ids[end - length : end]))] = end
        return self.num_indexed - start

    def find(self, token_ids: list[int]) -> int | None:
        """Return where the run that ends ``token_ids`` ended before, for the longest known one.

        What came there may come next.
        """
        found = None
        for length in self._lens:
            run = token_ids[-length:]
            end = self._latest_end(hash(tuple(run)))
            if end is None or token_ids[end - length : end] != run:
                break  # nor was a longer one, which has this one at its end
            found = end
        return found

    def _latest_end(self, key: int) -> int | None:
        for part in reversed(self.parts):
            if (end := part.get(key)) is not None:
                return end
        return None


def agreeing_len(token_ids: list[int], end: int, max_len: int) -> int:
    """Return how many tokens before ``end``, at most ``max_len``, are those that end ``token_ids``."""
    pairs = zip(reversed(token_ids[max(0, end - max_len) : end]), reversed(token_ids[-max_len:]), strict=False)
    differs = (there != here for there, here in pairs)
    return next(compress(count(), differs), min(end, max_len))
