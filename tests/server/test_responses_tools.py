"""Calls and reasoning in a response: the order of its events, each checked by the SDK's own type, and its items."""

import itertools
import json
from typing import Any

import pytest
from doubles_engine import LetterTokenizer
from doubles_responses import create, official, plain, read_sse
from doubles_socket import MODEL, check_event, in_loop, kinds, receive_until, respond, scripted_server, send, text_of
from openai.types.responses import Response

from aserve.parsing.answer_reader import AnswerReader
from aserve.parsing.registry import AnswerFormat
from aserve.request import FinishReason, RequestOutput
from aserve.server.answer_events import AnswerEvents
from aserve.server.logprobs import TokenNames
from aserve.server.responses.events import ResponseEvents, ResponseStatus
from aserve.server.responses.schema import parse_create

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "description": "Weather.", "parameters": CITY}
PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "text"},
}
HELD_PATCH = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /[a-z]+/"}}
TOOLS = [WEATHER, PATCH]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


OSLO = '{"city": "Oslo"}'
TRICKY = '{"city": "} \\"q\\" \\\\ \\n \\ud83d\\ude00 \xe9", "more": {}}'

MESSAGE = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
REASONING = [
    "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
    "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
FUNCTION = [
    "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
    "response.output_item.done",
]  # fmt: skip
CUSTOM = [
    "response.output_item.added", "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done",
    "response.output_item.done",
]  # fmt: skip
START, END = ["response.created", "response.in_progress"], ["response.completed"]

ORDERS: dict[str, tuple[str, list[str]]] = {
    "a call": (call("get_weather", OSLO), FUNCTION),
    "text, call": ("Let me see. " + call("get_weather", OSLO), MESSAGE + FUNCTION),
    "two calls": (call("get_weather", OSLO) + call("get_weather", TRICKY), FUNCTION + FUNCTION),
    "call, text": (call("get_weather", OSLO) + "Wait.", FUNCTION + MESSAGE),
    "reasoning, text": ("<think>Hm. Well.</think>Yes", REASONING + MESSAGE),
    "reasoning alone": ("<think>Hm.</think>", REASONING),
    "reasoning, call": ("<think>Hm.</think>" + call("get_weather", OSLO), REASONING + FUNCTION),
    "all": (
        "<think>Hm.</think>Both." + call("apply_patch", '{"input": "ab"}') + call("get_weather", OSLO),
        REASONING + MESSAGE + CUSTOM + FUNCTION,
    ),
    "a custom call": (call("apply_patch", '{"input": "*** \\"x\\"\\n+\\u00e9\\ud83d\\ude00"}'), CUSTOM),
    "text like a call": ("<tool_cal> is <tool", MESSAGE),
}


def check_stream(events: list[dict[str, Any]]) -> None:
    """Check what holds for every stream: numbers, places, and that the parts of each item agree."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    opened = [event for event in events if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in opened] == list(range(len(output)))
    for index, item in enumerate(output):
        mine = [event for event in events if event.get("output_index") == index]
        start, first = events.index(mine[0]), mine[0]["item"]
        assert events[start : start + len(mine)] == mine, "items do not overlap"
        assert (first["id"], first["type"], first["status"]) == (item["id"], item["type"], "in_progress")
        assert all(event["item_id"] == item["id"] for event in mine if "item_id" in event)
        said = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert said == said_in(item)
        if item["type"] in ("message", "reasoning"):
            assert item["content"] == [next(e["part"] for e in mine if e["type"] == "response.content_part.done")]
        for event in mine:
            if event["type"] == "response.output_item.done":
                assert event["item"] == item
            if event["type"].endswith((".arguments.done", "_input.done", "_text.done")):
                assert said in (event.get("arguments"), event.get("input"), event.get("text"))


def said_in(item: dict[str, Any]) -> str:
    if item["type"] in ("message", "reasoning"):
        return "".join(part["text"] for part in item["content"])
    said = item["input"] if item["type"] == "custom_tool_call" else item["arguments"]
    assert isinstance(said, str)
    return said


@in_loop
@pytest.mark.parametrize("name", ORDERS)
async def test_items_come_in_order_on_both_transports(name: str) -> None:
    spoken, expected = ORDERS[name]
    ask = {"input": f"say {spoken}", "tools": TOOLS}
    async with scripted_server(reasoning_parser="think") as live, live.connect() as socket, plain(live) as client:
        over_socket = await respond(socket, **ask)
        over_http = read_sse((await create(client, f"say {spoken}", tools=TOOLS, stream=True)).text)
        whole = (await create(client, f"say {spoken}", tools=TOOLS)).json()
    Response.model_validate(whole)
    for events in (over_socket, over_http):
        assert [kind for kind, _ in itertools.groupby(kinds(events))] == START + expected + END
        check_stream(events)
        shown = [(item["type"], item["status"], said_in(item)) for item in events[-1]["response"]["output"]]
        assert shown == [(item["type"], item["status"], said_in(item)) for item in whole["output"]]


@in_loop
async def test_a_call_says_what_the_model_wrote() -> None:
    async with scripted_server() as live, live.connect() as socket:
        spoken = call("get_weather", OSLO) + call("get_weather", TRICKY)
        events = await respond(socket, input=f"say {spoken}", tools=TOOLS)
        first, second = events[-1]["response"]["output"]
        assert (first["name"], first["arguments"]) == ("get_weather", OSLO)
        assert json.loads(second["arguments"]) == json.loads(TRICKY)
        assert first["call_id"] != second["call_id"]
        (_, done) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
        assert (done["name"], done["arguments"]) == ("get_weather", second["arguments"])
        (custom,) = (await respond(socket, input=f"say {ORDERS['a custom call'][0]}", tools=TOOLS))[-1]["response"][
            "output"
        ]
        assert (custom["name"], custom["input"]) == ("apply_patch", '*** "x"\n+\xe9\U0001f600')


@in_loop
async def test_a_tool_of_a_namespace_is_called_by_its_own_name() -> None:
    tools = [{"type": "namespace", "name": "crm", "description": "Customers.", "tools": [WEATHER, PATCH]}]
    spoken = call("crm__get_weather", OSLO) + call("crm__apply_patch", '{"input": "a"}')
    async with scripted_server() as live, live.connect() as socket:
        response = (await respond(socket, input=f"say {spoken}", tools=tools))[-1]["response"]
    assert [(item["name"], item["namespace"]) for item in response["output"]] == [
        ("get_weather", "crm"),
        ("apply_patch", "crm"),
    ]
    assert response["tools"] == tools


@in_loop
async def test_the_response_repeats_what_was_asked_for() -> None:
    hosted = [{"type": "web_search"}, {"type": "image_generation"}, {"type": "tool_of_the_future"}]
    empty = {"type": "namespace", "name": "none", "description": "", "tools": []}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]}
    fields = {"parallel_tool_calls": False, "tool_choice": choice, "reasoning": {"effort": "low", "summary": "auto"}}
    async with scripted_server() as live, live.connect() as socket:
        response = (await respond(socket, input="say a", tools=[*hosted, *TOOLS, empty], **fields))[-1]["response"]
        assert response["tools"] == [*TOOLS, empty]
        assert {name: response[name] for name in fields} == fields
        response = (await respond(socket, input="say a"))[-1]["response"]
        assert (response["tools"], response["tool_choice"], response["parallel_tool_calls"]) == ([], "auto", True)
        assert response["reasoning"] == {"effort": None, "summary": None}


@in_loop
async def test_one_call_at_a_time_if_asked_for() -> None:
    spoken = call("get_weather", OSLO) + call("get_weather", TRICKY)
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input=f"say {spoken}", tools=TOOLS, parallel_tool_calls=False)
    check_stream(events)
    (only,) = events[-1]["response"]["output"]
    assert only["arguments"] == OSLO


@in_loop
@pytest.mark.parametrize("fields", [{"tool_choice": "none", "tools": TOOLS}, {"tools": []}, {}], ids=str)
async def test_without_tools_calls_are_text(fields: dict[str, Any]) -> None:
    spoken = call("get_weather", OSLO)
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input=f"say {spoken}", **fields)
    assert [kind for kind, _ in itertools.groupby(kinds(events))] == START + MESSAGE + END
    assert text_of(events) == spoken


@in_loop
async def test_a_call_that_is_cut_is_never_reported_as_done() -> None:
    spoken = "Hm. " + call("get_weather", TRICKY)
    begun, ended = spoken.index(TRICKY), spoken.index(TRICKY) + len(TRICKY)
    async with scripted_server() as live, live.connect() as socket:
        for limit in range(1, len(spoken) + 1):
            events = await respond(socket, input=f"say {spoken}", tools=TOOLS, max_output_tokens=limit)
            check_stream(events)
            response = events[-1]["response"]
            assert (response["status"], response["incomplete_details"]) == (
                "incomplete",
                {"reason": "max_output_tokens"},
            )
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            if limit > ended:
                assert [json.loads(item["arguments"]) for item in calls] == [json.loads(TRICKY)]
            if begun < limit < ended:
                assert all(item["status"] == "incomplete" for item in calls)
                assert not any(item in done for item in calls)
        cut = (await respond(socket, input=f"say {spoken}", tools=TOOLS, max_output_tokens=ended - 4))[-1]["response"]
        assert cut["output"][-1]["type"] == "function_call"
        again = await respond(socket, input="say fine", previous_response_id=cut["id"])
        assert text_of(again) == "fine"


@in_loop
async def test_a_stop_string_within_a_call_leaves_it_incomplete() -> None:
    async with scripted_server() as live, live.connect() as socket:
        for spoken, stop in (
            (call("get_weather", OSLO), "slo"),
            (call("apply_patch", '{"input": "abcdef"}'), "def"),
            (call("get_weather", OSLO), "</tool_call>"),
        ):
            is_cut = stop != "</tool_call>"
            events = await respond(socket, input=f"say {spoken}", tools=TOOLS, stop=stop)
            check_stream(events)
            response = events[-1]["response"]
            assert response["status"] == "completed"
            (item,) = response["output"]
            assert item["status"] == ("incomplete" if is_cut else "completed")
            done = {"response.output_item.done", "response.function_call_arguments.done"}
            assert bool(done & set(kinds(events))) is not is_cut


@in_loop
async def test_a_cancelled_response_ends_what_is_open() -> None:
    async with scripted_server(step_time_s=0.002, reasoning_parser="think") as live, live.connect() as socket:
        for spoken, delta in (
            ("<think>" + "Hm. " * 200, "response.reasoning_text.delta"),
            (call("get_weather", '{"city": "' + "x" * 600 + '"}'), "response.function_call_arguments.delta"),
        ):
            await send(socket, input=f"say {spoken}", tools=TOOLS)
            events = await receive_until(socket, delta)
            await send(socket, "response.cancel")
            events += await receive_until(socket, "response.incomplete")
            check_stream(events)
            (item,) = events[-1]["response"]["output"]
            assert item["status"] == "incomplete"
            assert events[-1]["response"]["status"] == "cancelled"


@in_loop
async def test_reasoning_is_counted_and_can_be_sent_back() -> None:
    ask: dict[str, Any] = {"input": "say <think>Hm. Well.</think>Yes", "tools": TOOLS}
    async with scripted_server(reasoning_parser="think") as live, official(live) as client:
        answer = await client.responses.create(model=MODEL, include=["reasoning.encrypted_content"], store=False, **ask)
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == len("Hm. Well.")
        thought = answer.output[0]
        assert thought.type == "reasoning"
        assert thought.content is not None
        assert (thought.content[0].text, thought.summary) == ("Hm. Well.", [])
        packed = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
        question = {"role": "user", "content": "say fine"}
        again = await client.responses.create(model=MODEL, input=[packed, question])  # type: ignore[list-item]
        listed = (await client.responses.input_items.list(again.id, order="asc")).data
        assert listed[0].type == "reasoning"
        assert listed[0].content is not None
        assert listed[0].content[0].text == "Hm. Well."
        plain_answer = await client.responses.create(model=MODEL, **ask)
        assert plain_answer.output[0].to_dict().get("encrypted_content") is None


@in_loop
async def test_logprobs_are_those_of_the_text() -> None:
    spoken = "<think>Hm.</think>Yes." + call("get_weather", OSLO)
    ask = {"include": ["message.output_text.logprobs"], "tools": TOOLS}
    async with scripted_server(reasoning_parser="think") as live, live.connect() as socket:
        events = await respond(socket, input=f"say {spoken}", **ask)
    check_stream(events)
    entries = [entry for event in events for entry in event.get("logprobs", ()) if event["type"].endswith(".delta")]
    shown = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert shown == "Yes."


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth else {}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": {"a": 1}}, "tools"),
    ({"tools": ["f"]}, "tools[0]"),
    ({"tools": [{"name": "f"}]}, "tools[0].type"),
    ({"tools": [WEATHER, {"type": "function"}]}, "tools[1].name"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{**WEATHER, "parameters": "x"}]}, "tools[0].parameters"),
    ({"tools": [{**WEATHER, "strict": "yes"}]}, "tools[0].strict"),
    ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "ebnf"}}]}, "tools[0].format"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tools": [{**WEATHER, "name": f"f{n}"} for n in range(600)]}, "tools"),
    ({"tools": [{**WEATHER, "output_schema": nested(300)}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "get_weather"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice.mode"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]}},
        "tool_choice.tools[0].name",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [WEATHER] * 513}}, "tool_choice.tools"),
    ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": {"summary": 5}}, "reasoning.summary"),
    ({"reasoning": "low"}, "reasoning"),
]


@in_loop
async def test_what_is_wrong_is_named_on_both_transports() -> None:
    async with scripted_server() as live, live.connect() as socket, plain(live) as client:
        for fields, param in WRONG:
            (error,) = await respond(socket, input="say a", **fields)
            assert (error["status"], error["error"]["param"]) == (400, param), error
            answer = await create(client, "say a", **fields)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert text_of(await respond(socket, input="say fine")) == "fine"


def grouped(spoken: str, size: int) -> list[RequestOutput]:
    """Return ``spoken`` as outputs of ``size`` tokens, a letter each, and the end."""
    pieces = [spoken[start : start + size] for start in range(0, len(spoken), size)]
    outputs = [RequestOutput("r", piece, list(map(ord, piece)), 1, 1, 0) for piece in pieces]
    outputs[-1].finish_reason = FinishReason.STOP
    return outputs


def test_how_tokens_are_grouped_changes_no_item() -> None:
    spoken = ORDERS["all"][0] + call("get_weather", TRICKY) + call("apply_patch", '{"input": "} \\ud83d\\ude00"}')
    request = parse_create({"input": "a", "tools": TOOLS}, 256)
    answer_format = AnswerFormat("hermes", "think")
    outputs = []
    for size in range(1, len(spoken) + 1):
        events = ResponseEvents(request, response_id="resp_1", model=MODEL, created_at=0)
        parser = answer_format.parser({"get_weather": CITY, "apply_patch": {}})
        assert parser is not None
        names = TokenNames(LetterTokenizer(), hides_special=True)  # type: ignore[arg-type]
        answer = AnswerEvents(events, AnswerReader(parser), names)
        made = [event for output in grouped(spoken, size) for event in answer.read(output)]
        stream = [check_event(json.loads(payload)) for _, payload in made + events.ending(ResponseStatus.COMPLETED)]
        check_stream(stream)
        shown = [(item["type"], item.get("name"), said_in(item)) for item in stream[-1]["response"]["output"]]
        outputs.append(shown)
    assert outputs[0] == [
        ("reasoning", None, "Hm."),
        ("message", None, "Both."),
        ("custom_tool_call", "apply_patch", "ab"),
        ("function_call", "get_weather", OSLO),
        ("function_call", "get_weather", TRICKY),
        ("custom_tool_call", "apply_patch", "} \U0001f600"),
    ]
    assert all(shown == outputs[0] for shown in outputs)


@in_loop
async def test_a_background_response_with_a_call_is_read_again_from_any_event() -> None:
    spoken = ORDERS["all"][0]
    async with scripted_server(reasoning_parser="think") as live, plain(live) as client:
        created = (await create(client, f"say {spoken}", tools=TOOLS, background=True)).json()
        events = read_sse((await client.get(f"/responses/{created['id']}?stream=true")).text)
        check_stream(events)
        later = read_sse((await client.get(f"/responses/{created['id']}?stream=true&starting_after=9")).text)
        assert later == events[10:]
        kept = (await client.get(f"/responses/{created['id']}")).json()
        assert kept == events[-1]["response"]
        calls = [item for item in kept["output"] if item["type"].endswith("_call")]
        results = [
            {"type": f"{item['type']}_output", "call_id": item["call_id"], "output": "say fine"} for item in calls
        ]
        again = (await client.post("/responses", json={"input": results, "previous_response_id": kept["id"]})).json()
        assert again["output"][0]["content"][0]["text"] == "fine"


@in_loop
async def test_what_codex_sends_is_answered() -> None:
    spoken = "<think>Hm.</think>" + call("shell_command", '{"command": "ls"}')
    body: dict[str, Any] = {
        "model": MODEL,
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"say {spoken}"}]},
        ],
        "tools": [
            {"type": "function", "name": "shell_command", "description": "Run it.", "strict": False,
             "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
            HELD_PATCH,
            {"type": "namespace", "name": "mcp__docs__", "description": "Docs.", "tools": [WEATHER]},
            {"type": "web_search", "external_web_access": True},
            {"type": "image_generation", "output_format": "png"},
            {"type": "local_shell"},
            {"type": "tool_search", "execution": "client", "description": "Find tools.", "parameters": {}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "1"},
        "service_tier": None,
    }  # fmt: skip
    async with scripted_server(reasoning_parser="think") as live, live.connect() as socket, plain(live) as client:
        over_http = read_sse((await client.post("/responses", json=body)).text)
        over_socket = await respond(socket, **body, generate=True, previous_response_id=None)
        for events in (over_http, over_socket):
            check_stream(events)
            done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
            assert [item["type"] for item in done] == ["reasoning", "function_call"]
            assert (done[1]["name"], done[1]["arguments"]) == ("shell_command", '{"command": "ls"}')
            assert events[-1]["type"] == "response.completed"
            assert [tool["type"] for tool in events[-1]["response"]["tools"]] == ["function", "custom", "namespace"]
        thought, called = done
        turn = [
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": thought["encrypted_content"]},
            {key: called[key] for key in ("type", "name", "arguments", "call_id")},
            {"type": "function_call_output", "call_id": called["call_id"], "output": "say done"},
        ]
        continued = {**body, "input": turn[2:], "previous_response_id": over_socket[-1]["response"]["id"]}
        assert text_of(await respond(socket, **continued)) == "done"
        assert text_of(await respond(socket, **{**body, "input": body["input"] + turn})) == "done"
