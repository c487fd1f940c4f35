"""What the parsers of single calls have in common: how they number calls, and how they report their state."""

import secrets
import string
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from aserve.parsing.deltas import ParsedDelta, ToolCallArguments, ToolCallStart

SHORT_ID_CHARS = string.ascii_letters + string.digits


def call_id() -> str:
    """Return a new id as OpenAI writes them."""
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Return a new id of nine letters and digits, the only ones that Mistral's templates take back."""
    return "".join(secrets.choice(SHORT_ID_CHARS) for _ in range(9))


class CallSequence:
    """Numbers the calls of one answer."""

    def __init__(self, make_id: Callable[[], str] = call_id) -> None:
        self.count = 0
        self._make_id = make_id

    def start(self, name: str) -> ToolCallStart:
        """Begin the next call."""
        self.count += 1
        return ToolCallStart(self.count - 1, self._make_id(), name)

    def arguments(self, text: str) -> ToolCallArguments:
        """Go on with the arguments of the newest call."""
        return ToolCallArguments(self.count - 1, text)


class ReaderState(Enum):
    """OPEN: wants more text. DONE: has read its calls. FAILED: there is no call here."""

    OPEN = auto()
    DONE = auto()
    FAILED = auto()


class CallReader(Protocol):
    """Reads what follows a marker: one call or a list of them.

    Once it is not OPEN any more, ``rest`` is the text that follows; after FAILED that is all it was given.
    """

    state: ReaderState
    rest: str

    def push(self, text: str) -> list[ParsedDelta]:
        """Take the next piece."""
        ...

    def flush(self) -> list[ParsedDelta]:
        """Learn that no more text comes; the state is not OPEN afterwards."""
        ...
