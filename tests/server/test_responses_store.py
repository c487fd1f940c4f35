"""Stored responses over a restart of the server, and a store that is slow or broken."""

import asyncio
import logging
import sqlite3
import threading
from pathlib import Path

import openai
import pytest
from doubles_responses import create, official, plain
from doubles_socket import MODEL, in_loop, respond, scripted_server

from aserve.server.response_archive import ResponseArchive
from aserve.store.memory import MemoryStore
from aserve.store.record import StoredResponse


@in_loop
async def test_responses_survive_a_restart_and_can_be_continued(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/kept.db"
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
async def test_the_store_is_bounded_by_its_settings() -> None:
    async with scripted_server(response_store_mib=0.02) as live, plain(live) as client:
        ids = [(await create(client, "say " + "a" * 500)).json()["id"] for _ in range(20)]
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
