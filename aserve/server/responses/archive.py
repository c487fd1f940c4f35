"""Stored responses for code on the event loop: a store that waits for a disk does so in a thread of its own."""

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor

from aserve.server.responses.items import Item
from aserve.server.responses.kept import EndedResponse, KeptResponse, decode_input, decode_kept
from aserve.store.record import ResponseStore, StoredResponse

logger = logging.getLogger(__name__)

MAX_ON_WAY_BYTES = 64 << 20  # to a store that is slow


class ResponseArchive:
    """One store. What was put is found at once, though it may be on its way to the disk still."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aserve-store") if store.blocks else None
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="aserve-encode")  # of what is large
        self._encoding: dict[str, asyncio.Future[StoredResponse]] = {}
        self._on_way: dict[str, StoredResponse] = {}
        self._on_way_bytes = 0
        self._is_closed = False

    def keep(self, ended: EndedResponse) -> None:
        """Encode and ``put`` a response, a large one off the event loop; one that ends too late is not stored."""
        if self._is_closed:
            logger.warning("response %s ended after the store was closed", ended.kept.response_id)
            return
        if ended.is_small:
            self.put(ended.encoded())
            return
        response_id = ended.kept.response_id
        encoding = asyncio.get_running_loop().run_in_executor(self._encoder, ended.encoded)
        self._encoding[response_id] = encoding
        encoding.add_done_callback(lambda done: self._note_encoded(response_id, done))

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
        if (encoding := self._encoding.get(response_id)) is not None:
            return await asyncio.shield(encoding)  # others may wait for it, too
        if self._thread is None:
            return self._store.get(response_id)
        if (found := self._on_way.get(response_id)) is not None:
            return found
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.get, response_id)

    async def find_kept(self, response_id: str) -> KeptResponse | None:
        """Return what is needed to continue a stored response, None if there is none of that id."""
        stored = await self.get(response_id)
        return None if stored is None else await decode_kept(stored)

    async def find_input(self, response_id: str) -> list[Item] | None:
        """Return the items that a stored response answered, None if there is none of that id."""
        stored = await self.get(response_id)
        return None if stored is None else await decode_input(stored)

    async def delete(self, response_id: str) -> bool:
        """Forget a response; False if there was none of that id."""
        if (encoding := self._encoding.get(response_id)) is not None:
            await asyncio.wait([encoding])
        if self._thread is None:
            return self._store.delete(response_id)
        self._on_way.pop(response_id, None)  # its turn to be written is before that of its deletion
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._store.delete, response_id)

    async def close(self) -> None:
        """Write what is on its way, then close the store."""
        while self._encoding:  # other responses may end meanwhile
            await asyncio.wait(self._encoding.values())
        self._is_closed = True
        self._encoder.shutdown(wait=False)
        if self._thread is None:
            self._store.close()
            return
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown(wait=False)

    def _note_encoded(self, response_id: str, encoding: asyncio.Future[StoredResponse]) -> None:
        del self._encoding[response_id]
        self.put(encoding.result())

    def _note_written(self, response: StoredResponse, writing: "Future[None]") -> None:
        self._on_way_bytes -= response.num_bytes
        if self._on_way.get(response.response_id) is response:
            del self._on_way[response.response_id]
        if (error := writing.exception()) is not None:
            logger.error("response %s could not be stored: %s", response.response_id, error)
