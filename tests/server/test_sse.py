"""SSE framing: whatever a model says, an event stays one line for every line splitter."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aserve.server.sse import DONE, KEEP_ALIVE, encode_json, encode_text, event

SPLITTERS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


@given(st.text(st.sampled_from(SPLITTERS + 'a"\\ž😀') | st.characters(codec="utf-8")))
def test_text_survives_and_holds_no_line_end(text: str) -> None:
    encoded = encode_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1
    assert not set(SPLITTERS) & set(encoded.decode())


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_an_event_is_one_line_and_a_blank_one(splitter: str) -> None:
    block = event({"a": splitter, splitter: [1.5, None]}).decode()
    assert block.startswith("data: ")
    assert block.endswith("\n\n")
    assert len(block.removesuffix("\n\n").splitlines()) == 1
    assert json.loads(block.removeprefix("data: ")) == {"a": splitter, splitter: [1.5, None]}


def test_not_a_number_becomes_null() -> None:
    assert encode_json({"a": float("nan")}) == b'{"a":null}'


def test_the_end_and_the_comment_are_as_clients_expect_them() -> None:
    assert DONE == b"data: [DONE]\n\n"
    assert KEEP_ALIVE.startswith(b":")
    assert KEEP_ALIVE.endswith(b"\n\n")
