"""A finished response as a store keeps it, and what every store can do."""

from dataclasses import dataclass, fields
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One finished response. The store looks into nothing but the id and the time.

    ``body`` is the response object, ``input`` the items it answered, ``conversation`` all items that a continuation
    needs, ``spans`` the token ids of the conversation; each is JSON.
    """

    response_id: str
    created_s: int  # Unix time
    body: bytes
    input: bytes
    conversation: bytes
    spans: bytes

    @property
    def num_bytes(self) -> int:
        """Roughly what keeping it costs."""
        return OVERHEAD_BYTES + len(self.body) + len(self.input) + len(self.conversation) + len(self.spans)


OVERHEAD_BYTES = 512
COLUMNS = tuple(field.name for field in fields(StoredResponse))


class ResponseStore(Protocol):
    """Keeps responses within limits of size and age; the oldest go first. Used by one thread at a time."""

    blocks: bool
    """Whether calls wait for a disk or a network, so that they must stay off an event loop."""

    def put(self, response: StoredResponse) -> None:
        """Keep ``response``, in place of one with the same id."""

    def get(self, response_id: str) -> StoredResponse | None:
        """Return the response, None if it is not here or too old."""

    def delete(self, response_id: str) -> bool:
        """Forget the response; False if there was none."""

    def close(self) -> None:
        """Let go of files and connections. Idempotent."""
