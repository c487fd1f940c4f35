"""``item_reference``: an input that names items of stored responses is the input that has them."""

import json
import threading
from typing import Any

import httpx
import pytest
from doubles_responses import plain
from doubles_socket import in_loop, respond, scripted_server, text_of

from aserve.errors import ClientError
from aserve.server.responses import item_references
from aserve.server.responses.item_references import MAX_RESPONSES, resolve_references
from aserve.server.responses.items import Item
from aserve.store.record import StoredResponse

TOOLS = [{"type": "function", "name": "f"}, {"type": "custom", "name": "run"}]
SPOKEN = (
    '<think>Hm.</think>Both.<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    '<tool_call>{"name": "run", "arguments": {"input": "ls"}}</tool_call>'
)
QUESTION = {"role": "user", "content": f"say {SPOKEN}"}
ASK = {"role": "user", "content": "say fine"}


async def post(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/responses", json={"tools": TOOLS, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def reference(item_id: object) -> dict[str, Any]:
    return {"type": "item_reference", "id": item_id}


async def listed(client: httpx.AsyncClient, response_id: str) -> list[dict[str, Any]]:
    """Return what a response answered, without ids."""
    page = (await client.get(f"/responses/{response_id}/input_items?order=asc&limit=100")).json()
    return [{name: value for name, value in item.items() if name != "id"} for item in page["data"]]


@in_loop
@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_items_that_are_named_are_those_that_were_stored(store: str, tmp_path: Any) -> None:
    url = store if store != "sqlite" else f"sqlite:///{tmp_path}/responses.db"
    async with (
        scripted_server(reasoning_parser="think", response_store=url) as live,
        plain(live) as client,
        live.connect() as socket,
    ):
        first = await post(client, input=[QUESTION])
        output = first["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "custom_tool_call"]
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "one"} for item in output[2:]
        ]
        spelled = await post(client, input=[QUESTION, *output, *results, ASK])
        named = [QUESTION, *(reference(item["id"]) for item in output), *results, ASK]
        over_http = await post(client, input=named)
        over_socket = await respond(socket, input=named, tools=TOOLS)
        assert text_of(over_socket) == over_http["output"][0]["content"][0]["text"] == "fine"
        expected = await listed(client, spelled["id"])
        for response in (over_http, over_socket[-1]["response"]):
            assert await listed(client, response["id"]) == expected
            assert response["usage"]["input_tokens"] == spelled["usage"]["input_tokens"]
        # What was answered can be named as well.
        page = (await client.get(f"/responses/{over_http['id']}/input_items?order=asc")).json()["data"]
        again = await post(client, input=[reference(item["id"]) for item in page])
        assert await listed(client, again["id"]) == expected


@in_loop
async def test_what_is_not_stored_is_named_in_the_error() -> None:
    async with scripted_server() as live, plain(live) as client, live.connect() as socket:
        kept = await post(client, input="say a")
        unkept = await post(client, input="say a", store=False)
        gone = await post(client, input="say a")
        await client.delete(f"/responses/{gone['id']}")
        (good,), (bad,), (deleted,) = (response["output"] for response in (kept, unkept, gone))
        hexadecimal = kept["id"].removeprefix("resp_")
        for item_id in (
            bad["id"], deleted["id"], good["id"] + "0", good["id"].replace("out0", "out7"), f"fc_{hexadecimal}_out0",
            f"msg_{hexadecimal}_in5", "msg_1", "", "../../etc/passwd", "x" * 10_000, None, 7, {"a": 1},
        ):  # fmt: skip
            ask: dict[str, Any] = {"input": [ASK, reference(good["id"]), reference(item_id)]}
            answer = await client.post("/responses", json=ask)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[2].id"), item_id
            (error,) = await respond(socket, **ask)
            assert (error["status"], error["error"]["param"]) == (400, "input[2].id")
        for named in (reference(good["id"]), {"id": good["id"]}, {"id": good["id"], "type": None}):
            assert text_of(await respond(socket, input=[named, ASK])) == "fine"


class CountingStore:
    """Has a response of every id, with one message."""

    def __init__(self, text: str = "") -> None:
        self.num_calls = 0
        self._text = text

    async def get(self, response_id: str) -> StoredResponse:
        self.num_calls += 1
        content = [{"type": "output_text", "text": self._text}]
        item = {"id": response_id.replace("resp_", "msg_") + "_out0", "type": "message", "content": content}
        return StoredResponse(response_id, 0, json.dumps({"output": [item]}).encode(), b"[]", b"[]", b"[]")


@in_loop
async def test_each_response_is_looked_up_once_and_only_so_many() -> None:
    store: Any = CountingStore()
    names = [reference(f"msg_{number:032x}_out0") for number in range(MAX_RESPONSES + 1)]
    payload = {"input": [*names[:-1] * 3, "text that is checked elsewhere"], "model": "m"}
    resolved = await resolve_references(payload, store)
    assert [item["id"] for item in resolved["input"][:-1]] == [name["id"] for name in names[:-1]] * 3
    assert (resolved["input"][-1], resolved["model"]) == (payload["input"][-1], "m")
    assert store.num_calls == MAX_RESPONSES
    with pytest.raises(ClientError, match=f"more than {MAX_RESPONSES} responses") as caught:
        await resolve_references({"input": names}, store)
    assert caught.value.param == "input"


@in_loop
async def test_the_size_of_what_is_named_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_references, "MAX_BYTES", 100_000)
    names = [reference(f"msg_{number:032x}_out0") for number in range(4)]
    store: Any = CountingStore("x" * 30_000)
    resolved = await resolve_references({"input": names[:3]}, store)
    assert [item["content"][0]["text"] for item in resolved["input"]] == ["x" * 30_000] * 3
    for too_much in (names, names[:1] * 4):
        with pytest.raises(ClientError, match="more than 100000 bytes") as caught:
            await resolve_references({"input": too_much}, store)
        assert caught.value.param == "input"


@in_loop
async def test_stored_responses_are_taken_apart_off_the_loop_and_only_as_far_as_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []
    decode_item = item_references.decode_item

    def noting(encoded: Any) -> Item:
        threads.append(threading.current_thread())
        return decode_item(encoded)

    monkeypatch.setattr(item_references, "decode_item", noting)
    async with scripted_server() as live, plain(live) as client:
        said = [{"role": "user", "content": f"say {number}"} for number in range(100)]
        first = await post(client, input=said)
        page = (await client.get(f"/responses/{first['id']}/input_items?order=asc&limit=100")).json()["data"]
        again = await post(client, input=[reference(page[7]["id"]), reference(page[-1]["id"])])
        items = (await client.get(f"/responses/{again['id']}/input_items?order=asc")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["say 7", "say 99"]
    assert len(threads) == 2
    assert threading.main_thread() not in threads
