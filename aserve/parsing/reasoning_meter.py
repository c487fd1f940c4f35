"""How many tokens of an answer are reasoning: those with something between its markers, however they are delivered."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from aserve.request import RequestOutput

OPEN = 1 << 62  # the end of reasoning that goes on


class ReasoningPlaces:
    """Where reasoning stands in the text of one answer, without its markers; places are numbers of characters.

    Nothing will change any more before ``num_known``. ``is_open`` says what has been the case since ``since``.
    """

    __slots__ = ("is_open", "num_known", "since", "spans")

    def __init__(self, *, is_open: bool = False) -> None:
        self.num_known = self.since = 0
        self.is_open = is_open
        self.spans: list[tuple[int, int]] = [(0, OPEN)] if is_open else []

    def begin(self, place: int) -> None:
        """Note that reasoning begins at ``place``."""
        self.spans.append((place, OPEN))
        self.since, self.is_open = place, True

    def end(self, place: int) -> None:
        """Note that it ended before ``place``."""
        self.spans[-1] = (self.spans[-1][0], place)
        self.since, self.is_open = place, False


class ReasoningMeter:
    """Counts the tokens of one answer as its ``places`` become known.

    A token without text, be it that it is hidden or that its character is not complete, counts where the next one is.
    """

    def __init__(self, places: ReasoningPlaces) -> None:
        self.num_tokens = 0
        self._places = places
        self._num_chars = 0  # of all tokens so far
        self._starts: list[int] = []  # of the tokens that it is not known of yet, and where each of them stops
        self._stops: list[int] = []

    def note(self, output: RequestOutput) -> None:
        """Take the tokens of ``output``, once its text has been read."""
        places, start = self._places, self._num_chars
        num_chars = len(output.text)
        if not self._starts and start >= places.since and places.num_known == start + num_chars and num_chars:
            self._num_chars = start + num_chars  # nearly every output
            ends = output.token_ends
            num_known = 1 if ends is None else bisect_left(ends, num_chars) + 1
            if places.is_open:
                self.num_tokens += num_known
            if ends is not None and num_known < len(ends):
                self._hold([0] * (len(ends) - num_known))
            return
        self._hold(output.ends())
        self._count(places.num_known)

    def close(self) -> None:
        """Count what is left, at the end of the answer."""
        self._count(OPEN)

    def _hold(self, ends: Sequence[int]) -> None:
        """Keep tokens until it is known what they are; their text ends at ``ends`` behind that of those before."""
        first = start = self._num_chars
        for end in ends:
            self._starts.append(start)
            self._stops.append(max(first + end, start + 1))
            start = first + end
        self._num_chars = start

    def _count(self, num_known: int) -> None:
        num_tokens = bisect_right(self._stops, num_known)
        first = 0
        for start, end in self._places.spans:
            first = max(first, bisect_right(self._stops, start, 0, num_tokens))
            behind = bisect_left(self._starts, end, first, num_tokens)
            self.num_tokens += behind - first
            first = behind
        del self._starts[:num_tokens], self._stops[:num_tokens]
