"""The fields of ``response.create`` beside those of the HTTP endpoints: the same ones count, and mean the same."""

import json
from typing import Any

import pytest
from doubles_socket import in_loop, receive_until, respond, scripted_server, send, text_of
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.responses_client_event import ResponseCreate

from aserve.errors import ClientError
from aserve.server import schema
from aserve.server.reasoning import reasoning_variables
from aserve.server.responses.items import MessageItem
from aserve.server.responses.schema import KNOWN, SAMPLING_FIELDS, WITH_EFFECT, ResponseRequest, parse_create
from aserve.server.schema import ChatBody, CompletionBody, parse_chat
from aserve.tokenizer.messages import ROLES, TEXT_PARTS

VOCAB = 49152


def create(**fields: Any) -> ResponseRequest:
    return parse_create({"type": "response.create", "input": "hi", **fields}, VOCAB)


def refusal(**fields: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        create(**fields)
    return caught.value


def test_every_field_of_the_official_client_is_in_a_list() -> None:
    fields = ResponseCreate.model_fields.keys() | ResponseCreateParamsBase.__annotations__.keys() | {"stream"}
    assert fields - KNOWN == set()


def test_every_field_of_the_other_endpoints_is_in_a_list() -> None:
    fields = {*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__}
    assert fields | schema.REFUSED | schema.HARMLESS.keys() | schema.ACCEPTED_WITHOUT_EFFECT <= KNOWN


@pytest.mark.parametrize("field", sorted(KNOWN - {"input", "type"}))
def test_null_is_absent(field: str) -> None:
    assert create(**{field: None}) == create()


SAMPLING = {
    "temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125, "repetition_penalty": 1.5, "presence_penalty": -1,
    "frequency_penalty": 2, "seed": -3, "min_tokens": 2, "ignore_eos": True, "include_stop_str_in_output": True,
    "skip_special_tokens": False, "stop": ["a", "b"], "stop_token_ids": [5, 6], "logit_bias": {"8": -100},
    "priority": 7,
}  # fmt: skip


def test_sampling_fields_mean_what_they_mean_in_chat() -> None:
    assert SAMPLING.keys() == set(SAMPLING_FIELDS)
    messages = [{"role": "user", "content": "hi"}]
    chat = parse_chat({"messages": messages, **SAMPLING, "max_tokens": 7, "logprobs": True, "top_logprobs": 4}, VOCAB)[
        1
    ]
    include = ["message.output_text.logprobs"]
    request = create(**SAMPLING, max_output_tokens=7, include=include, top_logprobs=4)
    assert request.params == chat.params
    assert request.priority == chat.priority == 7


def test_template_variables_are_read_and_bounded() -> None:
    kwargs = {"enable_thinking": False, "nested": {"a": [1, None]}}
    assert create(chat_template_kwargs=kwargs).template_kwargs == kwargs
    assert create().template_kwargs == {}
    for wrong in ("x", [1], {"x": "y" * 70_000}, {f"v{n}": 1 for n in range(65)}):
        assert refusal(chat_template_kwargs=wrong).param == "chat_template_kwargs"


@pytest.mark.parametrize("effort", [None, "none", "low"])
def test_the_effort_of_reasoning_reaches_the_template_as_in_chat(effort: str | None) -> None:
    kwargs = create(reasoning={"effort": effort}).template_kwargs
    assert kwargs == reasoning_variables(effort, "reasoning_effort")
    own = create(reasoning={"effort": effort}, chat_template_kwargs={"enable_thinking": "own"}).template_kwargs
    assert own == kwargs | {"enable_thinking": "own"}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def test_what_the_response_repeats_of_text_is_what_the_api_knows() -> None:
    text = {"verbosity": "low", "format": {"type": "text"}, "frobnicate": nested(300)}
    assert json.loads(create(text=text).shown_text) == {"verbosity": "low", "format": {"type": "text"}}
    assert json.loads(create(text={"format": None, "verbosity": None}).shown_text) == {"format": {"type": "text"}}
    assert refusal(text={"verbosity": "shouting"}).param == "text.verbosity"
    assert refusal(text={"format": {"type": "text", "x": nested(300)}}).param == "text.format"


@in_loop
@pytest.mark.parametrize("depth", [200, 253])
async def test_what_is_repeated_may_be_nested_as_deeply_as_it_can_be_encoded_alone(depth: int) -> None:
    text = {"format": {"type": "text", "x": nested(depth - 1)}}
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="say a", text=text)
        assert events[-1]["type"] in ("response.completed", "error")
        assert text_of(await respond(socket, input="say fine")) == "fine"
        await send(socket, "response.steer", previous_response_id="resp_1", input=[nested(300)])
        (error,) = await receive_until(socket, "error")
        assert (error["status"], error["error"]["code"], error["error"]["param"]) == (400, "invalid_input", "input")
        assert text_of(await respond(socket, input="say fine")) == "fine"


B37 = [
    {"logit_bias": {"49152": 5}}, {"logit_bias": {"-1": 5}}, {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 101}},
    {"logit_bias": {str(i): 1 for i in range(301)}}, {"stop_token_ids": [49152]}, {"stop_token_ids": [-1]},
    {"top_p": 1.0001}, {"top_p": -0.1}, {"min_p": -1}, {"min_p": 1.1}, {"seed": 2**64}, {"top_k": -2},
]  # fmt: skip


@pytest.mark.parametrize("fields", B37, ids=str)
def test_wrong_values_are_refused_by_name_as_in_chat(fields: dict[str, Any]) -> None:
    with pytest.raises(ClientError) as caught:
        parse_chat({"messages": [{"role": "user", "content": "hi"}], **fields}, VOCAB)
    error = refusal(**fields)
    assert (error.param, error.message) == (caught.value.param, caught.value.message)
    assert error.param in fields


@pytest.mark.parametrize("value", [0, -1, 49152, 10**9, 2**63])
def test_any_top_k_is_clamped_to_the_vocabulary(value: int) -> None:
    assert create(top_k=value).params.top_k == min(value, VOCAB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, {"a": 1}) for name in sorted(schema.REFUSED)),
        *((name, {"a": 1}) for name in sorted(schema.HARMLESS.keys() - WITH_EFFECT)),
        ("n", 2), ("best_of", 2), ("echo", True), ("continue_final_message", True), ("add_generation_prompt", False),
        ("max_tokens", 5), ("max_completion_tokens", 5), ("logprobs", True), ("logprobs", 3), ("messages", []),
        ("reasoning_effort", "low"),
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    error = refusal(**{field: value})
    assert (error.param, error.code) == (field, "unsupported_parameter")
    assert field in error.message


def test_values_that_ask_for_nothing_pass() -> None:
    fields = {
        "response_format": {"type": "text"}, "n": 1, "best_of": 1, "echo": False, "logprobs": False, "functions": [],
        "use_beam_search": False, "continue_final_message": False, "add_generation_prompt": True,
        "field_of_the_future": 1,
    }  # fmt: skip
    assert create(**fields) == create()


@pytest.mark.parametrize("role", sorted(ROLES))
@pytest.mark.parametrize(("kind", "field"), sorted(TEXT_PARTS.items()))
def test_messages_that_chat_takes_are_taken(role: str, kind: str, field: str) -> None:
    items = [{"role": role, "content": [{"type": kind, field: "so"}]}]
    assert create(input=items).items == [MessageItem(role, "so")]


HOSTILE = [
    {"logit_bias": {"256": 5}}, {"logit_bias": {"-1": 5}}, {"logit_bias": {"x": 1}}, {"stop_token_ids": [256]},
    {"stop_token_ids": [-1]}, {"top_k": 0}, {"top_k": -1}, {"top_k": 256}, {"top_k": 10**9}, {"top_k": 2**63},
    {"top_p": 0}, {"top_p": 1}, {"top_p": 1.0001}, {"top_p": -0.1}, {"min_p": -1}, {"min_p": 0}, {"min_p": 1},
    {"min_p": 1.1}, {"top_logprobs": 21}, {"top_logprobs": 10**6}, {"top_logprobs": True}, {"seed": 2**64},
]  # fmt: skip


@in_loop
async def test_extreme_sampling_fields_disturb_no_neighbour() -> None:
    async with scripted_server(step_time_s=0.002) as live, live.connect() as neighbour, live.connect() as socket:
        alone = text_of(await respond(neighbour, input="count", max_output_tokens=200, temperature=0))
        await send(neighbour, input="count", max_output_tokens=200, temperature=0)
        include = ["message.output_text.logprobs"]
        for fields in HOSTILE:
            last = (await respond(socket, input="say a", max_output_tokens=2, include=include, **fields))[-1]
            assert last["type"] in ("response.completed", "error"), fields
            assert last.get("status", 400) == 400
        await socket.send('{"type":"response.create","input":"a","logit_bias":{"5":NaN}}')
        assert (await receive_until(socket, "error"))[-1]["error"]["code"] == "invalid_json"
        assert text_of(await receive_until(neighbour, "response.incomplete")) == alone
        assert text_of(await respond(socket, input="say fine")) == "fine"
        await live.become_idle()


@in_loop
async def test_sampling_fields_reach_the_engine() -> None:
    async with scripted_server() as live, live.connect() as socket:
        events = await respond(socket, input="say abcde", stop_token_ids=[ord("c")])
        assert text_of(events).startswith("ab")
        assert "d" not in text_of(events)
        assert text_of(await respond(socket, input="say abcde", stop="c", include_stop_str_in_output=True)) == "abc"
        special = {"ignore_eos": True, "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}
        assert text_of(await respond(socket, input="say a", **special)) == "a"
        shown = await respond(socket, input="say a", **special, skip_special_tokens=False)
        assert text_of(shown) == "a<eos><eos>"
        entries = shown[-1]["response"]["output"][0]["content"][0]["logprobs"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == b"a<eos><eos>"
