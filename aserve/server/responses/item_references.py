"""Items that an input only names, as clients do that count on a store: found in stored responses and put in.

One input may name thousands of items of hundreds of responses. They are looked up on the event loop and taken apart in
a thread, where only the items that are named are decoded, one by one.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from aserve.errors import ClientError
from aserve.server.errors import type_error
from aserve.server.responses.archive import ResponseArchive
from aserve.server.responses.input import MAX_INPUT_ITEMS, REFERENCE
from aserve.server.responses.item_ids import ItemPlace
from aserve.server.responses.items import decode_item, split_list
from aserve.server.responses.listing import wire_item

MAX_RESPONSES = 512  # that one input may name items of
MAX_BYTES = 64 << 20  # of what these answered and said, and of the items that are put in

Lists = tuple[bytes, bytes]  # what a response answered, and its body, which has its output
NOTHING: Lists = b"[]", b'{"output":[]}'


class StoredBody(msgspec.Struct):
    """The output items in the JSON of a response, each as JSON."""

    output: list[msgspec.Raw]


decode_body = msgspec.json.Decoder(StoredBody).decode


async def resolve_references(payload: Mapping[str, Any], archive: ResponseArchive) -> Mapping[str, Any]:
    """Return ``payload`` with the items that its input names in place of the references.

    Raises ClientError that names the first reference to what is not stored, or the input if it names too much.
    """
    value = payload.get("input")
    if not isinstance(value, list) or len(value) > MAX_INPUT_ITEMS or not any(map(_is_reference, value)):
        return payload
    places = await asyncio.to_thread(_read_places, value)
    stored = await _look_up(dict.fromkeys(place.response_id for place in places if place is not None), archive)
    return {**payload, "input": await asyncio.to_thread(_put_in, value, places, stored)}


def _is_reference(item: object) -> bool:
    """Whether ``item`` only names another; the protocol lets it leave out its type, unlike that of a message."""
    if not isinstance(item, dict):
        return False
    kind = item.get("type")
    return kind == REFERENCE or (kind is None and "id" in item and not item.keys() & {"role", "content"})


def _read_places(value: Sequence[Any]) -> list[ItemPlace | None]:
    """Return for each element the place that it names, None if it names none of this server's."""
    ids = [item.get("id") if _is_reference(item) else None for item in value]
    return [ItemPlace.read(item_id) if isinstance(item_id, str) else None for item_id in ids]


async def _look_up(response_ids: Mapping[str, None], archive: ResponseArchive) -> dict[str, Lists]:
    if len(response_ids) > MAX_RESPONSES:
        raise ClientError(f"input names items of more than {MAX_RESPONSES} responses", param="input")
    found: dict[str, Lists] = {}
    num_bytes = 0
    for response_id in response_ids:
        if (response := await archive.get(response_id)) is not None:
            found[response_id] = response.input, response.body
            num_bytes += len(response.input) + len(response.body)
            _check_size(num_bytes)
    return found


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise ClientError(f"input names items of responses with more than {MAX_BYTES} bytes", param="input")


def _put_in(value: Sequence[Any], places: Sequence[ItemPlace | None], stored: Mapping[str, Lists]) -> list[Any]:
    items = _StoredItems(stored)
    return [
        items.find(f"input[{index}].id", item.get("id"), place) if _is_reference(item) else item
        for index, (item, place) in enumerate(zip(value, places, strict=True))
    ]


class _StoredItems:
    """The items of the responses that one input names; each response is taken apart once."""

    def __init__(self, stored: Mapping[str, Lists]) -> None:
        self._stored = stored
        self._lists: dict[str, tuple[list[msgspec.Raw], list[msgspec.Raw]]] = {}
        self._num_bytes = 0  # of the items that were found

    def find(self, where: str, item_id: object, place: ItemPlace | None) -> dict[str, Any]:
        if not isinstance(item_id, str):
            raise type_error(where, "string", item_id)
        item = None if place is None else self._item_at(place)
        if item is None or item["id"] != item_id:
            raise ClientError("there is no item of this id (any more); send the item itself", param=where)
        return item

    def _item_at(self, place: ItemPlace) -> dict[str, Any] | None:
        items = self._lists_of(place.response_id)[place.is_output]
        if place.index >= len(items):
            return None
        encoded = items[place.index]
        self._num_bytes += len(encoded)
        _check_size(self._num_bytes)
        if place.is_output:
            return dict(msgspec.json.decode(encoded))
        return wire_item(decode_item(encoded), place)

    def _lists_of(self, response_id: str) -> tuple[list[msgspec.Raw], list[msgspec.Raw]]:
        lists = self._lists.get(response_id)
        if lists is None:
            answered, body = self._stored.get(response_id, NOTHING)
            lists = self._lists[response_id] = split_list(answered), decode_body(body).output
        return lists
