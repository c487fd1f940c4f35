"""/v1/chat/completions over real sockets: shapes, order, usage, and that a stream says what one answer says."""

import asyncio
import itertools
import json
from typing import Any

import orjson
import pytest
from doubles_http import MODEL, demo_tokenizer, events, fetch, in_loop, joined, live_server, say
from doubles_responses import read_sse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from aserve.runner.scripted import RowFailure

REPLY = "Hello, Žluťoučký kůň 😀!\u2028A new line."
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def strict(kind: Any, value: dict[str, Any]) -> Any:
    """Return ``value`` as the official type, which must know it without conversion."""
    return kind.model_validate(value, strict=True)


@in_loop
async def test_one_answer_has_the_official_shape() -> None:
    async with live_server(say(REPLY)) as live:
        answer = await live.chat()
        assert answer.headers["content-type"] == "application/json"
        parsed: ChatCompletion = strict(ChatCompletion, answer.json())
        assert parsed.id.startswith("chatcmpl-")
        assert parsed.model == MODEL
        assert parsed.choices[0].message.content == REPLY
        assert parsed.choices[0].finish_reason == "stop"
        assert parsed.usage is not None
        num_output = len(demo_tokenizer().encode(REPLY)) + 1  # EOS counts
        assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens) == (31, num_output)
        assert parsed.usage.total_tokens == 31 + num_output
        assert parsed.usage.prompt_tokens_details is not None
        assert parsed.usage.prompt_tokens_details.cached_tokens == 0
        await live.until_idle()


@in_loop
async def test_chunks_come_in_the_official_order() -> None:
    async with live_server(say(REPLY)) as live:
        answer = await live.chat(**STREAM)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        chunks = events(answer.text)
        parsed = [strict(ChatCompletionChunk, chunk) for chunk in chunks]
        assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in parsed}) == 1
        first, *contents, last, usage = chunks
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in contents)
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in contents) == REPLY
        assert all("finish_reason" in chunk["choices"][0] for chunk in chunks[:-1])
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert last["choices"][0]["delta"] == {}
        assert usage["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        plain = (await live.chat()).json()["usage"]
        assert {**usage["usage"], "prompt_tokens_details": None} == {**plain, "prompt_tokens_details": None}


@in_loop
async def test_usage_chunks_come_only_when_asked_for() -> None:
    async with live_server(say("one two three")) as live:
        for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
            chunks = events((await live.chat(stream=True, **options)).text)
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        continuous = {"include_usage": True, "continuous_usage_stats": True}
        chunks = events((await live.chat(stream=True, stream_options=continuous)).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] == 1
        assert counts[-1] == counts[-2] == len(demo_tokenizer().encode("one two three")) + 1
        assert (await live.chat(stream_options={"include_usage": True})).status_code == 200  # without a stream


@in_loop
async def test_a_prefix_hit_changes_only_the_cached_count() -> None:
    async with live_server(say("yes")) as live:
        cold, warm = [(await live.chat("word " * 40)).json()["usage"] for _ in range(2)]
        prompt = cold["prompt_tokens"]
        assert warm["prompt_tokens"] == prompt
        assert cold["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // 16 * 16
        streamed = events((await live.chat("word " * 40, **STREAM)).text)[-1]["usage"]
        assert streamed == warm


@in_loop
async def test_several_choices_each_have_their_role_and_end() -> None:
    async with live_server(say(REPLY)) as live:
        chunks = events((await live.chat(n=3, **STREAM)).text)
        for choice in range(3):
            own = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice]
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            assert [one["finish_reason"] for one in own if one["finish_reason"]] == ["stop"]
            assert own[-1]["finish_reason"] == "stop"
            assert joined(chunks, choice) == REPLY
        num_output = len(demo_tokenizer().encode(REPLY)) + 1
        assert chunks[-1]["usage"]["prompt_tokens"] == 31
        assert chunks[-1]["usage"]["completion_tokens"] == 3 * num_output
        answer = strict(ChatCompletion, (await live.chat(n=3)).json())
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.content for choice in answer.choices} == {REPLY}
        assert answer.usage.completion_tokens == 3 * num_output


@in_loop
async def test_choices_are_sampled_with_seeds_of_their_own() -> None:
    words = [float(token % 7) for token in range(400)] + [-1e9] * (49152 - 400)

    def script(tokens: Any, position: int) -> Any:
        return words

    async with live_server(script) as live:
        many = (await live.chat(n=3, seed=11, max_tokens=8)).json()["choices"]
        alone = [(await live.chat(seed=11 + i, max_tokens=8)).json()["choices"][0] for i in range(3)]
        assert [one["message"] for one in many] == [one["message"] for one in alone]
        assert len({one["message"]["content"] for one in many}) == 3


@in_loop
async def test_stop_strings_stream_as_they_answer() -> None:
    async with live_server(say(REPLY)) as live:
        for stop, end in ((None, None), ([], None), ("kůň", "kůň"), (["nothing", " 😀"], " 😀"), ("Hello", "Hello")):
            plain = (await live.chat(stop=stop)).json()
            chunks = events((await live.chat(stop=stop, **STREAM)).text)
            expected = REPLY.split(end)[0] if end else REPLY
            assert plain["choices"][0]["message"]["content"] == joined(chunks) == expected
            assert plain["choices"][0]["finish_reason"] == "stop"
            assert chunks[-1]["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]


@in_loop
async def test_length_and_visible_stops() -> None:
    async with live_server(say(REPLY)) as live:
        cut = (await live.chat(max_tokens=2)).json()
        assert cut["choices"][0]["finish_reason"] == "length"
        assert cut["usage"]["completion_tokens"] == 2
        shown = (await live.chat(stop="kůň", include_stop_str_in_output=True)).json()["choices"][0]
        assert shown["message"]["content"] == REPLY.split("kůň")[0] + "kůň"
        ids = demo_tokenizer().encode(REPLY)
        by_id = (await live.chat(stop_token_ids=[ids[5]])).json()["choices"][0]
        assert by_id["finish_reason"] == "stop"
        assert by_id["message"]["content"] == demo_tokenizer().decode(ids[: ids.index(ids[5])])
        endless = (await live.chat(ignore_eos=True, max_tokens=60, skip_special_tokens=False)).json()
        assert endless["usage"]["completion_tokens"] == 60
        assert endless["choices"][0]["message"]["content"].count("<|im_end|>") > 1


@in_loop
async def test_a_character_that_is_cut_short_is_flushed_once_and_all_its_tokens_count() -> None:
    async with live_server(say([49, 10813, 242, 300])) as live:
        plain = (await live.chat(max_tokens=3)).json()
        chunks = events((await live.chat(max_tokens=3, **STREAM)).text)
        assert plain["choices"][0]["message"]["content"] == joined(chunks) == "A\ufffd"
        assert plain["choices"][0]["finish_reason"] == chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert plain["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("fields", [{}, {"stop_token_ids": [2]}, {"stop_token_ids": [2, 5], "stop": "zzz"}])
@in_loop
async def test_the_token_that_ends_an_answer_is_not_seen(fields: dict[str, Any]) -> None:
    async with live_server(say(REPLY)) as live:
        assert (await live.chat(**fields)).json()["choices"][0]["message"]["content"] == REPLY
        assert joined(events((await live.chat(**fields, **STREAM)).text)) == REPLY


@in_loop
async def test_a_stop_string_ends_the_answer_though_tokens_behind_it_are_on_their_way() -> None:
    text = "one, two, three, four"
    async with live_server(say(text), step_time_s=0.01) as live:
        for stop, shown in (("two", "one, "), ("wo, th", "one, t"), (["three", "e, f"], "one, two, ")):
            plain = (await live.chat("two, three", stop=stop)).json()  # the prompt does not count
            chunks = events((await live.chat("two, three", stop=stop, **STREAM)).text)
            assert plain["choices"][0]["message"]["content"] == joined(chunks) == shown
            assert plain["choices"][0]["finish_reason"] == "stop"
            assert plain["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"]
        await live.until_idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@in_loop
async def test_what_ended_an_answer_is_told_with_its_end(path: str) -> None:
    ids = demo_tokenizer().encode(REPLY)
    prompt = {"prompt": [5, 9531, 198]} if path == "/v1/completions" else {"messages": [TURN]}
    async with live_server(say(REPLY)) as live:
        for fields, stop_reason in (
            ({"stop": ["zzz", "kůň"]}, "kůň"),
            ({"stop_token_ids": [ids[3]]}, ids[3]),
            ({"max_tokens": 2}, None),
            ({"max_tokens": 200}, None),  # the model's own end
        ):
            (plain,) = (await live.post(path, **prompt, **fields)).json()["choices"]
            assert plain["stop_reason"] == stop_reason
            *others, last = [
                one["choices"][0] for one in events((await live.post(path, stream=True, **prompt, **fields)).text)
            ]
            assert (last["stop_reason"], last["finish_reason"]) == (stop_reason, plain["finish_reason"])
            assert not [one for one in others if "stop_reason" in one]


TURN = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@in_loop
async def test_contents_in_every_form_make_the_same_prompt() -> None:
    parts = [{"type": "text", "text": "You are "}, {"type": "text", "text": "kind."}]
    async with live_server() as live:

        async def ask(messages: Any) -> tuple[int, str]:
            answer = await live.post("/v1/chat/completions", messages=messages, max_tokens=4, temperature=0)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["prompt_tokens"], answer.json()["choices"][0]["message"]["content"]

        for role in ("system", "user", "assistant"):
            plain = await ask([{"role": role, "content": "You are kind."}, TURN])
            assert await ask([{"role": role, "content": parts}, TURN]) == plain
        system = await ask([{"role": "system", "content": "x"}, TURN])
        assert await ask([{"role": "developer", "content": "x"}, TURN]) == system
        tool = {"role": "tool", "tool_call_id": "c", "content": "ok"}
        called = await ask([TURN, {"role": "assistant", "content": None, "tool_calls": [CALL]}, tool])
        assert await ask([TURN, {"role": "assistant", "tool_calls": [CALL]}, tool]) == called
        assert (await ask([{"role": "assistant", "content": "hi"}]))[0] > 0


@in_loop
async def test_a_last_assistant_turn_can_be_continued() -> None:
    turns = [TURN, {"role": "assistant", "content": "The answer is"}]
    async with live_server() as live:
        fields = {"messages": turns, "max_tokens": 1, "continue_final_message": True, "add_generation_prompt": False}
        answer = (await live.post("/v1/chat/completions", **fields)).json()
        expected = demo_tokenizer().encode_chat(turns, continue_final_message=True)
        assert answer["usage"]["prompt_tokens"] == len(expected)
        assert len(expected) < len(demo_tokenizer().encode_chat(turns))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@in_loop
async def test_template_variables_reach_the_template(path: str) -> None:
    async with live_server() as live:
        body = {"messages": [TURN], **({"max_tokens": 1} if path.startswith("/v1") else {})}

        async def count(**fields: Any) -> int:
            answer = (await live.post(path, **body, **fields)).json()
            return answer["usage"]["prompt_tokens"] if path.startswith("/v1") else answer["count"]

        assert await count(chat_template_kwargs={"enable_thinking": False}) == await count()
        for wrong in ({"messages": []}, {"add_generation_prompt": False}, "x", {"long": "x" * 70_000}):
            refused = await live.post(path, **body, chat_template_kwargs=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template_kwargs")


WRONG_MESSAGES: list[tuple[Any, str]] = [
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0]"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "wizard", "content": "a"}], "messages[0].role"),
    ([TURN, {"content": "a"}], "messages[1].role"),
    ([], "messages"),
    (["hi"], "messages"),
    ([{"role": "user", "content": "word " * 9000}], "messages"),
]


@in_loop
async def test_messages_that_cannot_be_used_are_refused_before_the_200() -> None:
    async with live_server() as live:
        for (messages, param), stream in itertools.product(WRONG_MESSAGES, (False, True)):
            answer = await live.post("/v1/chat/completions", messages=messages, stream=stream)
            assert answer.status_code == 400
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()["error"]["param"] == param
            assert answer.json()["error"]["type"] == "invalid_request_error"
        await live.check_alive()


@in_loop
async def test_every_known_error_comes_before_the_200() -> None:
    async with live_server() as live:
        wrong = [
            ({"model": "gpt-4"}, 404, "model_not_found"),
            ({"temperature": "hot"}, 400, None),
            ({"functions": [{"name": "f"}]}, 400, "unsupported_parameter"),
            ({"stop_token_ids": [10**6]}, 400, None),
        ]
        for fields, status, code in wrong:
            for stream in (False, True):
                answer = await live.chat(stream=stream, **fields)
                assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert live.engine.metrics.num_steps == 0


@in_loop
async def test_one_failed_row_ends_one_stream_with_an_error_and_done() -> None:
    good = say(REPLY)

    def failing(tokens: Any, position: int) -> Any:
        if tokens[0] == 17:
            if position >= 6:
                raise RowFailure("this row cannot be sampled")
            return 300
        return good(tokens, position)

    async with live_server(failing) as live:
        streams = [live.complete([17, 9531, 198], max_tokens=50, stream=True), live.chat(**STREAM)]
        broken, whole = await asyncio.gather(*streams)
        chunks = events(broken.text)
        assert "error" in chunks[-1]
        assert chunks[-1]["error"]["message"]
        assert not [chunk for chunk in chunks[:-1] if chunk["choices"][0]["finish_reason"]]
        assert joined(events(whole.text)) == REPLY
        alone = await live.complete([17, 9531, 198], max_tokens=50)
        assert alone.status_code == 500
        assert alone.json()["error"]["type"] == "server_error"
        await live.until_idle()
        await live.check_alive()


@in_loop
async def test_500_streams_of_mixed_lengths_all_end_with_done() -> None:
    async with live_server() as live:
        fields = {"ignore_eos": True, **STREAM}
        asked = [fetch(live, "/v1/completions", prompt=[5 + i], max_tokens=i % 23 + 1, **fields) for i in range(500)]
        for i, text in enumerate(await asyncio.gather(*asked)):
            assert events(text)[-1]["usage"]["completion_tokens"] == i % 23 + 1
        await live.until_idle()
        assert live.engine.stats().num_aborts == 0


@in_loop
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_client_of_http_1_0_gets_no_chunks(path: str) -> None:
    """A server must not send Transfer-Encoding unless the request indicates HTTP/1.1 (RFC 9112, 6.1)."""
    async with live_server(say("one two three"), step_time_s=0.002) as live:
        messages = [{"role": "user", "content": "hi"}]
        asked: dict[str, Any] = {"input": messages} if path == "/v1/responses" else {"messages": messages}
        for is_streamed in (True, False):
            body = json.dumps({"stream": is_streamed, **asked}).encode()
            reader, writer = await asyncio.open_connection(*live.address)
            writer.write(b"POST %b HTTP/1.0\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(body), body))
            head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            assert b"transfer-encoding" not in head.lower()
            assert (b"content-length" in head.lower()) is not is_streamed
            if not is_streamed:
                assert "one two three" in str(orjson.loads(answer))
            elif path == "/v1/responses":
                assert read_sse(answer.decode())[-1]["type"] == "response.completed"
            else:
                assert joined(events(answer.decode())) == "one two three"


@in_loop
async def test_an_offer_of_http_2_is_ignored() -> None:
    async with live_server(say("ok")) as live:
        body = b'{"prompt":[5,9531,198]}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
            b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        reader, writer = await asyncio.open_connection(*live.address)
        for _ in range(2):
            writer.write(head + body)
            assert b" 200 " in await reader.readline()
            answer_head = await reader.readuntil(b"\r\n\r\n")
            size = int(answer_head.lower().partition(b"content-length: ")[2].split()[0])
            assert b'"text":"ok"' in await reader.readexactly(size)
        writer.close()
        await live.until_idle()
