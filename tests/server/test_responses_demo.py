"""The WebSocket with the demo model's own tokenizer and chat template (its facts are those of the GGUF file)."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from doubles_socket import Live, in_loop, live_server, respond, scripted_engine, text_of

from aserve.model_files import ModelFiles
from aserve.scheduler.limits import Limits
from aserve.tokenizer.load import load_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

LIMITS = Limits(
    vocab_size=49152, max_model_len=8192, max_num_seqs=8, max_num_batched_tokens=1024, num_pages=4096, page_size=16
)
GRINNING_FACE = (10813, 242, 218)  # bytes f0 9f / 98 / 80
IM_END = 2


@pytest.fixture(scope="module")
def tokenizer(demo_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(demo_files)


def smile(tokens: list[int], position: int) -> int:
    """Answer with one emoji of three tokens."""
    for spoken in (3, 2, 1):
        if tuple(tokens[position - spoken : position]) == GRINNING_FACE[:spoken]:
            return (*GRINNING_FACE, IM_END)[spoken]
    return GRINNING_FACE[0]


@asynccontextmanager
async def demo_server(tokenizer: Tokenizer) -> AsyncIterator[Live]:
    async with scripted_engine(smile, limits=LIMITS, tokenizer=tokenizer) as engine, live_server(engine) as live:
        yield live


@in_loop
async def test_hi_has_31_prompt_tokens_here_and_on_chat(tokenizer: Tokenizer) -> None:
    async with demo_server(tokenizer) as live:
        async with live.connect() as socket:
            events = await respond(socket, input="hi")
            assert events[-1]["response"]["usage"]["input_tokens"] == 31
            items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
            assert (await respond(socket, input=items))[-1]["response"]["usage"]["input_tokens"] == 31
        async with httpx.AsyncClient(base_url=live.http_url) as client:
            body = {"messages": [{"role": "user", "content": "hi"}]}
            reply = (await client.post("/v1/chat/completions", json=body)).json()
        assert reply["usage"]["prompt_tokens"] == 31


@in_loop
async def test_a_character_of_three_tokens_is_one_delta_with_three_logprobs(tokenizer: Tokenizer) -> None:
    async with demo_server(tokenizer) as live, live.connect() as socket:
        events = await respond(socket, input="hi", include=["message.output_text.logprobs"])
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert text_of(events) == "\N{GRINNING FACE}"
    entries = [entry["bytes"] for event in deltas for entry in event["logprobs"]]
    assert entries == [[0xF0, 0x9F], [0x98], [0x80], []]  # and the token that ended it
    assert events[-1]["response"]["usage"]["output_tokens"] == 4


@in_loop
async def test_the_next_turn_finds_the_last_one_in_the_prefix_cache(tokenizer: Tokenizer) -> None:
    async with demo_server(tokenizer) as live, live.connect() as socket:
        first = await respond(socket, input="hi")
        second = await respond(socket, input="hi", previous_response_id=first[-1]["response"]["id"])
    before, after = (events[-1]["response"]["usage"] for events in (first, second))
    known = before["total_tokens"] - 1  # the last token's KV was never needed
    cached = after["input_tokens_details"]["cached_tokens"]
    assert cached == known // LIMITS.page_size * LIMITS.page_size
