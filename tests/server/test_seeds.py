"""A seed gives the same text by every way over the wire, whoever shares the batch; no seed gives a fresh one."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import httpx
from doubles_http import events, joined
from doubles_socket import Live, in_loop, respond, scripted_server, text_of

SAMPLED = {"temperature": 0.8, "max_tokens": 32}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = {"prompt": "hi\n"}  # what the double's chat template makes of it


def spread(tokens: Sequence[int], position: int) -> list[float]:
    """Weigh the letters by the last token, so that one other draw changes all that follow."""
    return [float((tokens[position - 1] * 7 + token) % 5) if 97 <= token < 123 else -math.inf for token in range(256)]


async def post(http: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    answer = await http.post(path, json={**SAMPLED, **fields})
    assert answer.status_code == 200, answer.text
    return answer


async def ask_every_way(live: Live, http: httpx.AsyncClient, seed: int) -> set[str]:
    """Return the different texts of a chat, a completion, their streams and a WebSocket."""
    chat, completion, *streams = await asyncio.gather(
        post(http, "/v1/chat/completions", **CHAT, seed=seed),
        post(http, "/v1/completions", **PROMPT, seed=seed),
        post(http, "/v1/chat/completions", **CHAT, seed=seed, stream=True),
        post(http, "/v1/completions", **PROMPT, seed=seed, stream=True),
    )
    async with live.connect() as socket:
        spoken = await respond(socket, input="hi", seed=seed, temperature=0.8, max_output_tokens=32)
    texts = [chat.json()["choices"][0]["message"]["content"], completion.json()["choices"][0]["text"], text_of(spoken)]
    return {*texts, *(joined(events(stream.text)) for stream in streams)}


@in_loop
async def test_the_same_seed_gives_the_same_text_by_every_way() -> None:
    async with (
        scripted_server(spread, step_time_s=0.001) as live,
        httpx.AsyncClient(base_url=live.http_url, timeout=30) as http,
    ):
        alone = await ask_every_way(live, http, 42)
        assert len(alone) == 1
        assert len(alone.pop()) == 32
        neighbours = [asyncio.create_task(post(http, "/v1/completions", **PROMPT, n=7)) for _ in range(2)]
        seen = await asyncio.gather(*(ask_every_way(live, http, seed) for seed in (42, 42, 43, 0, -1, 2**63 - 1)))
        assert seen[0] == seen[1] == await ask_every_way(live, http, 42)
        assert [len(texts) for texts in seen] == [1] * 6
        assert len(set.union(*seen)) == 5
        await asyncio.gather(*neighbours)


@in_loop
async def test_without_a_seed_each_answer_is_another() -> None:
    async with (
        scripted_server(spread) as live,
        httpx.AsyncClient(base_url=live.http_url, timeout=30) as http,
    ):
        answers = [(await post(http, "/v1/completions", **PROMPT, n=3)).json() for _ in range(3)]
        assert len({choice["text"] for answer in answers for choice in answer["choices"]}) == 9
