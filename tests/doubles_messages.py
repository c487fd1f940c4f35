"""Doubles for tests of /v1/messages: the official client, and streams checked event by event."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx
import orjson
from anthropic import AsyncAnthropic
from anthropic.types import ErrorResponse, RawMessageStreamEvent
from doubles_http import MODEL, Live
from pydantic import BaseModel, TypeAdapter

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def official(live: Live, key: str = "any", **options: Any) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=live.url, api_key=key, max_retries=0, **options) as client:
        yield client


async def ask(live: Live, messages: Any = HI, **fields: Any) -> httpx.Response:
    return await live.post("/v1/messages", **{"model": MODEL, "max_tokens": 64, "messages": messages, **fields})


def strict(kind: type[BaseModel], value: Any) -> Any:
    """Return ``value`` as the official type, which must know all of it without conversion."""
    return known(kind.model_validate(value, strict=True))


def strict_error(body: dict[str, Any]) -> ErrorResponse:
    """Return an error as the official type; ``details`` are read by the client, and not among its general types."""
    error = {name: value for name, value in body["error"].items() if name != "details"}
    if "details" in body["error"]:
        assert isinstance(body["error"]["details"].pop("error_code"), str)
        assert not body["error"]["details"]
    return cast(ErrorResponse, strict(ErrorResponse, {**body, "error": error}))


def known(value: Any) -> Any:
    """Return ``value``, which holds no field that the official types do not have."""
    if isinstance(value, list):
        for one in value:
            known(one)
    if isinstance(value, BaseModel):
        assert not value.model_extra, value
        for name in type(value).model_fields:
            known(getattr(value, name))
    return value


def read_events(text: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream, pings left out, each checked by the SDK's type for it and by its name."""
    *blocks, rest = text.split("\n\n")
    assert rest == "", "the last event is not complete"
    events = [read_event(block) for block in blocks]
    return [event for event in events if event["type"] != "ping"]


def read_event(block: str) -> dict[str, Any]:
    name, data = block.splitlines()
    event: dict[str, Any] = orjson.loads(data.removeprefix("data: "))
    assert name == f"event: {event['type']}"
    if event["type"] == "ping":
        assert event == {"type": "ping"}
    elif event["type"] != "error":
        known(STREAM_EVENT.validate_python(event, strict=True))
    return event
