"""The stand-alone Python client against a live server."""

import asyncio
import re
from pathlib import Path

import pytest
from aserve_client import Client, ConnectionLostError, ServerError
from doubles_socket import Live, in_loop, scripted_server

README = Path(__file__).parents[2] / "clients" / "python" / "README.md"


async def chat(client: Client, text: str, **options: object) -> list[str]:
    return [piece async for piece in client.chat_stream([{"role": "user", "content": text}], **options)]


@in_loop
async def test_chat_streams_piece_by_piece() -> None:
    async with scripted_server(api_key="sk-1", step_time_s=0.002) as live:
        async with Client(live.http_url, api_key="sk-1") as client:
            assert await client.models() == ["scripted"]
            pieces = await chat(client, "say Hello there")
            assert "".join(pieces) == "Hello there"
            assert len(pieces) > 1
            assert "".join(await chat(client, "count", max_tokens=7)) != ""
        async with Client(live.http_url + "/v1/", api_key="sk-1") as client:
            assert "".join(await chat(client, "say a")) == "a"


@in_loop
async def test_leaving_a_chat_stream_ends_the_generation() -> None:
    async with scripted_server(step_time_s=0.002) as live, Client(live.http_url) as client:
        stream = client.chat_stream([{"role": "user", "content": "count"}])
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await live.become_idle()


@in_loop
async def test_refusals_are_raised_with_status_and_code() -> None:
    async with scripted_server(api_key="sk-1") as live:
        async with Client(live.http_url, api_key="wrong") as client:
            with pytest.raises(ServerError) as caught:
                await client.models()
            assert caught.value.status == 401
        async with Client(live.http_url, api_key="sk-1") as client:
            with pytest.raises(ServerError) as caught:
                await chat(client, "say a", model="another")
            assert (caught.value.status, caught.value.code) == (404, "model_not_found")
            with pytest.raises(ServerError, match="cannot be sampled"):
                await chat(client, "fail")


@in_loop
async def test_a_conversation_continues_on_one_socket() -> None:
    async with scripted_server() as live, Client(live.http_url) as client, client.conversation("be kind") as talk:
        first = await talk.respond("say Hello")
        pieces = [piece async for piece in talk.stream("say Bye", max_output_tokens=2)]
        second = talk.last
    assert (first.text, first.status) == ("Hello", "completed")
    assert first.usage["input_tokens"] == len("be kind\nsay Hello\n")
    assert second is not None
    assert (pieces, second.text, second.status) == (["B", "y"], "By", "incomplete")
    assert second.usage["input_tokens"] == len("be kind\nsay Hello\nHello\nsay Bye\n")
    assert second.usage["input_tokens_details"]["cached_tokens"] > 0


def forget(live: Live) -> None:
    for session in live.state._connections:
        session._lanes[None].latest = None  # type: ignore[attr-defined]


@in_loop
async def test_the_whole_history_is_sent_when_the_server_has_forgotten() -> None:
    async with scripted_server() as live, Client(live.http_url) as client, client.conversation() as talk:
        await talk.respond("say one")
        forget(live)
        second = await talk.respond("say two")
        assert second.text == "two"
        assert second.usage["input_tokens"] == len("say one\none\nsay two\n")
        third = await talk.respond("say three")
        assert third.usage["input_tokens"] == len("say one\none\nsay two\ntwo\nsay three\n")


@in_loop
async def test_errors_leave_the_conversation_usable() -> None:
    async with scripted_server() as live, Client(live.http_url) as client, client.conversation() as talk:
        await talk.respond("say one")
        with pytest.raises(ServerError) as caught:
            await talk.respond("say two", temperature=-1)
        assert caught.value.status == 400
        with pytest.raises(ServerError, match="cannot be sampled"):
            await talk.respond("fail")
        answer = await talk.respond("say three")
        assert answer.usage["input_tokens"] == len("say one\none\nsay three\n")


@in_loop
async def test_cancel_ends_the_answer_early() -> None:
    async with scripted_server(step_time_s=0.002) as live, Client(live.http_url) as client:
        async with client.conversation() as talk:
            async for _ in talk.stream("count"):
                await talk.cancel()
            assert talk.last is not None
            assert talk.last.status == "cancelled"
            assert (await talk.respond("say on")).text == "on"
        await live.become_idle()


@in_loop
async def test_an_answer_that_was_left_is_no_part_of_the_conversation() -> None:
    async with scripted_server(step_time_s=0.002) as live, Client(live.http_url) as client:
        async with client.conversation() as talk:
            await talk.respond("say one")
            async for _ in talk.stream("count"):
                break
            answer = await talk.respond("say two")
        assert answer.text == "two"
        assert answer.usage["input_tokens"] == len("say one\none\nsay two\n")


@in_loop
async def test_a_connection_that_ends_in_the_middle_is_reported() -> None:
    async with scripted_server(step_time_s=0.002) as live, Client(live.http_url) as client:
        async with client.conversation() as talk:
            asyncio.get_running_loop().call_later(0.1, lambda: [protocol.abort() for protocol in live.protocols])
            with pytest.raises(ConnectionLostError):
                await talk.respond("count")
        await live.become_idle()


@in_loop
async def test_the_readme_example_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    async with scripted_server() as live:
        code = code.replace("http://127.0.0.1:8000", live.http_url).replace("asyncio.run(main())", "")
        namespace: dict[str, object] = {}
        exec(compile(code, str(README), "exec"), namespace)
        await asyncio.wait_for(namespace["main"](), 20)  # type: ignore[operator]
