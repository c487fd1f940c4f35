"""Long texts in JSON mean the same read and written in pieces, wherever those end."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aserve.server import long_text
from aserve.server.responses import items
from aserve.server.responses.items import BuiltInCallItem, CustomCallItem, MessageItem, decode_items, encode_items

TEXTS = st.text(st.sampled_from('ab\\"/u\n\t\x01é\u2028漢😀[{,:') | st.characters(codec="utf-8"), max_size=60)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_text, "LONG", 5)
    monkeypatch.setattr(long_text, "PIECE", 16)
    monkeypatch.setattr(long_text, "SLICE_BYTES", 23)


@given(TEXTS, st.booleans())
@example("x" * 15 + "\U0001f600" * 5, True)
@example("\\" * 15 + "u1234" + "\\" * 16, True)
def test_a_text_is_read_and_written_in_pieces(text: str, ascii: bool) -> None:
    assert long_text.load_text(json.dumps(text, ensure_ascii=ascii).encode()) == text
    assert orjson.loads(long_text.dump_text(text)) == text


@given(VALUES, st.booleans())
def test_a_body_with_long_texts_is_what_it_says(value: Any, ascii: bool) -> None:
    assert long_text.load(json.dumps(value, ensure_ascii=ascii).encode()) == value


def test_depth_is_no_matter() -> None:
    value = long_text.load(b'[{"a long key":' * 500 + b'"a long text"' + b"}]" * 500)
    for _ in range(500):
        (value,) = value
        assert list(value) == ["a long key"]
        value = value["a long key"]
    assert value == "a long text"


@given(st.text(st.sampled_from('{}[]",:\\u0a1 \x00é'), max_size=60))
@example('"' + "a" * 20 + '\\ud800"')
@example('"' + "a" * 20 + '\\"')
@example('\\"' + "a" * 20 + '"')
@example('{"' + "a" * 20 + '" "b":1}')
def test_what_is_no_json_is_refused_as_by_the_whole(body: str) -> None:
    try:
        expected: Any = orjson.loads(body.encode())
    except orjson.JSONDecodeError:
        with pytest.raises(orjson.JSONDecodeError):
            long_text.load(body.encode())
    else:
        assert long_text.load(body.encode()) == expected


@given(TEXTS, TEXTS)
def test_items_with_long_texts_are_kept(one: str, other: str) -> None:
    kept = [
        MessageItem("user", one),
        CustomCallItem("c", other, one, None),
        BuiltInCallItem("c", {"type": "shell_call", "action": {other: one}}),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "LONG", 24)  # more than a type
        patch.setattr(items, "PIECE", 16)
        assert decode_items(encode_items(kept)) == kept
    assert decode_items(encode_items(kept)) == kept


def test_no_single_call_sees_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    sizes: list[int] = []
    real = orjson.loads

    def measured(data: bytes) -> Any:
        sizes.append(len(data))
        return real(data)

    monkeypatch.setattr(orjson, "loads", measured)
    text = '\n"' * (4 << 20)
    assert long_text.load(orjson.dumps({"a": text})) == {"a": text}
    assert max(sizes) <= long_text.PIECE + 2
