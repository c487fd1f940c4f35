"""The API without sockets: the same answers and events as over HTTP, errors as exceptions, nothing left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from doubles_engine import make_engine, until
from doubles_http import CUE, LIMITS, MODEL, demo_tokenizer, in_loop, live_server, say
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from aserve import LocalClient
from aserve.config import EngineConfig, ServerConfig
from aserve.errors import ClientError, NotFoundError
from aserve.runner.scripted import ScriptedRunner
from aserve.server.local_transport import HIGH_WATER_BYTES, LocalTransport

REPLY = "Hello, Žluťoučký kůň 😀!\u2028A new line."
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
CHANGING = {"id", "created", "created_at", "completed_at"}


@asynccontextmanager
async def client_of(script: Any, step_time_s: float = 0.0, **settings: Any) -> AsyncIterator[LocalClient]:
    """At the end no task and no page may be left."""
    before = asyncio.all_tasks()
    config = EngineConfig(served_model_name=MODEL)
    runner = ScriptedRunner(LIMITS, script, step_time_s=step_time_s)
    async with make_engine(config, runner=runner, tokenizer=demo_tokenizer()) as engine:
        async with LocalClient(engine, ServerConfig(**settings)) as client:
            yield client
        await until(lambda: not engine.stats().num_running)
    assert asyncio.all_tasks() == before


def steady(value: Any) -> Any:
    """Leave out what differs from one answer to the next."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if key not in CHANGING and not key.endswith("_id")}
    return [steady(item) for item in value] if isinstance(value, list) else value


@in_loop
async def test_answers_are_those_of_the_server() -> None:
    bodies = {
        "/v1/chat/completions": CHAT,
        "/v1/completions": {"prompt": [5, *CUE]},
        "/v1/responses": {"input": "Hi", "temperature": 0},
        "/v1/messages": {"model": MODEL, "max_tokens": 40, **CHAT},
        "/tokenize": {"prompt": "Hi there"},
    }
    async with live_server(say(REPLY)) as live:
        over_http = {path: (await live.http.post(path, json=body)).json() for path, body in bodies.items()}
    async with client_of(say(REPLY)) as client:
        for path, body in bodies.items():
            assert steady(await client.request(path, body)) == steady(over_http[path]), path
        chat = ChatCompletion.model_validate(await client.request("/v1/chat/completions", CHAT), strict=True)
        assert chat.choices[0].message.content == REPLY
        Message.model_validate(await client.request("/v1/messages", bodies["/v1/messages"]))
        assert [model["id"] for model in (await client.request("/v1/models"))["data"]] == [MODEL]


@in_loop
async def test_streams_have_the_official_events_and_join_to_the_answer() -> None:
    async with client_of(say(REPLY)) as client:
        chunks = [
            ChatCompletionChunk.model_validate(event) async for event in client.stream("/v1/chat/completions", CHAT)
        ]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == REPLY
        assert chunks[-1].choices[0].finish_reason == "stop"

        adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        events = [adapter.validate_python(event) async for event in client.stream("/v1/responses", {"input": "Hi"})]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == REPLY

        adapter = TypeAdapter(RawMessageStreamEvent)
        body = {"max_tokens": 40, "model": MODEL, **CHAT}
        kinds = [event["type"] async for event in client.stream("/v1/messages", body) if event["type"] != "ping"]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


@in_loop
async def test_stored_responses_are_continued_and_taken_up() -> None:
    async with client_of(say(REPLY)) as client:
        first = Response.model_validate(await client.request("/v1/responses", {"input": "Hi"}))
        body = {"input": "And?", "previous_response_id": first.id}
        second = Response.model_validate(await client.request("/v1/responses", body))
        assert second.previous_response_id == first.id
        found = await client.request(f"/v1/responses/{second.id}")
        assert found["output"] == second.model_dump(mode="json", exclude_unset=True)["output"]
        assert (await client.request(f"/v1/responses/{first.id}", method="DELETE"))["deleted"] is True
        with pytest.raises(NotFoundError):
            await client.request(f"/v1/responses/{first.id}")
        started = await client.request("/v1/responses", {"input": "Hi", "background": True})
        assert started["status"] in ("queued", "in_progress")
        taken_up = [event async for event in client.stream(f"/v1/responses/{started['id']}", query="stream=true")]
        assert taken_up[-1]["type"] == "response.completed"


@in_loop
async def test_what_is_wrong_is_raised_with_its_field() -> None:
    async with client_of(say(REPLY)) as client:
        with pytest.raises(ClientError, match="temperature") as raised:
            await client.request("/v1/chat/completions", {**CHAT, "temperature": -1})
        assert raised.value.param == "temperature"
        with pytest.raises(ClientError, match="messages"):
            [event async for event in client.stream("/v1/chat/completions", {"messages": []})]
        for path, body in (("/v1/nothing", CHAT), ("/v1/chat/completions", None)):
            with pytest.raises(ClientError, match=path):
                await client.request(path, body)


@in_loop
async def test_leaving_a_stream_or_a_cancelled_request_ends_the_generation() -> None:
    endless = {**CHAT, "max_tokens": 4000, "ignore_eos": True}
    async with client_of(say("word " * 3000), step_time_s=0.001) as client:
        engine = client._state.engine
        stream = client.stream("/v1/chat/completions", endless)
        for _ in range(3):
            await anext(stream)
        assert engine.stats().num_running == 1
        await stream.aclose()
        waiting = asyncio.create_task(client.request("/v1/chat/completions", endless))
        await until(lambda: engine.stats().num_running == 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


@in_loop
async def test_a_reader_that_is_behind_gets_larger_deltas_and_loses_nothing() -> None:
    text = "word " * 900
    async with client_of(say(text)) as client:
        parts = []
        async for event in client.stream("/v1/chat/completions", {**CHAT, "max_tokens": 4000}):
            parts.append(event["choices"][0]["delta"].get("content") or "")
            if len(parts) == 2:
                await asyncio.sleep(0.5)
        assert "".join(parts) == text
        assert len(parts) < 900


def test_a_transport_tells_when_its_reader_has_caught_up() -> None:
    transport, calls = LocalTransport(), []
    transport.on_writable(lambda: calls.append(transport.is_writable))
    transport.write_frame(b"x" * HIGH_WATER_BYTES)
    assert not transport.is_writable
    transport.finish()

    async def read() -> list[bytes]:
        return [frame async for frame in transport.frames()]

    assert asyncio.run(read()) == [b"x" * HIGH_WATER_BYTES]
    assert calls == [True]
    transport.close()
    transport.on_close(lambda: calls.append(False))
    transport.write_frame(b"late")
    assert calls == [True, False]
    assert not transport.is_writable
