"""Items that an input only names, as clients do that count on a store: found in stored responses and put in."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from aserve.errors import ClientError
from aserve.server.responses.archive import ResponseArchive
from aserve.server.responses.input import MAX_INPUT_ITEMS, REFERENCE, type_error
from aserve.server.responses.item_ids import ItemPlace
from aserve.server.responses.items import decode_items
from aserve.server.responses.listing import wire_items

MAX_RESPONSES = 512  # that one input may name items of

Items = list[dict[str, Any]]


async def resolve_references(payload: Mapping[str, Any], archive: ResponseArchive) -> Mapping[str, Any]:
    """Return ``payload`` with the items that its input names in place of the references.

    Raises ClientError that names the first reference to what is not stored.
    """
    value = payload.get("input")
    if not isinstance(value, list) or len(value) > MAX_INPUT_ITEMS or not any(map(_is_reference, value)):
        return payload
    stored = _StoredItems(archive)
    items = [
        await stored.find(f"input[{index}].id", item.get("id")) if _is_reference(item) else item
        for index, item in enumerate(value)
    ]
    return {**payload, "input": items}


class _StoredItems:
    """The items of the responses that one input names, each response looked up once."""

    def __init__(self, archive: ResponseArchive) -> None:
        self._archive = archive
        self._lists: dict[str, tuple[Items, Items]] = {}  # response id -> what it answered, and its output

    async def find(self, where: str, item_id: object) -> dict[str, Any]:
        if not isinstance(item_id, str):
            raise type_error(where, "string", item_id)
        place = ItemPlace.read(item_id)
        items = [] if place is None else await self._items_beside(place)
        for item in items:
            if item["id"] == item_id:
                return item
        raise ClientError("there is no item of this id (any more); send the item itself", param=where)

    async def _items_beside(self, place: ItemPlace) -> Sequence[dict[str, Any]]:
        lists = self._lists.get(place.response_id)
        if lists is None:
            if len(self._lists) >= MAX_RESPONSES:
                raise ClientError(f"input names items of more than {MAX_RESPONSES} responses", param="input")
            lists = self._lists[place.response_id] = await self._look_up(place.response_id)
        return lists[place.is_output][place.index : place.index + 1]

    async def _look_up(self, response_id: str) -> tuple[Items, Items]:
        response = await self._archive.get(response_id)
        if response is None:
            return [], []
        return wire_items(decode_items(response.input), response_id), orjson.loads(response.body)["output"]


def _is_reference(item: object) -> bool:
    return isinstance(item, dict) and item.get("type") == REFERENCE
