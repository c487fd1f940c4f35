"""Server-sent events as bytes; pure functions, no stream, no socket.

An event is one ``data:`` line, in some protocols after one with its name, and a blank line. JSON escapes every line
end below U+0080 itself; the three that it lets through and that clients with a Unicode-aware line splitter cut at are
escaped here.
"""

from collections.abc import Mapping
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

LINE_ENDS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def encode_json(value: Any) -> bytes:
    """Return ``value`` as JSON that holds no line end of any kind."""
    encoded = orjson.dumps(value)
    return encoded if encoded.isascii() else escape_line_ends(encoded)


def encode_text(text: str) -> bytes:
    """Return ``text`` as a JSON string that holds no line end of any kind."""
    encoded = orjson.dumps(text)
    return encoded if text.isascii() else escape_line_ends(encoded)


def escape_line_ends(encoded: bytes) -> bytes:
    """Escape U+2028, U+2029 and U+0085 in JSON text; outside strings they cannot occur."""
    for raw, escaped in LINE_ENDS:
        if raw in encoded:
            encoded = encoded.replace(raw, escaped)
    return encoded


def event(value: Any) -> bytes:
    """Return one event that carries ``value`` as JSON."""
    return b"data: %b\n\n" % encode_json(value)


def named_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """Return one event called ``name``, which its JSON repeats as ``type`` before ``fields``."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json({"type": name, **fields}))
