"""Malformed bodies and frames from a seed, and what is right for each, judged by the standard library's JSON."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Brno"}'}}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["x", "y"], "stop_token_ids": [5],
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"5": 1.5},
    "min_tokens": 0, "ignore_eos": False, "priority": 1, "user": "me", "metadata": {"a": "b"}, "model": "scripted",
}  # fmt: skip
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ],
    "max_completion_tokens": 4, "logprobs": True, "top_logprobs": 2, "n": 2, "chat_template_kwargs": {"a": 1},
    "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}], "tool_choice": "auto",
    "response_format": {"type": "text"}, "stream": False, "stream_options": {"include_usage": True},
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    ],
    "instructions": "Be kind.", "max_output_tokens": 4, "include": ["message.output_text.logprobs"], "top_logprobs": 1,
    "text": {"format": {"type": "text"}, "verbosity": "low"}, "store": False, "truncation": "disabled", "tools": [],
    "reasoning": {"effort": "low"}, "parallel_tool_calls": True, "tool_choice": "auto", "previous_response_id": None,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**SAMPLING, **CHAT},
    "/v1/completions": {**SAMPLING, "prompt": ["a", [5, 6]], "max_tokens": 4, "echo": True, "logprobs": 1, "n": 1},
    "/v1/responses": {**SAMPLING, **RESPONSE},
    "/v1/messages": {
        "model": "scripted", "max_tokens": 4, "system": [{"type": "text", "text": "Be kind."}], "temperature": 0.5,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stop_sequences": ["x"],
        "metadata": {"user_id": "me"}, "stream": False,
    },
    "/tokenize": {"prompt": "hi", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6, 7], "skip_special_tokens": True},
}  # fmt: skip
FRAMES: list[dict[str, Any]] = [
    {"type": "response.create", "stream_id": "lane-1", **SAMPLING, **RESPONSE},
    {"type": "response.create", "input": "hi", "max_output_tokens": 3, "generate": True},
    {"type": "response.cancel", "response_id": "resp_1", "stream_id": "lane-2"},
    {"type": "response.steer", "previous_response_id": "resp_1", "input": "go on"},
    {"type": "response.resume", "response_id": "resp_1", "starting_after": 3},
]

SCALARS: list[Any] = [
    None, True, False, 0, -1, 1.5, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, -(2**70), 1e308, "", "0", "\0", "😀" * 9,
    "a" * 300, [], {}, [None], [[]], [[[1]]], {"a": None}, {"type": "text"}, ["a", 1, None], [True], "null",
    {"type": "json_schema"}, "../../etc/passwd", "\u2028", {"": ""}, [1e-320], [-0.0],
]  # fmt: skip
DEPTHS = (5, 200, 300, 700, 1100, 20_000)
LONG = (70_000, 400_000)


@dataclass(frozen=True)
class Case:
    """One body or frame; ``field`` is the member that was changed if nothing else was."""

    payload: bytes
    field: str | None = None

    @property
    def is_object(self) -> bool:
        """Whether the payload is a JSON object that every parser can represent."""
        try:
            value = json.loads(self.payload.decode(), parse_constant=_refuse)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict)


def _refuse(name: str) -> None:
    raise ValueError(name)


def cases(seed: int, originals: list[dict[str, Any]]) -> Iterator[Case]:
    """Go on for ever with malformed variants of ``originals``."""
    chance = random.Random(seed)
    while True:
        yield chance.choices(MALFORMATIONS, WEIGHTS)[0](chance, chance.choice(originals))


def _other_value(chance: random.Random, original: dict[str, Any]) -> Case:
    """Replace one value, at any depth, by one that is likely not to fit."""
    body = json.loads(json.dumps(original))
    field, holder, key = chance.choice(list(_places(body)))
    holder[key] = chance.choice(SCALARS)
    return Case(json.dumps(body, ensure_ascii=chance.random() < 0.5).encode(), field)


def _places(body: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each value's top-level field, what holds it, and its key there."""
    for field in body:
        yield field, body, field
        todo = [body[field]]
        while todo:
            holder = todo.pop()
            for key in holder if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ():
                yield field, holder, key
                todo.append(holder[key])


def _without_member(chance: random.Random, original: dict[str, Any]) -> Case:
    field = chance.choice(list(original))
    return Case(json.dumps({name: value for name, value in original.items() if name != field}).encode(), field)


def _cut(chance: random.Random, original: dict[str, Any]) -> Case:
    payload = json.dumps(original).encode()
    return Case(payload[: chance.randrange(len(payload))])


def _other_bytes(chance: random.Random, original: dict[str, Any]) -> Case:
    """Overwrite, drop or insert a few bytes, most of which are no UTF-8."""
    payload = bytearray(json.dumps(original, ensure_ascii=False).encode())
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(payload))
        payload[place : place + chance.randint(0, 2)] = chance.choice(
            [
                bytes([chance.randrange(256)]),
                b'"',
                b"{",
                b"]",
                b"\\",
                b"\\ud800",
                b"\xed\xa0\x80",
                b"\xff",
                b"NaN",
                b"1e999",
            ]
        )
    return Case(bytes(payload))


def _nested(chance: random.Random, original: dict[str, Any]) -> Case:
    field = chance.choice(list(original))
    depth = chance.choice(DEPTHS)
    opening, closing = chance.choice([("[", "]"), ('{"a":', "}")])
    inner = "1" if opening != "[" else ""
    return _with_raw(original, field, opening * depth + inner + closing * depth)


def _surrogates(chance: random.Random, original: dict[str, Any]) -> Case:
    halves = "".join(f"\\u{chance.randrange(0xD800, 0xE000):04x}" for _ in range(chance.randint(1, 3)))
    return _with_raw(original, chance.choice(list(original)), f'"{halves}"')


def _long_text(chance: random.Random, original: dict[str, Any]) -> Case:
    text = chance.choice(["a", "word ", "\\n", "ř", "😀", "[{", "<|im_start|>"]) * chance.choice(LONG)
    return _with_raw(original, chance.choice(list(original)), json.dumps(text[: 2 << 20], ensure_ascii=False))


def _twice(chance: random.Random, original: dict[str, Any]) -> Case:
    field = chance.choice(list(original))
    return _with_raw(original, field, json.dumps(chance.choice(SCALARS)), keeps=True)


def _with_raw(original: dict[str, Any], field: str, raw: str, *, keeps: bool = False) -> Case:
    """Give ``field`` a value in JSON text, after its own one if that is kept: the last counts."""
    others = json.dumps({name: value for name, value in original.items() if keeps or name != field})
    return Case((others[:-1] + (", " if len(others) > 2 else "") + f"{json.dumps(field)}: {raw}}}").encode(), field)


def _noise(chance: random.Random, original: dict[str, Any]) -> Case:
    return Case(
        chance.choice([
            b"", b" ", b"null", b"[]", b'"text"', b"0", b"{}", b"\xef\xbb\xbf{}", b"{}{}", b"\0" * 40, b"{'a': 1}",
            chance.randbytes(chance.randrange(1, 400)), json.dumps(chance.choice(SCALARS)).encode(),
        ])
    )  # fmt: skip


MALFORMATIONS: list[Callable[[random.Random, dict[str, Any]], Case]] = [
    _other_value, _without_member, _cut, _other_bytes, _nested, _surrogates, _long_text, _twice, _noise,
]  # fmt: skip
WEIGHTS = [40, 5, 10, 15, 6, 6, 1, 10, 7]


def masked(first: int, payload: bytes, *, mask: bool = True, length: int | None = None) -> bytes:
    """Return a WebSocket frame as a client sends it, whose first byte is ``first``, with any claim of its length."""
    size = len(payload) if length is None else length
    marked = 0x80 if mask else 0
    if size < 126:
        head = bytes((first, marked | size))
    elif size < 65536:
        head = struct.pack("!BBH", first, marked | 126, size)
    else:
        head = struct.pack("!BBQ", first, marked | 127, size)
    key = b"\x11\x22\x33\x44"
    return head + key + bytes(byte ^ key[i % 4] for i, byte in enumerate(payload)) if mask else head + payload


TEXT, BINARY, CLOSE, PING = 0x81, 0x82, 0x88, 0x89


def broken_frames(chance: random.Random) -> tuple[bytes, int]:
    """Return bytes that break a rule of RFC 6455 or of the endpoint, and the close code for it."""
    text = json.dumps({"type": "response.create", "input": "a" * chance.randrange(200)}).encode()
    reserved = chance.choice([0x40, 0x20, 0x10])
    return chance.choice([
        (masked(TEXT | reserved, text), 1002),
        (masked(0x80 | chance.choice([3, 4, 7, 11, 15]), text), 1002),
        (masked(TEXT, text, mask=False), 1002),
        (masked(PING, b"a" * 126), 1002),
        (masked(PING & 0x7F, b"a"), 1002),
        (masked(0x80, text), 1002),  # a continuation of nothing
        (masked(TEXT & 0x7F, text[:9]) + masked(TEXT, text), 1002),
        (masked(CLOSE, b"\x03"), 1002),
        (masked(CLOSE, struct.pack("!H", chance.choice([0, 999, 1004, 1005, 1006, 1015, 2999, 5000]))), 1002),
        (masked(CLOSE, struct.pack("!H", 1000) + b"\xff"), 1007),
        (masked(TEXT, text + chance.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"])), 1007),
        (masked(TEXT & 0x7F, b'{"a":"\xf0\x9f') + masked(0x80, b'"}'), 1007),
        (masked(BINARY, chance.randbytes(chance.randrange(300))), 1003),
        (masked(TEXT, b"", length=(4 << 20) + 1 + chance.randrange(1 << 40)), 1009),
    ])  # fmt: skip
