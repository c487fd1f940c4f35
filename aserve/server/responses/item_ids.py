"""Ids of items: they say which response an item belongs to, and where it stands there."""

import re
from dataclasses import dataclass

ITEM_ID = re.compile(r"[a-z]{2,4}_(?P<response>[0-9a-f]{32})_(?P<list>in|out)(?P<place>\d{1,4})")


@dataclass(frozen=True, slots=True)
class ItemPlace:
    """Where an item stands: in the output of a response, or in what that answered."""

    response_id: str
    is_output: bool
    index: int

    def item_id(self, prefix: str) -> str:
        """Return the id of an item whose type has ``prefix``."""
        return f"{prefix}_{self.response_id.removeprefix('resp_')}_{'out' if self.is_output else 'in'}{self.index}"

    @classmethod
    def read(cls, item_id: str) -> "ItemPlace | None":
        """Return the place that an id tells, None if it is none of this server's."""
        found = ITEM_ID.fullmatch(item_id)
        if found is None:
            return None
        return cls(f"resp_{found['response']}", found["list"] == "out", int(found["place"]))
