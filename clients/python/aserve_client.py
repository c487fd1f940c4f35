"""A small asyncio client for aserve: chat over server-sent events, conversations over one WebSocket.

Stands alone; needs ``httpx`` and ``websockets``.

    async with Client("http://127.0.0.1:8000") as client:
        async for text in client.chat_stream([{"role": "user", "content": "Hello"}]):
            print(text, end="")
        async with client.conversation() as conversation:
            print((await conversation.respond("Hello")).text)
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

Event = dict[str, Any]
Message = Mapping[str, Any]

TERMINAL = ("response.completed", "response.incomplete", "response.failed")
CONNECT_TIMEOUT_S = 10.0


class ServerError(Exception):
    """The server refused a request or gave it up. ``code`` is a machine-readable word, or None."""

    def __init__(self, message: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


class ConnectionLostError(Exception):
    """The connection ended in the middle of a response."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished response. ``status`` is completed, incomplete or cancelled; ``usage`` holds the token counts."""

    id: str
    text: str
    status: str
    usage: Mapping[str, Any] = field(default_factory=dict)


class Client:
    """One server. Use as an async context manager."""

    def __init__(self, base_url: str = "http://127.0.0.1:8000", *, api_key: str | None = None) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)  # a long prompt may be silent for long
        self._http = httpx.AsyncClient(base_url=self._base_url, headers=self._headers, timeout=timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the HTTP connections."""
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Return the names of the models that are served."""
        reply = await self._http.get("/v1/models")
        _raise_for_status(reply.status_code, reply.content)
        return [model["id"] for model in reply.json()["data"]]

    async def chat_stream(self, messages: Sequence[Message], **options: Any) -> AsyncIterator[str]:
        """Yield the text of one chat completion as it comes; ``options`` are further fields of the request.

        Leaving the loop early ends the generation. Raises ServerError.
        """
        body = {"messages": list(messages), **options, "stream": True}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                _raise_for_status(reply.status_code, await reply.aread())
            async for chunk in _read_sse(reply.aiter_lines()):
                if "error" in chunk:
                    raise _server_error(chunk["error"])
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text

    @asynccontextmanager
    async def conversation(self, instructions: str | None = None, **options: Any) -> AsyncIterator["Conversation"]:
        """Open a WebSocket for one conversation; ``options`` are sent with every turn."""
        url = "ws" + self._base_url.removeprefix("http") + "/v1/responses"
        headers = self._headers
        async with connect(url, additional_headers=headers, compression=None, max_size=None, proxy=None) as socket:
            yield Conversation(socket, {**options, "instructions": instructions})


class Conversation:
    """Turns over one WebSocket: the server remembers the conversation, each turn sends only what is new."""

    def __init__(self, socket: ClientConnection, options: Mapping[str, Any]) -> None:
        self._socket = socket
        self._options = options
        self._previous_id: str | None = None
        self._history: list[Event] = []
        self._is_running = False
        self.last: Answer | None = None

    async def respond(self, text: str, **options: Any) -> Answer:
        """Send one user message and return the whole answer."""
        async for _ in self.stream(text, **options):
            pass
        assert self.last is not None  # stream ends with an answer or raises
        return self.last

    async def stream(self, text: str, **options: Any) -> AsyncIterator[str]:
        """Send one user message and yield the answer's text as it comes; then ``last`` is the answer.

        An answer whose loop was left early is cancelled, at the latest by the next turn, and is no part of the
        conversation. Raises ServerError and ConnectionLostError.
        """
        message = {"type": "message", "role": "user", "content": text}
        try:
            await self._drop_unfinished()
            await self._create(message, options)
            async for delta in self._read_answer(message, options):
                yield delta
        except ConnectionClosed as error:
            raise ConnectionLostError("the connection ended before the answer did") from error
        assert self.last is not None
        self._history += [message, {"type": "message", "role": "assistant", "content": self.last.text}]

    async def cancel(self) -> None:
        """End the running answer; its loop ends with what has come so far."""
        await self._socket.send(json.dumps({"type": "response.cancel"}))

    async def _drop_unfinished(self) -> None:
        """Read what is left of an answer that nobody waits for."""
        if self._is_running:
            await self.cancel()
            self._previous_id = None
            async for event in self._read_events():
                if event["type"] in TERMINAL:
                    break
            self._is_running = False

    async def _create(self, message: Event, options: Mapping[str, Any]) -> None:
        items = [message] if self._previous_id is not None else [*self._history, message]
        fields = {**self._options, **options, "input": items, "previous_response_id": self._previous_id}
        await self._socket.send(json.dumps({"type": "response.create", **fields}))
        self._is_running = True

    async def _read_answer(self, message: Event, options: Mapping[str, Any]) -> AsyncIterator[str]:
        pieces: list[str] = []
        async for event in self._read_events():
            if event["type"] == "response.output_text.delta":
                pieces.append(event["delta"])
                yield event["delta"]
            elif event["type"] == "error":
                is_forgotten = event["error"].get("code") == "previous_response_not_found" and self._previous_id
                self._is_running = False
                self._previous_id = None
                if not is_forgotten:
                    raise _server_error(event["error"], event.get("status"))
                await self._create(message, options)  # now with the whole history
            elif event["type"] in TERMINAL:
                self._finish(event["response"], "".join(pieces))
                return

    async def _read_events(self) -> AsyncIterator[Event]:
        while True:
            yield json.loads(await self._socket.recv())

    def _finish(self, response: Event, text: str) -> None:
        self._is_running = False
        if response["status"] == "failed":
            self._previous_id = None
            raise _server_error(response["error"])
        self._previous_id = response["id"]
        self.last = Answer(response["id"], text, response["status"], response.get("usage") or {})


async def _read_sse(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    """Yield the JSON of each event up to ``[DONE]``; comments are skipped."""
    async for line in lines:
        if line == "data: [DONE]":
            return
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))
    raise ConnectionLostError("the stream ended without its last event")


def _raise_for_status(status: int, body: bytes) -> None:
    if status == 200:
        return
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": f"the server answered {status}"}
    raise _server_error(error, status)


def _server_error(error: Mapping[str, Any], status: int | None = None) -> ServerError:
    return ServerError(error["message"], status=status, code=error.get("code"))
