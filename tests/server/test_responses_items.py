"""Input items of every kind that agents send back: what the model is told of them, and how they are listed."""

from typing import Any

import pytest
from doubles_responses import official
from doubles_socket import MODEL, in_loop, respond, scripted_server, text_of
from openai.types.chat import ChatCompletionMessageParam
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from aserve.errors import ClientError
from aserve.server.responses.input import read_input
from aserve.server.responses.item_ids import ItemPlace
from aserve.server.responses.items import FunctionCallItem, decode_items, encode_items
from aserve.server.responses.listing import wire_item
from aserve.server.responses.turns import chat_messages

SHELL = {"type": "exec", "command": ["ls", "-l"], "env": {}}
PATCH = {"type": "delete_file", "path": "a.py"}
CHUNKS = [{"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]

# What an agent sends back after some turns, and what a template is to know of it.
TURNS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "function": (
        [
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
        ],
        [
            {"role": "assistant", "content": "", "tool_calls": [("c1", "f", '{"a":1}')]},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
        ],
    ),
    "parallel calls after reasoning and text": (
        [
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}", "namespace": "crm"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "function_call_output", "call_id": "c1", "output": "one"},
            {"type": "message", "role": "assistant", "content": "Done."},
        ],
        [
            {
                "role": "assistant",
                "content": "Let me see.",
                "reasoning_content": "Hm.",
                "tool_calls": [("c1", "f", "{}"), ("c2", "crm__g", "{}")],
            },
            {"role": "tool", "tool_call_id": "c2", "content": "two"},
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {"role": "assistant", "content": "Done."},
        ],
    ),
    "custom tool": (
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'say "hi"\n'},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        ],
        [
            {"role": "assistant", "content": "", "tool_calls": [("c1", "apply_patch", '{"input":"say \\"hi\\"\\n"}')]},
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
    ),
    "local shell, answered as a function": (
        [
            {"type": "local_shell_call", "call_id": "c1", "status": "completed", "action": SHELL},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        ],
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [("c1", "local_shell", '{"type":"exec","command":["ls","-l"],"env":{}}')],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        ],
    ),
    "tools with types of their own": (
        [
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}, "status": "completed"},
            {"type": "shell_call_output", "call_id": "c1", "output": CHUNKS, "status": "completed"},
            {"type": "apply_patch_call", "call_id": "c2", "status": "completed", "operation": PATCH},
            {"type": "apply_patch_call_output", "call_id": "c2", "status": "failed", "output": None},
        ],
        [
            {"role": "assistant", "content": "", "tool_calls": [("c1", "shell", '{"commands":["ls"]}')]},
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": '[{"stdout":"a.py","stderr":"","outcome":{"type":"exit","exit_code":0}}]',
            },
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [("c2", "apply_patch", '{"type":"delete_file","path":"a.py"}')],
            },
            {"role": "tool", "tool_call_id": "c2", "content": "failed"},
        ],
    ),
    "tool search": (
        [
            {
                "type": "tool_search_call",
                "call_id": "c1",
                "execution": "client",
                "status": "completed",
                "arguments": {"query": "x"},
            },
            {"type": "tool_search_output", "call_id": "c1", "execution": "client", "status": "completed", "tools": []},
        ],
        [
            {"role": "assistant", "content": "", "tool_calls": [("c1", "tool_search", '{"query":"x"}')]},
            {"role": "tool", "tool_call_id": "c1", "content": "[]"},
        ],
    ),
    "what a text model has no use for": (
        [
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "tool_search_call", "call_id": None, "execution": "server", "status": "completed",
             "arguments": {}},
            {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="},
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAAB"},
            {"type": "compaction", "encrypted_content": "gAAAAAB"},
            {"type": "item_kind_of_the_future", "value": 1},
        ],
        [],
    ),
}  # fmt: skip


def spelled(message: dict[str, Any]) -> dict[str, Any]:
    """Return an expected message with its calls as chat completions has them."""
    if "tool_calls" not in message:
        return message
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


@pytest.mark.parametrize("name", TURNS)
def test_items_become_the_turns_of_a_chat(name: str) -> None:
    sent, expected = TURNS[name]
    messages = chat_messages(read_input(sent))
    assert messages == [spelled(message) for message in expected]
    for message in messages:
        TypeAdapter(ChatCompletionMessageParam).validate_python(message)


@pytest.mark.parametrize("name", TURNS)
def test_items_survive_being_stored(name: str) -> None:
    items = read_input(TURNS[name][0])
    assert decode_items(encode_items(items)) == items


def test_items_stored_before_there_were_namespaces_are_read() -> None:
    stored = b'[{"type":"function_call","call_id":"c1","name":"f","arguments":"{}"}]'
    assert decode_items(stored) == [FunctionCallItem("c1", "f", "{}")]


@pytest.mark.parametrize("name", [name for name in TURNS if "no use" not in name])
def test_items_are_listed_as_they_were_sent(name: str) -> None:
    sent = TURNS[name][0]
    listed = [wire_item(item, ItemPlace("resp_1", False, index)) for index, item in enumerate(read_input(sent))]
    assert len({item["id"] for item in listed}) == len(listed) == len(sent)
    for before, item in zip(sent, listed, strict=True):
        TypeAdapter(ResponseItem).validate_python(item)
        said = {key: value for key, value in before.items() if key not in ("id", "content", "output")}
        assert item == item | said
        if isinstance(before.get("output"), str):
            assert item["output"] == before["output"]


WRONG = [
    ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id"),
    ({"type": "function_call", "call_id": "c", "name": 1, "arguments": "{}"}, "name"),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "arguments"),
    ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": 3}, "namespace"),
    ({"type": "function_call_output", "call_id": "c", "output": 5}, "output"),
    ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}, "output[0].type"),
    ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input"),
    ({"type": "local_shell_call", "call_id": "c"}, "action"),
    ({"type": "local_shell_call", "call_id": 7, "action": SHELL}, "call_id"),
    ({"type": "shell_call_output", "call_id": "c"}, "output"),
    ({"type": "apply_patch_call_output", "call_id": "c"}, "status"),
    ({"type": "reasoning", "content": "Hm."}, "content"),
    ({"type": "item_reference", "id": "msg_1"}, "type"),
]


@pytest.mark.parametrize(("item", "field"), WRONG, ids=str)
def test_what_is_wrong_with_an_item_is_named(item: dict[str, Any], field: str) -> None:
    with pytest.raises(ClientError) as caught:
        read_input([{"role": "user", "content": "hi"}, item])
    assert caught.value.param == f"input[1].{field}"


@in_loop
async def test_an_agents_history_is_answered_and_listed() -> None:
    history = [item for sent, _ in TURNS.values() for item in sent]
    async with scripted_server() as live, official(live) as client, live.connect() as socket:
        ask = {"role": "user", "content": "say fine"}
        assert text_of(await respond(socket, input=[*history, ask])) == "fine"
        answer = await client.responses.create(model=MODEL, input=[*history, ask])  # type: ignore[arg-type]
        assert answer.output_text == "fine"
        listed = [item async for item in client.responses.input_items.list(answer.id, order="asc", limit=100)]
        num_left_out = len(TURNS["what a text model has no use for"][0])
        assert [item.type for item in listed][:2] == ["function_call", "function_call_output"]
        assert len(listed) == len(history) - num_left_out + 1
