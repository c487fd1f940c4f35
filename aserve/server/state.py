"""What all endpoints of one server share: the engine, the settings, and everything that must end with the server."""

import logging
import time
from typing import Protocol

from aserve.config import Config
from aserve.engine.async_engine import AsyncEngine
from aserve.errors import AserveError, CapacityError, EngineDeadError, NotFoundError
from aserve.parsing.registry import choose_format
from aserve.server.answer_style import AnswerStyle
from aserve.server.heartbeat import Heartbeat
from aserve.server.responses.archive import ResponseArchive
from aserve.server.responses.live import LiveResponses
from aserve.store.open import open_store

logger = logging.getLogger(__name__)


class OpenConnection(Protocol):
    """A stream or socket that a stopping server has to end."""

    def begin_drain(self) -> None:
        """Take no new work; end as soon as idle."""

    def shut_down(self, error: AserveError) -> None:
        """End now, telling the client ``error``."""


class ServerState:
    """Shared by the endpoints of one server; used on the event loop only."""

    def __init__(self, engine: AsyncEngine, config: Config) -> None:
        self.engine = engine
        self.config = config.server
        self.created_s = int(time.time())  # Unix time, shown as the model's creation
        self.heartbeat = Heartbeat(
            keep_alive_s=config.server.keep_alive_s, stall_timeout_s=config.server.stall_timeout_s
        )
        self.max_body_bytes = int(config.server.max_body_mib * 2**20)
        self.archive = ResponseArchive(
            open_store(
                config.server.response_store,
                max_bytes=int(config.server.response_store_mib * 2**20),
                max_age_s=config.server.response_max_age_s,
            )
        )
        self.live_responses = LiveResponses(config.server.resume_grace_s)
        self.is_draining = False
        choose_format("", config.server.tool_call_parser, config.server.reasoning_parser)  # raises for unknown names
        self._answer_style: AnswerStyle | None = None  # made when the model is there
        self._connections: set[OpenConnection] = set()

    @property
    def answer_style(self) -> AnswerStyle:
        """How the model writes calls and reasoning; raises CapacityError while it is loading."""
        if self._answer_style is None:
            self._answer_style = AnswerStyle(self.engine.tokenizer, self.config)
        return self._answer_style

    def register(self, connection: OpenConnection) -> None:
        """Have ``connection`` ended when the server stops."""
        self._connections.add(connection)

    def unregister(self, connection: OpenConnection) -> None:
        """Forget ``connection``. Idempotent."""
        self._connections.discard(connection)

    def begin_drain(self) -> None:
        """Refuse new requests from now on and let the open ones finish."""
        self.is_draining = True
        for connection in tuple(self._connections):
            connection.begin_drain()

    def shut_down(self, error: AserveError) -> None:
        """End every open stream and socket with ``error``."""
        for connection in tuple(self._connections):
            connection.shut_down(error)
        self.live_responses.shut_down(error)

    async def close(self) -> None:
        """Write what is to be stored and close the store."""
        await self.archive.close()

    def check_ready(self) -> None:
        """Raise unless requests can be served now."""
        if self.engine.failure is not None:
            raise EngineDeadError("the engine has failed")
        if self.is_draining:
            raise CapacityError("the server is shutting down", retry_after_s=5)
        if self.engine.is_stalled:
            raise CapacityError(f"a step has not completed for {self.engine.step_wait_s:.0f} s", retry_after_s=5)
        if not self.engine.is_ready:
            raise CapacityError("the model is not ready yet", retry_after_s=2)

    def check_model(self, name: str | None) -> str:
        """Return the served name for ``name`` (None: whatever is served); raise NotFoundError for another.

        The name comes from the client: it is compared and never used or repeated.
        """
        served = self.engine.model_name
        if name is not None and name != served:
            raise NotFoundError(
                f"the requested model is not served here; available: {served}", param="model", code="model_not_found"
            )
        return served
