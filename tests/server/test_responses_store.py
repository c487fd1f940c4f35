"""Stored responses over a restart of the server, and a store that is slow or broken."""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from doubles_engine import until
from doubles_redis import RedisServer, SilentProxy
from doubles_responses import create, official, plain
from doubles_socket import MODEL, in_loop, respond, scripted_engine, scripted_server, text_of

from aserve.errors import CapacityError
from aserve.server.local_client import LocalClient
from aserve.server.responses import archive as response_archive
from aserve.server.responses import kept
from aserve.server.responses.archive import ResponseArchive
from aserve.server.responses.items import Item, MessageItem, encode_items
from aserve.server.responses.kept import EndedResponse, KeptResponse
from aserve.store.memory import MemoryStore
from aserve.store.record import StoredResponse
from aserve.tokenizer.spans import Span, make_span


@pytest.fixture
def urls(tmp_path: Path, redis_server: RedisServer) -> dict[str, str]:
    """One of each kind of store."""
    return {"memory": "memory", "sqlite": f"sqlite:///{tmp_path}/kept.db", "redis": redis_server.url}


@in_loop
@pytest.mark.parametrize("kind", ["sqlite", "redis"])
async def test_responses_survive_a_restart_and_can_be_continued(kind: str, urls: dict[str, str]) -> None:
    store = urls[kind]
    async with scripted_server(response_store=store) as live, official(live) as client, live.connect() as socket:
        first = await client.responses.create(model=MODEL, input="say a")
        second = await respond(socket, input="say b", previous_response_id=first.id)
    second_id = second[-1]["response"]["id"]
    async with scripted_server(response_store=store) as live, official(live) as client, live.connect() as socket:
        found = await client.responses.retrieve(second_id)
        assert found.to_dict() == second[-1]["response"]
        (item,) = (await client.responses.input_items.list(second_id)).data
        assert item.to_dict()["content"] == [{"type": "input_text", "text": "say b"}]
        third = await respond(socket, input="say c", previous_response_id=second_id)
        assert third[-1]["response"]["usage"]["input_tokens"] == len("say a\na\nsay b\nb\nsay c\n")
        await client.responses.delete(second_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second_id)


@in_loop
@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
async def test_the_store_is_bounded_by_its_settings(kind: str, urls: dict[str, str]) -> None:
    settings = {"response_store": urls[kind], "response_store_mib": 0.02, "response_max_age_s": 30}
    async with scripted_server(**settings) as live, plain(live) as client:
        ids = [(await create(client, "say " + "a" * 500)).json()["id"] for _ in range(20)]
        await until(lambda: not live.state.archive._on_way)
        states = [(await client.get(f"/responses/{one}")).status_code for one in ids]
        assert states == sorted(states, reverse=True)
        assert states.count(200) in range(2, 12)


class SlowStore(MemoryStore):
    """Waits for the test at every write, or fails."""

    blocks = True

    def __init__(self) -> None:
        super().__init__(10**6, 100)
        self.may_write = threading.Event()
        self.fails = False

    def put(self, response: StoredResponse) -> None:
        self.may_write.wait(10)
        if self.fails:
            raise sqlite3.OperationalError("the disk is full")
        super().put(response)


def response(name: str) -> StoredResponse:
    return StoredResponse(name, 0, b"{}", b"[]", b"[]", b"[]")


@in_loop
async def test_what_is_on_its_way_to_a_slow_store_is_found(caplog: pytest.LogCaptureFixture) -> None:
    store = SlowStore()
    archive = ResponseArchive(store)
    archive.put(response("a"))
    archive.put(response("b"))
    assert await archive.get("a") == response("a")
    deleting = asyncio.create_task(archive.delete("b"))
    store.may_write.set()
    assert await deleting is True
    assert await archive.get("b") is None
    assert await archive.get("a") == response("a")
    store.fails = True
    with caplog.at_level(logging.ERROR):
        archive.put(response("c"))
        assert await archive.get("missing") is None
    assert await archive.get("c") is None
    assert "could not be stored: the disk is full" in caplog.text
    await archive.close()


class GatedEncoder:
    """Encodes off the loop when the test lets it, and notes in which threads it was called."""

    def __init__(self) -> None:
        self.may_encode = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, items: Sequence[Item]) -> bytes:
        self.threads.append(threading.current_thread())
        if self.threads[-1] is not threading.main_thread():
            self.may_encode.wait(10)
        return encode_items(items)


@in_loop
@pytest.mark.parametrize("kind", ["memory", "sqlite", "redis"])
async def test_a_large_conversation_is_encoded_off_the_loop_and_found_meanwhile(
    kind: str, urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = GatedEncoder()
    monkeypatch.setattr(kept, "encode_items", encoder)
    monkeypatch.setattr(kept, "SMALL_ITEMS", 2)
    monkeypatch.setattr(kept, "SMALL_BYTES", 100)
    turns = [{"role": "user", "content": f"say {name}"} for name in "abc"]
    async with scripted_server(response_store=urls[kind]) as live, plain(live) as client, live.connect() as socket:
        small = (await create(client)).json()["id"]
        assert encoder.threads == [threading.main_thread()] * 2
        large, doomed = [(await create(client, input=turns)).json() for _ in range(2)]
        asking = asyncio.create_task(client.get(f"/responses/{large['id']}"))
        listing = asyncio.create_task(client.get(f"/responses/{large['id']}/input_items?order=asc"))
        deleting = asyncio.create_task(client.delete(f"/responses/{doomed['id']}"))
        goes_on = asyncio.create_task(respond(socket, input="say d", previous_response_id=large["id"]))
        assert (await client.get(f"/responses/{small}")).json()["id"] == small
        assert not any(task.done() for task in (asking, listing, deleting, goes_on))
        encoder.may_encode.set()
        assert (await asking).json() == large
        assert [item["content"][0]["text"] for item in (await listing).json()["data"]] == ["say a", "say b", "say c"]
        assert (await deleting).json()["deleted"] is True
        assert (await client.get(f"/responses/{doomed['id']}")).status_code == 404
        usage = (await goes_on)[-1]["response"]["usage"]
        assert usage["input_tokens"] == len("say a\nsay b\nsay c\nc\nsay d\n")
        assert (await client.get(f"/responses/{large['id']}")).json() == large
    assert threading.main_thread() not in encoder.threads[2:]


@in_loop
async def test_what_is_on_its_way_when_the_server_stops_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = GatedEncoder()
    monkeypatch.setattr(kept, "encode_items", encoder)
    monkeypatch.setattr(kept, "SMALL_ITEMS", 0)
    url = f"sqlite:///{tmp_path}/kept.db"
    async with scripted_server(response_store=url) as live, plain(live) as client:
        large = (await create(client)).json()
        asyncio.get_running_loop().call_later(0.1, encoder.may_encode.set)
    async with scripted_server(response_store=url) as live, plain(live) as client:
        assert (await client.get(f"/responses/{large['id']}")).json() == large


class GatedStore(MemoryStore):
    """Is asked for nothing once it is closed."""

    is_closed = False

    def put(self, response: StoredResponse) -> None:
        assert not self.is_closed
        super().put(response)

    def close(self) -> None:
        self.is_closed = True


def ended(name: str) -> EndedResponse:
    return EndedResponse(KeptResponse(name, [MessageItem("user", "a")], []), [], b"{}", 0)


@in_loop
@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("blocks", [True, False])
async def test_what_ends_while_the_archive_closes_is_stored_and_what_ends_later_is_told(
    is_small: bool, blocks: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = GatedEncoder()
    monkeypatch.setattr(kept, "encode_items", encoder)
    monkeypatch.setattr(kept, "SMALL_ITEMS", 0)
    store = GatedStore(10**6, 100)
    monkeypatch.setattr(store, "blocks", blocks)
    archive = ResponseArchive(store)
    archive.keep(ended("first"))
    closing = asyncio.create_task(archive.close())
    await asyncio.sleep(0.01)
    monkeypatch.setattr(kept, "SMALL_ITEMS", 64 if is_small else 0)
    archive.keep(ended("meanwhile"))
    encoder.may_encode.set()
    await closing
    assert store._kept.keys() == {"first", "meanwhile"}
    archive.keep(ended("late"))
    assert "response late ended after the store was closed" in caplog.text


@in_loop
@pytest.mark.parametrize("fields", [{}, {"background": True}, {"stream": True}, {"stream": True, "resumable": True}])
async def test_a_response_that_is_being_prepared_when_its_client_closes_ends_there(
    fields: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_engine() as engine:
        has_begun, may_encode = threading.Event(), threading.Event()
        encode = engine.tokenizer.encode_turn

        def gated(*args: Any, **options: Any) -> list[Span]:
            has_begun.set()
            may_encode.wait(10)
            return encode(*args, **options)

        engine.tokenizer.encode_turn = gated  # type: ignore[method-assign]
        async with LocalClient(engine) as client:
            asking = asyncio.create_task(client.request("/v1/responses", {"input": "say a", **fields}))
            await until(has_begun.is_set)
        may_encode.set()
        with pytest.raises(CapacityError, match="the client is closed"):
            await asking
        assert engine.metrics.num_generation_tokens == 0
        with pytest.raises(CapacityError, match="shutting down"):
            await client.request("/v1/responses", {"input": "say a"})
    assert not caplog.records


@in_loop
async def test_what_a_lane_and_the_archive_keep_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_server() as live, live.connect() as socket:
        tokenizer = live.state.engine.tokenizer
        made: list[str] = []

        def counted(text: str, token_ids: Sequence[int]) -> Span:
            made.append(text)
            return make_span(text, token_ids)

        monkeypatch.setattr(tokenizer, "written_span", counted)
        await respond(socket, input="say a")
        last = await respond(socket, input="say b")
        stored = await live.state.archive.find_kept(last[-1]["response"]["id"])
    assert made == ["a", "b"]
    assert stored is not None
    assert stored.items == [MessageItem("user", "say b"), MessageItem("assistant", "b")]


@in_loop
async def test_servers_of_several_hosts_share_a_redis(redis_server: RedisServer) -> None:
    settings = {"response_store": redis_server.url}
    async with scripted_server(**settings) as one, scripted_server(**settings) as other:
        async with official(one) as client:
            first = await client.responses.create(model=MODEL, input="say a")
        async with official(other) as client, other.connect() as socket:
            assert (await client.responses.retrieve(first.id)).output_text == "a"
            second = await respond(socket, input="say b", previous_response_id=first.id)
            assert second[-1]["response"]["usage"]["input_tokens"] == len("say a\na\nsay b\n")


@in_loop
async def test_a_lost_redis_is_told_and_everything_else_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    redis = RedisServer(tmp_path)
    redis.start()
    async with scripted_server(response_store=redis.url) as live, plain(live) as client, live.connect() as socket:
        kept = (await create(client, "say a")).json()["id"]
        assert (await client.get(f"/responses/{kept}")).status_code == 200
        await until(lambda: not live.state.archive._on_way)  # till then it is found without Redis
        redis.stop()
        for _ in range(2):
            lost = await client.get(f"/responses/{kept}")
            assert (lost.status_code, lost.json()["error"]["type"]) == (503, "service_unavailable_error")
            assert "store of responses" in lost.json()["error"]["message"]
            assert "retry-after" in lost.headers
        (error,) = await respond(socket, input="say b", previous_response_id=kept)
        assert (error["status"], error["error"]["type"]) == (503, "service_unavailable_error")
        first = await respond(socket, input="say b")  # its lane keeps it
        second = await respond(socket, input="say c", previous_response_id=first[-1]["response"]["id"])
        assert second[-1]["type"] == "response.completed"
        assert (await create(client, "say a")).status_code == 200
        for probe in ("health", "ready"):
            assert (await client.get(f"{live.http_url}/{probe}")).status_code == 200
        await until(lambda: not live.state.archive._on_way)
        redis.start()
        await asyncio.sleep(1.1)  # in which it is not asked again
        again = (await create(client, "say again")).json()["id"]
        await until(lambda: not live.state.archive._on_way)
        assert (await client.get(f"/responses/{again}")).status_code == 200
    redis.close()
    assert caplog.text.count("does not keep responses at present") == 1
    assert "could not be stored" in caplog.text


@in_loop
async def test_a_redis_that_goes_silent_stops_nobody_else(redis_server: RedisServer) -> None:
    proxy = SilentProxy(redis_server.port)
    async with (
        scripted_server(response_store=proxy.url) as live,
        plain(live) as client,
        live.connect() as socket,
    ):
        kept = (await create(client, "say a")).json()["id"]
        await until(lambda: not live.state.archive._on_way)
        proxy.is_silent = True
        asking = asyncio.create_task(client.get(f"/responses/{kept}"))
        assert text_of(await respond(socket, input="say " + "b" * 100)) == "b" * 100
        num_turns = 0
        while not asking.done():
            await asyncio.sleep(0.01)
            num_turns += 1
        assert (await asking).status_code == 503
        assert num_turns > 5
        proxy.is_silent = False
    proxy.close()


@in_loop
async def test_what_waits_for_a_slow_store_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = SlowStore()
    archive = ResponseArchive(store)
    monkeypatch.setattr(response_archive, "MAX_ON_WAY_BYTES", 2 * response("a").num_bytes)
    for name in "abc":
        archive.put(response(name))
    assert "response c could not be stored" in caplog.text
    store.may_write.set()
    assert await archive.get("c") is None
    assert await archive.get("b") == response("b")
    await until(lambda: not archive._on_way)
    archive.put(response("c"))
    assert await archive.get("c") == response("c")
    await archive.close()
