"""Bodies are bounded before orjson makes values of them."""

import json
from typing import Any

import pytest
from doubles_http import in_loop
from hypothesis import given
from hypothesis import strategies as st

from aserve.errors import ClientError
from aserve.server import json_body, long_text
from aserve.server.json_body import (
    MAX_CONTAINERS,
    MAX_SEPARATORS,
    ClientGoneError,
    count_values,
    parse_json,
    read_json,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('a\\"[{,😀') | st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=30,
)


def walk(value: Any) -> tuple[int, int]:
    """Return containers and commas of the compact form."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [walk(one) for one in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(one[0] for one in inner), max(0, len(value) - 1) + sum(one[1] for one in inner)


@given(JSON, st.integers(1, 40), st.booleans())
def test_values_are_counted_outside_strings_wherever_the_slices_end(value: Any, size: int, ascii: bool) -> None:
    body = json.dumps(value, separators=(",", ":"), ensure_ascii=ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_text, "SLICE_BYTES", size)
        assert count_values(body) == walk(value)


@in_loop
async def test_long_text_full_of_brackets_passes() -> None:
    text = '{[,"\\' * 400_000
    assert await parse_json(json.dumps({"a": text}).encode()) == {"a": text}


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * MAX_CONTAINERS + b"[]]",
        b"[" + b"1," * (MAX_SEPARATORS + 1) + b"1]",
        b"{" + b",".join(b'"%d":0' % i for i in range(MAX_SEPARATORS + 2)) + b"}",
    ],
)
@in_loop
async def test_too_many_values_are_refused_before_they_exist(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body.orjson, "loads", lambda _: pytest.fail("was parsed"))
    with pytest.raises(ClientError, match="too many values"):
        await parse_json(body)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"a":NaN}', b'{"a":"\\ud800"}', b"[" * 2000, b'{"a":1}x', b"'a'"]
)
@in_loop
async def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(ClientError, match="not valid JSON"):
        await parse_json(body)


@in_loop
async def test_a_body_in_pieces_is_joined_and_a_client_that_leaves_is_noticed() -> None:
    scope = {"type": "http", "headers": []}
    messages = [
        {"type": "http.request", "body": b'{"a"', "more_body": True},
        {"type": "http.request", "body": b":1}", "more_body": False},
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    assert await read_json(scope, receive, 100) == {"a": 1}
    with pytest.raises(ClientGoneError):
        await read_json(scope, receive, 100)
