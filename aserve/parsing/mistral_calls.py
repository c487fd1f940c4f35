"""What Mistral's models write behind ``[TOOL_CALLS]``."""

from aserve.parsing.call_reader import CallReader, CallSequence, ReaderState
from aserve.parsing.deltas import ParsedDelta
from aserve.parsing.headed_call import MISTRAL_HEADER, HeadedCall
from aserve.parsing.json_call import JsonCall
from aserve.parsing.json_list import JsonCallList
from aserve.parsing.markers import SPACES


class MistralCalls:
    """Reads a list of objects, one object, or, as from version 11 on, one object behind the function's name."""

    def __init__(self, calls: CallSequence) -> None:
        self.state = ReaderState.OPEN
        self.rest = ""
        self._calls = calls
        self._spaces = ""
        self._reader: CallReader | None = None  # until the first character tells

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        if self._reader is None:
            self._spaces += text
            if not self._spaces.lstrip(SPACES):
                return []
            text = self._spaces
            self._reader = self._choose(text.lstrip(SPACES)[0])
        deltas = self._reader.push(text)
        self.state, self.rest = self._reader.state, self._reader.rest
        return deltas

    def flush(self) -> list[ParsedDelta]:
        """Learn that no more text comes."""
        if self._reader is None:
            self.state, self.rest = ReaderState.FAILED, self._spaces
            return []
        deltas = self._reader.flush()
        self.state, self.rest = self._reader.state, self._reader.rest
        return deltas

    def _choose(self, first: str) -> CallReader:
        if first == "[":
            return JsonCallList(self._calls)
        return JsonCall(self._calls) if first == "{" else HeadedCall(self._calls, MISTRAL_HEADER)
