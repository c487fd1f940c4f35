"""Stored responses for code on the event loop: a store that waits for a disk does so in a thread of its own."""

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from aserve.server.responses.items import Item, decode_items, encode_items
from aserve.store.record import ResponseStore, StoredResponse
from aserve.tokenizer.spans import Span

logger = logging.getLogger(__name__)

MAX_ON_WAY_BYTES = 64 << 20  # to a store that is slow

decode_spans = msgspec.json.Decoder(list[Span]).decode


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A finished response that can be continued.

    ``items`` are the conversation without instructions; ``spans`` are the token ids of prompt and output.
    """

    response_id: str
    items: list[Item]
    spans: list[Span]


class ResponseArchive:
    """One store. What was put is found at once, though it may be on its way to the disk still."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aserve-store") if store.blocks else None
        self._on_way: dict[str, StoredResponse] = {}
        self._on_way_bytes = 0

    def put(self, response: StoredResponse) -> None:
        """Keep ``response``; a store that fails is reported in the log, for nobody waits."""
        if self._thread is None:
            self._store.put(response)
            return
        if self._on_way_bytes + response.num_bytes > MAX_ON_WAY_BYTES:
            logger.error("response %s could not be stored: too much waits for the store", response.response_id)
            return
        self._on_way[response.response_id] = response
        self._on_way_bytes += response.num_bytes
        writing = self._thread.submit(self._store.put, response)
        loop = asyncio.get_running_loop()
        writing.add_done_callback(lambda done: loop.call_soon_threadsafe(self._note_written, response, done))

    async def get(self, response_id: str) -> StoredResponse | None:
        """Return a stored response, None if there is none of that id."""
        if self._thread is None:
            return self._store.get(response_id)
        if (found := self._on_way.get(response_id)) is not None:
            return found
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.get, response_id)

    async def find_kept(self, response_id: str) -> KeptResponse | None:
        """Return what is needed to continue a stored response, None if there is none of that id."""
        stored = await self.get(response_id)
        if stored is None:
            return None
        return KeptResponse(response_id, decode_items(stored.conversation), decode_spans(stored.spans))

    async def delete(self, response_id: str) -> bool:
        """Forget a response; False if there was none of that id."""
        if self._thread is None:
            return self._store.delete(response_id)
        self._on_way.pop(response_id, None)  # its turn to be written is before that of its deletion
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.delete, response_id)

    async def close(self) -> None:
        """Write what is on its way, then close the store."""
        if self._thread is None:
            self._store.close()
            return
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown(wait=False)

    def _note_written(self, response: StoredResponse, writing: "Future[None]") -> None:
        self._on_way_bytes -= response.num_bytes
        if self._on_way.get(response.response_id) is response:
            del self._on_way[response.response_id]
        if (error := writing.exception()) is not None:
            logger.error("response %s could not be stored: %s", response.response_id, error)


def stored_response(kept: KeptResponse, new_items: list[Item], body: bytes, created_s: int) -> StoredResponse:
    """Return what a store keeps of a finished response; ``new_items`` are those that it answered."""
    return StoredResponse(
        response_id=kept.response_id,
        created_s=created_s,
        body=body,
        input=encode_items(new_items),
        conversation=encode_items(kept.items),
        spans=encode_items(kept.spans),
    )
