"""What is kept of a response that has ended, and its way into JSON and back.

What is large is encoded and decoded in a thread, piece by piece, so that the event loop has its turn in between: one
call of an encoder holds the GIL for as long as it takes.
"""

import asyncio
from dataclasses import dataclass

import msgspec

from aserve.server.responses.items import Item, decode_items, encode_items
from aserve.store.record import StoredResponse
from aserve.tokenizer.spans import Span

SMALL_ITEMS = 64  # a few tens of microseconds for all of it
SMALL_CHARS = 32 * 1024
SMALL_TOKENS = 16 * 1024
SMALL_BYTES = 64 * 1024

encode_spans = msgspec.json.Encoder().encode  # 0.7 ms for 128,000 tokens
decode_spans = msgspec.json.Decoder(list[Span]).decode


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A finished response that can be continued.

    ``items`` are the conversation without instructions; ``spans`` are the token ids of prompt and output.
    """

    response_id: str
    items: list[Item]
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """A finished response on its way into a store; ``new_items`` are those that it answered, ``body`` its JSON."""

    kept: KeptResponse
    new_items: list[Item]
    body: bytes
    created_s: int  # Unix time

    @property
    def is_small(self) -> bool:
        """Whether it is encoded faster than a thread is woken up."""
        items, spans = self.kept.items, self.kept.spans
        return (
            len(items) <= SMALL_ITEMS
            and sum(len(span.token_ids) for span in spans) <= SMALL_TOKENS
            and sum(map(_num_chars, items)) <= SMALL_CHARS
        )

    def encoded(self) -> StoredResponse:
        """Return what a store keeps of it."""
        return StoredResponse(
            response_id=self.kept.response_id,
            created_s=self.created_s,
            body=self.body,
            input=encode_items(self.new_items),
            conversation=encode_items(self.kept.items),
            spans=encode_spans(self.kept.spans),
        )


async def decode_kept(stored: StoredResponse) -> KeptResponse:
    """Return what is needed to continue ``stored``."""
    if len(stored.conversation) + len(stored.spans) <= SMALL_BYTES:
        return _decode_kept(stored)
    return await asyncio.to_thread(_decode_kept, stored)


async def decode_input(stored: StoredResponse) -> list[Item]:
    """Return the items that ``stored`` answered."""
    if len(stored.input) <= SMALL_BYTES:
        return decode_items(stored.input)
    return await asyncio.to_thread(decode_items, stored.input)


def _decode_kept(stored: StoredResponse) -> KeptResponse:
    return KeptResponse(stored.response_id, decode_items(stored.conversation), decode_spans(stored.spans))


def _num_chars(item: Item) -> int:
    """Return how much text ``item`` has; one that is as its client sent it may be of any size."""
    values = msgspec.structs.astuple(item)
    return sum(len(value) if isinstance(value, str) else SMALL_CHARS + 1 for value in values if value is not None)
