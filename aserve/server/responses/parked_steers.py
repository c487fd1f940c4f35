"""Input that steers a response which ended with calls: it waits for what they return, and goes along with that."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aserve.server.responses.items import CustomCallItem, FunctionCallItem, Item
from aserve.server.responses.schema import ResponseRequest
from aserve.server.responses.steer import Steer
from aserve.server.responses.turns import Output

REASON = "waiting_for_required_input"


class ParkedSteers:
    """Waits for the continuation of ``response_id`` that answers its calls."""

    def __init__(self, response_id: str, output: Sequence[Item]) -> None:
        self.response_id = response_id
        self.steers: list[Steer] = []
        self.required_input = required_input(output)
        self._items: list[Item] | None = None  # of the continuation that is about to begin
        self._place = 0

    def add(self, steer: Steer) -> None:
        """Let ``steer`` wait too, or join the continuation that is about to begin."""
        self.steers.append(steer)
        if self._items is not None:
            self._insert(steer.items)

    def pending_fields(self, steer: Steer) -> dict[str, Any]:
        """Return what the event says by which the client learns that ``steer`` waits."""
        return {**steer.fields(), "reason": REASON, "required_input": self.required_input}

    def joined(self, request: ResponseRequest) -> ResponseRequest:
        """Return the continuation ``request`` with what waits, behind the results: templates want these at the calls.

        What is added until it begins joins it too.
        """
        self._items = list(request.items)
        self._place = len(list(itertools.takewhile(lambda item: isinstance(item, Output), self._items)))
        for steer in self.steers:
            self._insert(steer.items)
        return replace(request, items=self._items)

    def _insert(self, items: Sequence[Item]) -> None:
        assert self._items is not None
        self._items[self._place : self._place] = items
        self._place += len(items)


def required_input(output: Sequence[Item]) -> list[dict[str, str]]:
    """Return a stub for each result that ``output`` asks for."""
    stubs: list[dict[str, str]] = []
    for item in output:
        if isinstance(item, FunctionCallItem):
            stubs.append({"type": "function_call_output", "call_id": item.call_id, "name": item.name})
        elif isinstance(item, CustomCallItem):
            stubs.append({"type": "custom_tool_call_output", "call_id": item.call_id})
    return stubs
