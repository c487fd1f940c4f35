"""JSON with long texts in it, read and written piece by piece.

An encoder or decoder of JSON holds the GIL for as long as one call takes, some 50 ms for 16 MiB of text with escapes,
even in a thread. In pieces, the event loop has its turn in between. So call these in a thread.
"""

import re
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import numpy as np
import orjson
from numpy.typing import NDArray

LONG = 1 << 14  # bytes or characters of a text that is worth it
PIECE = 1 << 18
SLICE_BYTES = 1 << 20  # scanned in one go
QUOTE = ord('"')
ESCAPE_AT_END = re.compile(rb"\\(?:u[0-9a-fA-F]{0,3})?\Z")
HIGH_SURROGATE_AT_END = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


def dump_text(text: str) -> bytes:
    """Return ``text`` as a JSON string."""
    pieces = [orjson.dumps(text[start : start + PIECE])[1:-1] for start in range(0, len(text), PIECE)]
    return b'"%b"' % b"".join(pieces)


def load_text(encoded: bytes) -> str:
    """Return the text of a JSON string; raise orjson.JSONDecodeError if it is none."""
    pieces, start, end = [], 1, len(encoded) - 1
    while start < end:
        stop = _safe_end(encoded, start, min(start + PIECE, end)) if end - start > PIECE else end
        pieces.append(orjson.loads(b'"%b"' % encoded[start:stop]))
        start = stop
    return "".join(pieces)


def load(body: bytes) -> Any:
    """Return the value of ``body``; raise orjson.JSONDecodeError if it is not JSON."""
    long = list(_long_strings(body))
    if not long:
        return orjson.loads(body)
    name = uuid4().hex  # no text of a client can be taken for a place
    texts: dict[str, str] = {}
    skeleton, start = [], 0
    for begin, end in long:
        place = f"{name}-{len(texts)}"
        skeleton += [body[start:begin], b'"%b"' % place.encode()]
        texts[place] = load_text(body[begin:end])
        start = end
    return _put_in(orjson.loads(b"".join([*skeleton, body[start:]])), texts)


def _safe_end(encoded: bytes, start: int, stop: int) -> int:
    """Return the last place up to ``stop`` that is within no character and no escape."""
    while encoded[stop] & 0xC0 == 0x80:
        stop -= 1
    stop = _before(ESCAPE_AT_END, encoded, start, stop)
    return _before(HIGH_SURROGATE_AT_END, encoded, start, stop)


def _before(pattern: re.Pattern[bytes], encoded: bytes, start: int, stop: int) -> int:
    """Return where the escape that ``pattern`` finds at ``stop`` begins, ``stop`` if there is none."""
    found = pattern.search(encoded, max(start, stop - 6), stop)
    if found is None:
        return stop
    before = encoded[max(start, found.start() - PIECE) : found.start()]
    is_escaped = (len(before) - len(before.rstrip(b"\\"))) % 2
    return stop if is_escaped else found.start()


def unescaped_slices(body: bytes) -> Iterator[NDArray[np.uint8]]:
    """Yield the bytes of ``body`` in order, with others in place of escaped quotes and backslashes."""
    start = 0
    while start < len(body):
        piece = body[start : start + SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # never cut between a backslash and what it escapes
            piece = body[start : start + SLICE_BYTES + 1]
        start += len(piece)
        yield np.frombuffer(piece.replace(b"\\\\", b"__").replace(b'\\"', b"__"), np.uint8)


def _long_strings(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield where long strings begin and end, their quotes included; of what is no JSON, something may be found."""
    start, opened = 0, -1
    for codes in unescaped_slices(body):
        quotes = np.flatnonzero(codes == QUOTE) + start
        if opened >= 0:
            quotes = np.concatenate(([opened], quotes))
        pairs = quotes[: len(quotes) // 2 * 2].reshape(-1, 2)
        for begin, end in pairs[pairs[:, 1] - pairs[:, 0] > LONG].tolist():
            yield begin, end + 1
        opened = int(quotes[-1]) if len(quotes) % 2 else -1
        start += len(codes)


def _put_in(value: Any, texts: dict[str, str]) -> Any:
    """Return ``value`` with the texts in their places."""
    if isinstance(value, str):
        return texts.get(value, value)
    stack = [value]
    while stack:
        node = stack.pop()
        if isinstance(node, dict) and not texts.keys().isdisjoint(node):
            members = {texts.get(key, key): one for key, one in node.items()}
            node.clear()
            node.update(members)
        for key, one in node.items() if isinstance(node, dict) else enumerate(node):
            if isinstance(one, str):
                node[key] = texts.get(one, one)
            elif isinstance(one, list | dict):
                stack.append(one)
    return value
