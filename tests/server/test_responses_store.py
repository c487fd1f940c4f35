"""Stored responses over a restart of the server, and a store that is slow or broken."""

import asyncio
import logging
import sqlite3
import threading
from pathlib import Path

import openai
import pytest
from doubles_engine import until
from doubles_redis import RedisServer, SilentProxy
from doubles_responses import create, official, plain
from doubles_socket import MODEL, in_loop, respond, scripted_server, text_of

from aserve.server.responses import archive as response_archive
from aserve.server.responses.archive import ResponseArchive
from aserve.store.memory import MemoryStore
from aserve.store.record import StoredResponse


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
        redis.start()
        await asyncio.sleep(1.1)  # in which it is not asked again
        again = (await create(client, "say again")).json()["id"]
        await until(lambda: not live.state.archive._on_way)
        assert (await client.get(f"/responses/{again}")).status_code == 200
    redis.stop()
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
