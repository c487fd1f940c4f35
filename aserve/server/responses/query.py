"""Query strings of the Responses API over HTTP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from starlette.datastructures import QueryParams
from starlette.types import Scope

from aserve.errors import ClientError
from aserve.server.responses.item_ids import ItemPlace
from aserve.server.responses.items import BuiltInCallItem, BuiltInOutputItem, Item
from aserve.server.responses.listing import wire_item

MAX_PAGE = 100
DEFAULT_PAGE = 20
MAX_SEQUENCE_NUMBER = 2**53
SWITCHES = {"true": True, "1": True, "false": False, "0": False}
ORDERS = {"asc": True, "desc": False}


@dataclass(frozen=True, slots=True)
class ResponseQuery:
    """How one response is to be read: as an object, or as its events from number ``start`` on."""

    is_streamed: bool
    start: int

    @classmethod
    def read(cls, scope: Scope) -> Self:
        """Return what the query string says; raise ClientError that names the parameter at fault."""
        query = QueryParams(scope["query_string"])
        is_streamed = _read_choice(query, "stream", SWITCHES, False)
        after = _read_integer(query, "starting_after", 0, MAX_SEQUENCE_NUMBER, -1)
        if "starting_after" in query and not is_streamed:
            raise ClientError("starting_after needs stream=true", param="starting_after")
        return cls(is_streamed, after + 1)


@dataclass(frozen=True, slots=True)
class ItemPage:
    """Which of the input items of a response are to be listed."""

    limit: int
    after: str | None
    is_ascending: bool

    @classmethod
    def read(cls, scope: Scope) -> Self:
        """Return what the query string says; raise ClientError that names the parameter at fault."""
        query = QueryParams(scope["query_string"])
        return cls(
            limit=_read_integer(query, "limit", 1, MAX_PAGE, DEFAULT_PAGE),
            after=query.get("after"),
            is_ascending=_read_choice(query, "order", ORDERS, False),
        )

    def cut(self, items: list[Item], response_id: str) -> dict[str, Any]:
        """Return the page as a list object."""
        order = range(len(items)) if self.is_ascending else range(len(items))[::-1]
        start = 0 if self.after is None else _find(self.after, items, order, response_id) + 1
        page = [wire_item(items[index], _place(response_id, index)) for index in order[start : start + self.limit]]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else "",
            "last_id": page[-1]["id"] if page else "",
            "has_more": start + self.limit < len(items),
        }


def _place(response_id: str, index: int) -> ItemPlace:
    return ItemPlace(response_id, False, index)


def _find(item_id: str, items: Sequence[Item], order: Sequence[int], response_id: str) -> int:
    """Return where in ``order`` the item of this id is; most ids tell a place, those of some kinds are the client's."""
    place = ItemPlace.read(item_id)
    said = -1 if place is None else place.index
    for position, index in enumerate(order):
        is_possible = index == said or isinstance(items[index], BuiltInCallItem | BuiltInOutputItem)
        if is_possible and wire_item(items[index], _place(response_id, index))["id"] == item_id:
            return position
    raise ClientError("there is no such item", param="after")


def _read_choice(query: Mapping[str, str], name: str, choices: Mapping[str, bool], default: bool) -> bool:
    value = query.get(name)
    if value is None:
        return default
    if value not in choices:
        raise ClientError(f"{name} must be one of {', '.join(choices)}", param=name)
    return choices[value]


def _read_integer(query: Mapping[str, str], name: str, low: int, high: int, default: int) -> int:
    value = query.get(name)
    if value is None:
        return default
    if not (value.isascii() and value.isdigit() and len(value) < 17) or not low <= int(value) <= high:
        raise ClientError(f"{name} must be a number from {low} to {high}", param=name)
    return int(value)
