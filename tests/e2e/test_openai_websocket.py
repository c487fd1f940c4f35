"""The official Python client's ``responses.connect()``, async and sync, against a live server."""

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from doubles_engine import until
from doubles_socket import Live, in_loop, live_server, scripted_engine, scripted_server
from openai.types.responses import Response
from websockets.exceptions import ConnectionClosedError

MODEL = "scripted"
KEY = "sk-test"
DOCUMENT = Path(__file__).parents[2] / "docs" / "websocket.md"


def async_client(live: Live, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.http_url}/v1", api_key=key)


async def read_response(connection: Any) -> tuple[str, Response]:
    """Return the joined deltas and the response of the terminal event."""
    text = ""
    async for event in connection:
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete", "response.failed"):
            return text, event.response
        assert event.type != "error", event
    raise AssertionError("the connection ended")


@in_loop
async def test_async_turns_continue_one_another() -> None:
    async with scripted_server(api_key=KEY) as live, async_client(live).responses.connect() as connection:
        await connection.response.create(model=MODEL, input="say Hello", instructions="be kind")
        text, first = await read_response(connection)
        assert (text, first.output_text, first.status) == ("Hello", "Hello", "completed")
        await connection.response.create(
            model=MODEL,
            input=[{"role": "user", "content": [{"type": "input_text", "text": "say Bye"}]}],
            previous_response_id=first.id,
            store=False,
            stream=True,
            temperature=0.5,
            max_output_tokens=2,
        )
        text, second = await read_response(connection)
    assert (text, second.status, second.previous_response_id) == ("By", "incomplete", first.id)
    assert second.incomplete_details is not None
    assert second.incomplete_details.reason == "max_output_tokens"
    assert second.usage is not None
    assert second.usage.input_tokens == len("say Hello\nHello\nsay Bye\n")
    assert second.usage.input_tokens_details.cached_tokens < second.usage.input_tokens


@in_loop
async def test_sync_client_in_a_thread() -> None:
    def converse(url: str) -> tuple[str, str]:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        with client.responses.connect() as connection:
            connection.response.create(model=MODEL, input="say sync")
            text = ""
            for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.completed":
                    return text, event.response.output_text
        raise AssertionError("the connection ended")

    async with scripted_server(api_key=KEY) as live:
        assert await asyncio.to_thread(converse, live.http_url) == ("sync", "sync")


@in_loop
async def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    async with scripted_server() as live:
        code = code.replace("http://127.0.0.1:8000", live.http_url).replace("Name a river.", "say Nile")
        await asyncio.to_thread(exec, compile(code, str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out.splitlines()[0] == "Nile"


@in_loop
async def test_lanes_through_the_client() -> None:
    async with scripted_server(step_time_s=0.001) as live, async_client(live).responses.connect() as connection:
        for name in ("a", "b"):
            await connection.response.create(model=MODEL, input=f"say {name * 20}", stream_id=name)
        texts = {"a": "", "b": ""}
        num_ended = 0
        async for event in connection:
            if event.type == "response.output_text.delta":
                texts[event.stream_id] += event.delta
            num_ended += event.type == "response.completed"
            if num_ended == 2:
                break
    assert texts == {"a": "a" * 20, "b": "b" * 20}


@in_loop
async def test_the_client_steers() -> None:
    async with scripted_server(step_time_s=0.003) as live, async_client(live).responses.connect() as connection:
        await connection.response.create(model=MODEL, input="count", stream_id="a")
        seen: list[Any] = []
        async for event in connection:
            seen.append(event)
            if event.type == "response.created" and len(seen) == 1:
                await connection.response.steer(
                    previous_response_id=event.response.id,
                    input=[{"type": "message", "role": "user", "content": "say Yes"}],
                )
            if event.type == "response.completed":
                break
    accepted = next(event for event in seen if event.type == "response.steer.accepted")
    (ended,) = (event.response for event in seen if event.type == "response.incomplete")
    assert accepted.steer.previous_response_id == ended.id
    assert ended.incomplete_details.reason == "steered"
    assert (seen[-1].response.output_text, seen[-1].response.previous_response_id) == ("Yes", ended.id)


@in_loop
async def test_errors_reach_the_client_and_the_connection_goes_on() -> None:
    async with scripted_server() as live, async_client(live).responses.connect() as connection:
        await connection.response.create(model=MODEL, input="say a", previous_response_id="resp_none")
        event = await connection.recv()
        assert (event.type, event.status) == ("error", 400)
        assert event.error.code == "previous_response_not_found"
        await connection.response.create(model="another", input="say a")
        event = await connection.recv()
        assert (event.status, event.error.code) == (404, "model_not_found")
        await connection.response.create(model=MODEL, input="say fine")
        assert (await read_response(connection))[0] == "fine"


@in_loop
async def test_event_handlers_are_called() -> None:
    async with scripted_server() as live, async_client(live).responses.connect() as connection:
        pieces: list[str] = []

        async def finish(event: Any) -> None:
            await connection.close()

        connection.on("response.output_text.delta", lambda event: pieces.append(event.delta))
        connection.on("response.completed", finish)
        await connection.response.create(model=MODEL, input="say handled")
        await connection.dispatch_events()
    assert "".join(pieces) == "handled"


@in_loop
async def test_a_wrong_key_is_refused_before_the_handshake() -> None:
    async with scripted_server(api_key=KEY) as live:
        with pytest.raises(Exception, match="401"):
            async with async_client(live, "sk-wrong").responses.connect():
                pass


@in_loop
async def test_the_client_reconnects_after_a_restart_and_after_the_age_limit() -> None:
    """1012 (restart) and 1001 (age) are among the codes on which the client's policy reconnects."""
    codes: list[int] = []

    def on_reconnecting(event: Any) -> None:
        codes.append(event.close_code)

    async with scripted_engine() as engine:
        async with live_server(engine) as live:
            port = live.port
            manager = async_client(live).responses.connect(on_reconnecting=on_reconnecting, initial_delay=0.05)
            connection = await manager.enter()
            await connection.response.create(model=MODEL, input="say one")
            assert (await read_response(connection))[0] == "one"
        async with live_server(engine, port=port, max_connection_age_s=1.5) as live:
            reading = asyncio.create_task(read_all(connection, "two"))
            await asyncio.sleep(0.2)
            await connection.response.create(model=MODEL, input="say two")
            assert await asyncio.wait_for(reading, 5) == "two"
            assert codes == [1012]
            reading = asyncio.create_task(read_all(connection, "three"))
            while len(codes) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await connection.response.create(model=MODEL, input="say three")
            assert await asyncio.wait_for(reading, 5) == "three"
            assert codes == [1012, 1001]
            await connection.close()


@in_loop
async def test_a_drain_lets_the_response_end_and_the_client_comes_back_to_the_next_server() -> None:
    """While the old server refuses new sockets the client tries again; what is asked meanwhile waits in the client."""
    codes: list[int] = []
    options: dict[str, Any] = {"initial_delay": 0.02, "max_delay": 0.1, "max_retries": 200}
    async with scripted_engine(step_time_s=0.002) as engine, AsyncExitStack() as stack:
        async with live_server(engine) as live:
            port = live.port
            client = await stack.enter_async_context(async_client(live))
            connecting = client.responses.connect(
                on_reconnecting=lambda event: codes.append(event.close_code), **options
            )
            connection = await stack.enter_async_context(connecting)
            await connection.response.create(model=MODEL, input="say " + "a" * 50)
            assert (await connection.recv()).type == "response.created"
            live.state.begin_drain()
            assert (await read_response(connection))[0] == "a" * 50
            reading = asyncio.create_task(read_response(connection))
            await until(lambda: len(codes) >= 3)
            await connection.response.create(model=MODEL, input="say two")
        async with live_server(engine, port=port):
            assert (await asyncio.wait_for(reading, 5))[0] == "two"
            assert set(codes) == {1012}
            await connection.close()


@in_loop
async def test_the_sync_client_reconnects_too() -> None:
    def converse(url: str) -> tuple[list[str], list[int]]:
        texts: list[str] = []
        codes: list[int] = []

        def ask_again(event: Any) -> None:
            codes.append(event.close_code)
            connection.response.create(model=MODEL, input="say two")

        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        with client, client.responses.connect(on_reconnecting=ask_again, initial_delay=0.05) as connection:
            connection.response.create(model=MODEL, input="say one")
            for event in connection:
                if event.type == "response.completed":
                    texts.append(event.response.output_text)
                    if len(texts) == 2:
                        return texts, codes
        raise AssertionError("the connection ended")

    async with scripted_server(api_key=KEY, max_connection_age_s=1.5) as live:
        assert await asyncio.to_thread(converse, live.http_url) == (["one", "two"], [1001])


@in_loop
@pytest.mark.parametrize("code", [1008, 1009])
async def test_the_client_does_not_come_back_where_it_is_at_fault(code: int) -> None:
    """1009 answers a message that is too large; nothing in the server closes with 1008 once a socket is open."""
    codes: list[int] = []
    async with scripted_server(max_frame_mib=0.1) as live, async_client(live) as client:
        connecting = client.responses.connect(on_reconnecting=lambda event: codes.append(event.close_code))
        async with connecting as connection:
            if code == 1009:
                await connection.response.create(model=MODEL, input="x" * 200_000)
            else:
                live.protocols[0].close(code, "not here")
            with pytest.raises(ConnectionClosedError) as closed:
                await read_response(connection)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, codes) == (code, [])


async def read_all(connection: Any, wanted: str) -> str:
    """Join deltas until they say what is wanted; errors about the connection's age pass."""
    text = ""
    async for event in connection:
        if event.type == "response.output_text.delta":
            text += event.delta
        if text == wanted:
            break
    return text
