"""Log probabilities: bytes are the tokens' own, entries match the tokens one to one, streamed or not."""

import itertools
import json
import math
import threading
from typing import Any

import pytest
from doubles_engine import until
from doubles_http import (
    CUE,
    GRIN,
    VOCAB,
    Live,
    count_up,
    demo_tokenizer,
    events,
    in_loop,
    joined,
    live_server,
    raw_post,
    say,
)
from openai.types.chat import ChatCompletion

from aserve.server.logprobs import CompletionLogprobs
from aserve.tokenizer.tokenizer import Tokenizer

TEXT = "Say 😀 kůň"
IDS = demo_tokenizer().encode(TEXT)


def logits(tokens: Any, position: int) -> list[float]:
    """Prefer the reply, with alternatives; all other tokens are masked out."""
    start = next(end for end in range(position, 1, -1) if (tokens[end - 2], tokens[end - 1]) == CUE)
    spoken = position - start
    row = [-math.inf] * VOCAB
    row[IDS[spoken] if spoken < len(IDS) else 2] = 5.0
    row[300], row[301] = 4.0, 3.0
    return row


def strict_json(text: str) -> Any:
    """Parse JSON as the standard has it, without NaN and Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(name))


def stream_entries(text: str) -> list[Any]:
    chunks = events(text)
    shown = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"]]
    return [entry for one in shown if one for entry in one["content"]]


@in_loop
async def test_bytes_of_a_split_character_are_the_tokens_own() -> None:
    async with live_server(say(GRIN)) as live:
        answer = (await live.chat(logprobs=True)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["bytes"] for entry in content] == [[240, 159], [152], [128], None]  # the last is EOS
        assert [entry["token"] for entry in content] == ["\\xf0\\x9f", "\\x98", "\\x80", "<|im_end|>"]
        assert answer["choices"][0]["message"]["content"] == "😀"
        ChatCompletion.model_validate(answer, strict=True)
        assert stream_entries((await live.chat(logprobs=True, stream=True)).text) == content
        shown = (await live.chat(logprobs=True, skip_special_tokens=False, include_stop_str_in_output=True)).json()
        assert shown["choices"][0]["logprobs"]["content"][-1]["bytes"] == list(b"<|im_end|>")


@in_loop
async def test_stream_and_answer_agree_entry_by_entry() -> None:
    async with live_server(logits) as live:
        for top, stop in itertools.product((None, 0, 5, 20), (None, "a stop that never matches")):
            await check_entries(live, top, stop)


async def check_entries(live: Live, top: int | None, stop: str | None) -> None:
    fields = {"logprobs": True, "top_logprobs": top, "stop": stop, "temperature": 0}
    text = (await live.chat(**fields)).text
    answer = strict_json(text)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"] == len(IDS) + 1
    streamed = (await live.chat(stream=True, **fields)).text
    assert stream_entries(streamed) == content
    assert joined(events(streamed)) == TEXT == answer["choices"][0]["message"]["content"]
    assert b"".join(bytes(entry["bytes"] or ()) for entry in content).decode() == TEXT
    for entry in content:
        assert len(entry["top_logprobs"]) == (top or 0)
        assert entry["top_logprobs"] == sorted(entry["top_logprobs"], key=lambda one: -one["logprob"])
        assert all(-9999 <= one["logprob"] <= 0 for one in [entry, *entry["top_logprobs"]])
        expected = 5 - math.log(math.exp(5) + math.exp(4) + math.exp(3))
        assert entry["logprob"] == pytest.approx(expected, abs=1e-9)


@in_loop
async def test_a_stop_string_ends_the_entries_where_the_tokens_end() -> None:
    async with live_server(logits) as live:
        answer = (await live.chat(logprobs=True, stop=" kůň", temperature=0)).json()
        content = answer["choices"][0]["logprobs"]["content"]
        assert answer["choices"][0]["message"]["content"] == "Say 😀"
        assert len(content) == answer["usage"]["completion_tokens"]
        assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT


@in_loop
async def test_the_legacy_shape() -> None:
    async with live_server(logits) as live:
        fields = {"logprobs": 3, "temperature": 0, "prompt": [5, *CUE]}
        answer = strict_json((await live.post("/v1/completions", **fields)).text)
        logprobs = answer["choices"][0]["logprobs"]
        raw = [demo_tokenizer().token_bytes(one) for one in [*IDS, 2]]
        split = ["bytes:" + "".join(f"\\x{byte:02x}" for byte in one) for one in raw]
        whole = [demo_tokenizer().decode([one], skip_special_tokens=False) for one in [*IDS, 2]]
        assert logprobs["tokens"] == [a if "\ufffd" in b else b for a, b in zip(split, whole, strict=True)]
        count = answer["usage"]["completion_tokens"]
        assert {len(values) for values in logprobs.values()} == {count}
        assert logprobs["text_offset"] == [len(demo_tokenizer().decode(IDS[:i]).rstrip("\ufffd")) for i in range(count)]
        for name, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top[name] == logprob == max(top.values())
        chunks = events((await live.post("/v1/completions", stream=True, **fields)).text)
        parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
        assert {name: [one for part in parts for one in part[name]] for name in logprobs} == logprobs


@in_loop
async def test_the_legacy_shape_counts_offsets_from_an_echoed_prompt() -> None:
    async with live_server(logits) as live:
        answer = (await live.complete("assistant\n", logprobs=0, echo=True, temperature=0)).json()
        logprobs = answer["choices"][0]["logprobs"]
        text = answer["choices"][0]["text"]
        assert text == "assistant\n" + TEXT
        assert logprobs["token_logprobs"][0] is None
        for start, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            if not name.startswith("bytes:") and name != "<|im_end|>":
                assert text[start:].startswith(name)


@in_loop
async def test_what_grows_with_the_prompt_is_done_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[threading.Thread]] = {"decode": set(), "prompt": set()}
    for owner, name in ((Tokenizer, "decode"), (CompletionLogprobs, "prompt")):
        original = getattr(owner, name)

        def record(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            threads[name].add(threading.current_thread())
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, record)
    async with live_server(count_up) as live:
        for stream, usage in itertools.product((False, True), (False, True)):
            fields: dict[str, Any] = {"echo": True, "logprobs": 20, "max_tokens": 5, "n": 2, "stream": stream}
            if stream and usage:
                fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            answer = await live.complete([[5] * 3000, [6] * 2000], **fields)
            assert answer.status_code == 200, answer.text
    for seen in threads.values():
        assert seen
        assert threading.current_thread() not in seen


@in_loop
async def test_a_stream_says_of_its_prompt_what_one_answer_says() -> None:
    async with live_server(count_up) as live:
        prompts = [[*range(300, 700), *CUE], [8, *CUE], [9]]
        fields: dict[str, Any] = {"echo": True, "logprobs": 3, "max_tokens": 4, "n": 2}
        answer = strict_json((await live.complete(prompts, **fields)).text)
        chunks = events((await live.complete(prompts, stream=True, **fields)).text)
        for choice in answer["choices"]:
            parts = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
            assert "".join(part["text"] for part in parts) == choice["text"]
            shown = [part["logprobs"] for part in parts if part["logprobs"]]
            assert {name: [one for part in shown for one in part[name]] for name in shown[0]} == choice["logprobs"]


@in_loop
async def test_a_client_that_leaves_while_its_prompt_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    original = CompletionLogprobs.prompt

    def wait(*args: Any) -> Any:
        may_go_on.wait(10)
        return original(*args)

    monkeypatch.setattr(CompletionLogprobs, "prompt", wait)
    async with live_server(count_up) as live:
        body = {"prompt": [5, *CUE], "echo": True, "logprobs": 1, "stream": True, "max_tokens": 8000}
        async with raw_post(live, "/v1/completions", body) as (reader, _):
            await reader.readuntil(b"\r\n\r\n")
            await until(lambda: live.engine.metrics.num_generation_tokens > 10)
        await live.until_idle()
        may_go_on.set()
        await live.check_alive()


@in_loop
async def test_a_prompt_that_cannot_be_rendered_ends_in_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise ValueError("private")

    monkeypatch.setattr(CompletionLogprobs, "prompt", fail)
    async with live_server(count_up) as live:
        text = (await live.complete(echo=True, logprobs=1, stream=True, max_tokens=50)).text
        assert [set(event) for event in events(text)] == [{"error"}]
        assert "private" not in text
        await live.until_idle(10)
