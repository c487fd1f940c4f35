"""Where JSON as clients write it and JSON as the parser reads it differ: each body gets one clear answer."""

import json
from typing import Any

import pytest
from doubles_http import Live, in_loop, live_server, say
from openai.types.chat import ChatCompletion

PATHS = {
    "/v1/chat/completions": '"messages":[{"role":"user","content":"hi"}]',
    "/v1/completions": '"prompt":[5,9531,198]',
    "/v1/responses": '"input":"hi"',
}
LIMITS = {"/v1/responses": "max_output_tokens"}


async def post(live: Live, path: str, members: str | bytes = "") -> tuple[int, dict[str, Any]]:
    """Send the path's body with more ``members``, as they are; return status and answer."""
    more = members.encode() if isinstance(members, str) else members
    body = b"{" + PATHS[path].encode() + b"," + more + b"}"
    answer = await live.http.post(path, content=body)
    return answer.status_code, answer.json()


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


NOT_JSON = {
    "not a number": b'"temperature":NaN',
    "infinity": b'"temperature":Infinity',
    "more than a double holds": b'"temperature":1e999',
    "half a surrogate pair": b'"user":"\\ud83d"',
    "the other half": b'"user":"\\ude00"',
    "the wrong order": b'"user":"\\ude00\\ud83d"',
    "a surrogate in UTF-8": b'"user":"\xed\xa0\xbd"',
    "UTF-8 cut short": b'"user":"\xf0\x9f"',
    "Latin-1": b'"user":"\xe9"',
    "a control character": b'"user":"a\nb"',
    "a trailing comma": b'"user":"a",',
    "a comment": b'"user":"a" /* me */',
    "a leading zero": b'"seed":007',
    "too deep": b'"user":' + deep(1024).encode(),
}


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_what_is_not_json_says_so(path: str) -> None:
    async with live_server() as live:
        for name, members in NOT_JSON.items():
            status, answer = await post(live, path, members)
            assert (status, answer["error"]["code"]) == (400, "invalid_json"), name
            assert answer["error"]["type"] == "invalid_request_error"
        with_mark = await live.http.post(path, content=b"\xef\xbb\xbf{" + PATHS[path].encode() + b"}")
        assert (with_mark.status_code, with_mark.json()["error"]["code"]) == (400, "invalid_json")
        await live.check_alive()


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_integers_past_64_bits_are_no_integers(path: str) -> None:
    async with live_server() as live:
        for name in ("seed", LIMITS.get(path, "max_tokens")):
            for value in (2**64, -(2**63) - 1, 10**30):
                status, answer = await post(live, path, f'"{name}":{value}')
                assert (status, answer["error"]["param"]) == (400, name)
        assert (await post(live, path, f'"seed":{2**64 - 1},"{LIMITS.get(path, "max_tokens")}":1'))[0] == 200
        assert (await post(live, path, f'"temperature":{10**30}'))[1]["error"]["param"] == "temperature"


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_the_last_of_several_members_with_one_name_counts(path: str) -> None:
    limit = LIMITS.get(path, "max_tokens")
    async with live_server() as live:
        status, answer = await post(live, path, f'"{limit}":9,"{limit}":"x","{limit}":2')
        usage = answer["usage"]
        assert (status, usage.get("completion_tokens", usage.get("output_tokens"))) == (200, 2)
        assert (await post(live, path, f'"{limit}":2,"{limit}":"x"'))[1]["error"]["param"] == limit


@pytest.mark.parametrize("path", PATHS)
@in_loop
async def test_what_is_nested_deeply_is_ignored_or_refused_but_breaks_nothing(path: str) -> None:
    async with live_server(say("ok")) as live:
        for name in ("frobnicate", "prediction", "service_tier"):
            status, answer = await post(live, path, f'"{name}":{deep(1000)},"{LIMITS.get(path, "max_tokens")}":1')
            assert status == 200, (name, answer)
        for name in ("metadata", "tools", "response_format", "logit_bias", "stop", "chat_template_kwargs"):
            for value in (deep(1000), '{"a":' * 500 + "1" + "}" * 500):
                status, answer = await post(live, path, f'"{name}":{value}')
                assert status in (200, 400), (name, answer)
        await live.check_alive()


DEEP_TYPES = [  # where an error repeats what is there
    ("/v1/responses", '"include":[{}]', "include"),
    ("/v1/responses", '"text":{{"format":{{"type":{}}}}}', "text.format.type"),
    ("/v1/responses", '"tool_choice":{{"type":{}}}', "tool_choice"),
    ("/v1/responses", '"input":[{{"type":{}}}]', "input[0].type"),
    ("/v1/responses", '"input":[{{"role":"user","content":[{{"type":{}}}]}}]', "input[0].content[0].type"),
    ("/v1/chat/completions", '"response_format":{{"type":{}}}', "response_format.type"),
    (
        "/v1/chat/completions",
        '"tool_choice":{{"type":"allowed_tools","allowed_tools":{{"tools":[],"mode":{}}}}}',
        "tool_choice.allowed_tools.mode",
    ),
]


@in_loop
async def test_an_error_repeats_little_of_what_it_refuses() -> None:
    async with live_server(say("ok")) as live:
        for path, members, param in DEEP_TYPES:
            for value in (deep(1000), json.dumps(["x"] * 10_000), "7"):
                status, answer = await post(live, path, members.format(value))
                assert (status, answer["error"]["param"]) == (400, param)
                assert len(answer["error"]["message"]) < 200
        await live.check_alive()


@in_loop
async def test_items_that_are_taken_can_be_listed_however_deep_they_are() -> None:
    async with live_server(say("ok")) as live:
        statuses = []
        for levels in range(240, 256):
            item = f'{{"type":"shell_call","call_id":"c","action":{deep(levels)}}}'
            members = f'"input":[{item},{{"role":"user","content":"hi"}}]'
            status, answer = await post(live, "/v1/responses", members)
            statuses.append(status)
            if status == 200:
                listed = await live.http.get(f"/v1/responses/{answer['id']}/input_items?order=asc")
                assert listed.status_code == 200
                assert listed.json()["data"][0]["action"] == json.loads(deep(levels))
        assert statuses == sorted(statuses)
        assert set(statuses) == {200, 400}


@in_loop
async def test_text_of_every_kind_passes_both_ways() -> None:
    text = '\0\x01\x1f\x7f\x85\u2028\u2029\ufffd\U0010ffff😀\\"/\n'
    async with live_server(say(text)) as live:
        for content in (json.dumps(text), json.dumps(text, ensure_ascii=False)):
            body = f'{{"messages":[{{"role":"user","content":{content}}}]}}'
            answer = await live.http.post("/v1/chat/completions", content=body.encode())
            parsed = ChatCompletion.model_validate(answer.json(), strict=True)
            assert parsed.choices[0].message.content == text
