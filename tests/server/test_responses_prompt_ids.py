"""The same conversation gives the device the same token ids over chat and over the WebSocket, BOS included."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from doubles_socket import in_loop, live_server, respond, scripted_engine, text_of

from aserve.gguf_header import read_gguf_header
from aserve.model_files import ModelFiles
from aserve.scheduler.limits import Limits
from aserve.tokenizer.gguf_vocabulary import build_gguf_tokenizer
from aserve.tokenizer.load import load_tokenizer
from aserve.tokenizer.tokenizer import Tokenizer

LIMITS = Limits(
    vocab_size=49152, max_model_len=8192, max_num_seqs=8, max_num_batched_tokens=1024, num_pages=4096, page_size=16
)
BOS, EOS = 1, 2


class Device:
    """Answers every prompt with the same words and keeps the prompts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.prompts: list[list[int]] = []
        self.cue = tokenizer.encode("assistant\n", add_special_tokens=False)
        self.answer = [*tokenizer.encode("Hello there", add_special_tokens=False), EOS]

    def __call__(self, tokens: Sequence[int], position: int) -> int:
        known = list(tokens[:position])
        start = next(end for end in range(position, 0, -1) if known[end - len(self.cue) : end] == self.cue)
        if start == position:
            self.prompts.append(known)
        return self.answer[min(position - start, len(self.answer) - 1)]  # a step may be on its way after the end


@pytest.fixture(scope="module")
def plain(demo_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(demo_files)


@pytest.fixture(scope="module")
def with_bos(demo_files: ModelFiles) -> Tokenizer:
    """The demo's tokenizer, but adding BOS to raw text, with a template that prints BOS and takes a variable."""
    header = read_gguf_header(demo_files.path)
    template = f"{{{{ bos_token }}}}{{{{ preface }}}}{header.metadata['tokenizer.chat_template']}"
    changes = {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": True}
    return Tokenizer(*build_gguf_tokenizer(dataclasses.replace(header, metadata=header.metadata | changes)))


def item(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATIONS = {
    "hi": [item("user", "hi")],
    "system": [item("system", "Be brief."), item("user", "hi")],
    "developer": [item("developer", "Be brief."), item("user", "hi")],
    "turns": [item("user", "hi"), item("assistant", "Hello there"), item("user", " and <|im_end|>\n you? ")],
    "empty": [item("user", "")],
    "refusal": [
        item("user", "hi"), item("assistant", [{"type": "refusal", "refusal": "No."}]), item("user", "please"),
    ],
    "parts": [item("user", [{"type": "text", "text": "P\u0159\u00ed"}, {"type": "text", "text": "\U0001f600"}])],
}  # fmt: skip


async def ask_both(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], both: dict[str, Any] | None = None, **create: Any
) -> list[list[int]]:
    """Return the prompts that the device saw for one conversation: over chat, then over the WebSocket.

    Fields of ``both`` go along each way.
    """
    both = both or {}
    device = Device(tokenizer)
    async with (
        scripted_engine(device, limits=LIMITS, tokenizer=tokenizer) as engine,
        live_server(engine) as live,
        live.connect() as socket,
        httpx.AsyncClient(base_url=live.http_url) as client,
    ):
        body = json.dumps({"messages": messages, **both})
        answer = await client.post("/v1/chat/completions", content=body)
        assert answer.json()["choices"][0]["message"]["content"] == "Hello there", answer.text
        assert text_of(await respond(socket, **(create or {"input": messages}), **both)) == "Hello there"
    return device.prompts


@in_loop
@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("kind", ["plain", "with_bos"])
async def test_ids_are_the_same(name: str, kind: str, plain: Tokenizer, with_bos: Tokenizer) -> None:
    chat, socket = await ask_both({"plain": plain, "with_bos": with_bos}[kind], CONVERSATIONS[name])
    assert chat == socket
    expected = plain.encode_chat(CONVERSATIONS[name])
    assert socket == (expected if kind == "plain" else [BOS, *expected])


@in_loop
async def test_variables_of_the_request_reach_the_template(with_bos: Tokenizer) -> None:
    kwargs = {"chat_template_kwargs": {"preface": "P<|im_end|>\n"}}
    chat, socket = await ask_both(with_bos, CONVERSATIONS["hi"], kwargs)
    spelled = with_bos.encode_chat([item("user", "P<|im_end|>\n")])
    assert chat == socket != with_bos.encode_chat(CONVERSATIONS["hi"])
    assert with_bos.decode(chat, skip_special_tokens=True).startswith("P<|im_end|>\nsystem")
    assert chat.count(EOS) == spelled.count(EOS)  # what the request spells is no control token


@in_loop
async def test_instructions_are_a_system_message(with_bos: Tokenizer) -> None:
    chat, socket = await ask_both(with_bos, CONVERSATIONS["system"], instructions="Be brief.", input="hi")
    assert chat == socket


@in_loop
async def test_a_continued_response_is_the_whole_conversation(with_bos: Tokenizer) -> None:
    device = Device(with_bos)
    async with (
        scripted_engine(device, limits=LIMITS, tokenizer=with_bos) as engine,
        live_server(engine) as live,
        live.connect() as socket,
        httpx.AsyncClient(base_url=live.http_url) as client,
    ):
        first = await respond(socket, input="hi")
        await respond(socket, input="and you?", previous_response_id=first[-1]["response"]["id"])
        messages = [item("user", "hi"), item("assistant", "Hello there"), item("user", "and you?")]
        await client.post("/v1/chat/completions", json={"messages": messages})
    _, continued, chat = device.prompts
    assert continued == chat
