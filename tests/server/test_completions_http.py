"""/v1/completions over real sockets: batches, echo, scoring, prompts at the edges."""

import itertools
from typing import Any

from doubles_http import CUE, Live, demo_tokenizer, events, in_loop, joined, live_server, say
from openai.types import Completion

PROMPT = [5, *CUE]
REPLY = "once upon a time"


@in_loop
async def test_one_answer_has_the_official_shape() -> None:
    async with live_server(say(REPLY)) as live:
        parsed = Completion.model_validate((await live.complete(PROMPT)).json(), strict=True)
        assert parsed.id.startswith("cmpl-")
        assert (parsed.object, parsed.choices[0].text, parsed.choices[0].finish_reason) == (
            "text_completion",
            REPLY,
            "stop",
        )
        assert parsed.usage is not None
        assert parsed.usage.prompt_tokens == 3
        assert parsed.usage.completion_tokens == len(demo_tokenizer().encode(REPLY)) + 1


@in_loop
async def test_a_stream_says_what_one_answer_says() -> None:
    async with live_server(say(REPLY)) as live:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events((await live.complete(PROMPT, **options)).text)
        assert joined(chunks) == REPLY
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
        assert reasons == [None] * (len(reasons) - 1) + ["stop"]
        assert all(chunk["object"] == "text_completion" for chunk in chunks)
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == (await live.complete(PROMPT)).json()["usage"]


@in_loop
async def test_the_default_is_sixteen_tokens_also_for_null() -> None:
    async with live_server() as live:
        for fields in ({}, {"max_tokens": None}):
            answer = (await live.complete(PROMPT, **fields)).json()
            assert answer["usage"]["completion_tokens"] == 16
            assert answer["choices"][0]["finish_reason"] == "length"


@in_loop
async def test_choices_are_ordered_by_prompt_then_by_n() -> None:
    options = {"max_tokens": 3, "temperature": 0}
    async with live_server() as live:
        for prompts in (["a", "b c"], [[5, 6], [7]], ["a", [7]]):
            await check_order(live, prompts, options)


async def check_order(live: Live, prompts: Any, options: dict[str, Any]) -> None:
    answer = (await live.complete(prompts, n=2, **options)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = [(await live.complete(prompt, **options)).json() for prompt in prompts]
    texts = [one["choices"][0]["text"] for one in alone for _ in range(2)]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert answer["usage"]["completion_tokens"] == 12
    chunks = events((await live.complete(prompts, n=2, stream=True, **options)).text)
    assert [joined(chunks, choice) for choice in range(4)] == texts


@in_loop
async def test_echo_repeats_the_prompt_once() -> None:
    async with live_server(say(REPLY)) as live:
        text = "Žluťoučký\n 😀assistant\n"
        for prompt in (text, demo_tokenizer().encode(text)):
            assert (await live.complete(prompt, echo=True)).json()["choices"][0]["text"] == text + REPLY
            assert joined(events((await live.complete(prompt, echo=True, stream=True)).text)) == text + REPLY


@in_loop
async def test_scoring_a_prompt_generates_nothing() -> None:
    async with live_server() as live:
        text = "The quick brown fox"
        ids = demo_tokenizer().encode(text)
        options = {"max_tokens": 0, "echo": True, "logprobs": 2}
        answer = (await live.complete(text, **options)).json()
        choice = answer["choices"][0]
        assert choice["text"] == text
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == [demo_tokenizer().decode([one], False) for one in ids]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == [0.0] * (len(ids) - 1)  # the scripted device is certain of a prompt
        starts = [len(demo_tokenizer().decode(ids[:i])) for i in range(len(ids))]
        assert logprobs["text_offset"] == starts
        chunks = events((await live.complete(text, stream=True, **options)).text)
        assert joined(chunks) == text
        assert [chunk["choices"][0]["logprobs"] for chunk in chunks] == [logprobs, None]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
        silent = (await live.complete(text, max_tokens=0)).json()
        assert (silent["choices"][0]["text"], silent["choices"][0]["finish_reason"]) == ("", "length")


UNUSABLE: list[Any] = [
        [49152], [-1], [2**63], [2**64], [1.5], [True], [], "", "\u0004", [[1, 2], []], ["a", ""], [None], {}, 5,
        [5] * 8192, [5] * 8193, "a " * 20000, [5] * 400_000,
]  # fmt: skip


@in_loop
async def test_prompts_that_cannot_be_used_are_refused() -> None:
    async with live_server() as live:
        for prompt, stream, limit in itertools.product(UNUSABLE, (False, True), (1, None)):
            answer = await live.complete(prompt, stream=stream, max_tokens=limit)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "prompt"
        await live.check_alive()


@in_loop
async def test_the_longest_prompt_that_fits() -> None:
    async with live_server() as live:
        answer = (await live.complete([5] * 8191, max_tokens=None)).json()
        assert answer["usage"]["prompt_tokens"] == 8191
        assert answer["usage"]["completion_tokens"] == 1
        assert (await live.complete([[1, 2], [3]], max_tokens=1)).json()["choices"][1]["index"] == 1
