"""A request body from the socket to Python values, with bounded bytes, depth and number of values.

orjson holds the GIL, so that even a thread would stop the event loop while it parses. It takes some 30 ms for 16 MiB of
text, but seconds for as many bytes of small values. So values are counted before they are made: in a small body by an
upper bound at memory speed, and where that is too high, or the body is large, exactly, in a thread without the GIL.
"""

import asyncio
from typing import Any

import numpy as np
import orjson
from starlette.types import Receive, Scope

from aserve.errors import ClientError
from aserve.server.errors import BodyTooLargeError

MAX_CONTAINERS = 50_000  # arrays and objects
SMALL_BYTES = 256 * 1024
MAX_SEPARATORS = 500_000  # commas, so elements of arrays and members of objects
SLICE_BYTES = 1 << 20  # scanned in one go

QUOTE, COMMA, ARRAY, OBJECT = b'",[{'


class ClientGoneError(Exception):
    """The client left before its request was complete; there is nobody to answer."""


async def read_json(scope: Scope, receive: Receive, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the request body.

    Raises BodyTooLargeError past ``max_bytes``, ClientError for anything but a JSON object of reasonable size, and
    ClientGoneError if the client leaves.
    """
    value = await parse_json(await read_body(scope, receive, max_bytes))
    if not isinstance(value, dict):
        raise ClientError("the request body must be a JSON object", code="invalid_json")
    return value


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the request body."""
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    _check_size(int(declared), max_bytes)
    chunks: list[bytes] = []
    size = 0
    more_body = True
    while more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        _check_size(size, max_bytes)
        more_body = message.get("more_body", False)
    return b"".join(chunks)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise BodyTooLargeError(f"the request body is larger than {max_bytes} bytes", code="body_too_large")


async def parse_json(body: bytes) -> Any:
    """Return the value of ``body``; raise ClientError if it is not JSON or has too many values."""
    if len(body) > SMALL_BYTES or not _is_small(body.count(b"[") + body.count(b"{"), body.count(b",")):
        containers, separators = await asyncio.to_thread(count_values, body)
        if not _is_small(containers, separators):
            raise ClientError("the request body has too many values", code="body_too_complex")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"the request body is not valid JSON: {error}", code="invalid_json") from None


def _is_small(containers: int, separators: int) -> bool:
    return containers <= MAX_CONTAINERS and separators <= MAX_SEPARATORS


def count_values(body: bytes) -> tuple[int, int]:
    """Return how many containers open and how many commas stand in ``body``, those in strings not counted.

    Stops counting once there are too many.
    """
    containers = separators = start = 0
    in_string = False
    while start < len(body) and _is_small(containers, separators):
        piece = body[start : start + SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # never cut between a backslash and what it escapes
            piece = body[start : start + SLICE_BYTES + 1]
        start += len(piece)
        plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        codes = np.frombuffer(plain, np.uint8)
        inside = np.bitwise_xor.accumulate(codes == QUOTE) ^ in_string
        outside = codes[~inside]
        containers += int(np.count_nonzero((outside == ARRAY) | (outside == OBJECT)))
        separators += int(np.count_nonzero(outside == COMMA))
        in_string = bool(inside[-1]) if len(inside) else in_string
    return containers, separators
