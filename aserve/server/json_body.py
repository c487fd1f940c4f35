"""A request body from the socket to Python values, with bounded bytes, depth and number of values.

orjson holds the GIL, so that even a thread would stop the event loop while it parses. It takes seconds for 16 MiB of
small values. So values are counted before they are made: in a small body by an upper bound at memory speed, and where
that is too high, or the body is large, exactly, in a thread without the GIL. Long texts are read piece by piece there.
"""

import asyncio
from typing import Any

import numpy as np
import orjson
from starlette.types import Receive, Scope

from aserve.errors import ClientError
from aserve.server.errors import BodyTooLargeError
from aserve.server.long_text import QUOTE, load, unescaped_slices

MAX_CONTAINERS = 50_000  # arrays and objects
SMALL_BYTES = 256 * 1024
MAX_SEPARATORS = 500_000  # commas, so elements of arrays and members of objects

COMMA, ARRAY, OBJECT = b",[{"


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
    try:
        if len(body) > SMALL_BYTES or not _is_small(body.count(b"[") + body.count(b"{"), body.count(b",")):
            return await asyncio.to_thread(_load_large, body)
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ClientError(f"the request body is not valid JSON: {error}", code="invalid_json") from None


def _load_large(body: bytes) -> Any:
    if not _is_small(*count_values(body)):
        raise ClientError("the request body has too many values", code="body_too_complex")
    return load(body)


def _is_small(containers: int, separators: int) -> bool:
    return containers <= MAX_CONTAINERS and separators <= MAX_SEPARATORS


def count_values(body: bytes) -> tuple[int, int]:
    """Return how many containers open and how many commas stand in ``body``, those in strings not counted.

    Stops counting once there are too many.
    """
    containers = separators = 0
    in_string = False
    for codes in unescaped_slices(body):
        inside = np.bitwise_xor.accumulate(codes == QUOTE) ^ in_string
        outside = codes[~inside]
        containers += int(np.count_nonzero((outside == ARRAY) | (outside == OBJECT)))
        separators += int(np.count_nonzero(outside == COMMA))
        in_string = bool(inside[-1])
        if not _is_small(containers, separators):
            break
    return containers, separators
