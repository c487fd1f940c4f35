"""Doubles for tests of the Responses API over HTTP: the official client, and streams checked event by event."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
from doubles_socket import MODEL, Live, check_event
from openai import AsyncOpenAI


@asynccontextmanager
async def official(live: Live) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{live.http_url}/v1", api_key="any", max_retries=0) as client:
        yield client


@asynccontextmanager
async def plain(live: Live) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"{live.http_url}/v1", timeout=20, verify=False) as client:
        yield client


def read_sse(text: str) -> list[dict[str, Any]]:
    """Return the events of a whole stream, each checked by the SDK's type for it and by its name."""
    events = []
    *blocks, rest = text.split("\n\n")
    assert rest == "", "the last event is not complete"
    for block in blocks:
        if not block.startswith(":"):
            events.append(read_block(block))
    return events


def read_block(block: str) -> dict[str, Any]:
    name, data = block.splitlines()
    event = check_event(orjson.loads(data.removeprefix("data: ")))
    assert name == f"event: {event['type']}"
    return event


async def take(answer: httpx.Response, count: int) -> list[dict[str, Any]]:
    """Return the first ``count`` events of a stream that goes on."""
    events, text = [], ""
    async for piece in answer.aiter_text():
        text += piece
        *blocks, text = text.split("\n\n")
        events += [read_block(block) for block in blocks if not block.startswith(":")]
        if len(events) >= count:
            return events[:count]
    raise AssertionError(f"the stream ended after {len(events)} events")


async def create(client: httpx.AsyncClient, text: str = "say hello", **fields: Any) -> httpx.Response:
    return await client.post("/responses", json={"model": MODEL, "input": text, **fields})
