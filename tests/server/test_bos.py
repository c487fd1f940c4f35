"""One BOS, on every way into the server, and the same token ids for the same conversation (B42)."""

import json
from collections.abc import Sequence
from pathlib import Path

from doubles_http import Live, in_loop, live_server
from doubles_tokenizer import make_tokenizer_with_bos
from websockets.asyncio.client import connect

WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
BOS, EOS = 1, 2


class Recorder:
    """A script that ends at once and remembers the prompts that it saw."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def __call__(self, tokens: Sequence[int], position: int) -> int:
        if tokens[position - 1] != EOS:  # else the step that is already on its way when the end becomes known
            self.prompts.append(list(tokens[:position]))
        return EOS


async def converse(live: Live, messages: list[dict[str, str]]) -> None:
    """Say the same over every endpoint."""
    assert (await live.post("/v1/chat/completions", messages=messages)).status_code == 200
    assert (await live.post("/v1/messages", messages=messages, max_tokens=5)).status_code == 200
    assert (await live.post("/v1/responses", input=messages)).status_code == 200
    async with connect(live.url.replace("http", "ws") + "/v1/responses", proxy=None) as socket:
        await socket.send(json.dumps({"type": "response.create", "input": messages}))
        while json.loads(await socket.recv())["type"] != "response.completed":
            pass


@in_loop
async def test_every_endpoint_gives_the_model_the_same_ids(tmp_path: Path) -> None:
    tokenizer = make_tokenizer_with_bos(tmp_path, WITH_BOS)
    messages = [{"role": "user", "content": "the <s>quick"}, {"role": "assistant", "content": "fox"}]
    messages.append({"role": "user", "content": "jumps"})
    seen = Recorder()
    async with live_server(seen, tokenizer=tokenizer) as live:
        await converse(live, messages)
        text = "[user]the <s>quick</s> [assistant]fox</s> [user]jumps</s> [assistant]"  # spaces are the vocabulary's
        assert [prompt.count(BOS) for prompt in seen.prompts] == [1] * 4
        assert all(prompt == seen.prompts[0] for prompt in seen.prompts)
        assert tokenizer.decode(seen.prompts[0][1:], skip_special_tokens=False).strip() == text
        assert seen.prompts[0][0] == BOS
        counted = (await live.post("/tokenize", messages=messages)).json()["tokens"]
        assert counted == seen.prompts[0]
        seen.prompts.clear()
        await live.complete("the quick")
        assert seen.prompts[0].count(BOS) == 1
        assert seen.prompts[0][0] == BOS


@in_loop
async def test_without_a_template_prompts_are_served_and_chats_refused(tmp_path: Path) -> None:
    async with live_server(Recorder(), tokenizer=make_tokenizer_with_bos(tmp_path, None)) as live:
        assert (await live.complete("the quick")).status_code == 200
        turn = [{"role": "user", "content": "hi"}]
        for path, fields, param in (
            ("/v1/chat/completions", {"messages": turn}, "messages"),
            ("/v1/responses", {"input": "hi"}, "input"),
            ("/v1/messages", {"messages": turn, "max_tokens": 5}, None),
            ("/tokenize", {"messages": turn}, "messages"),
        ):
            answer = await live.post(path, **fields)
            assert answer.status_code == 400, answer.text
            assert "no chat template" in answer.json()["error"]["message"]
            assert answer.json()["error"].get("param") == param
