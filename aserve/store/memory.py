"""Responses in this process's memory; a restart forgets them."""

import time
from collections import OrderedDict
from collections.abc import Callable

from aserve.store.record import StoredResponse


class MemoryStore:
    """Keeps the newest responses, at most ``max_bytes`` of them, none longer than ``max_age_s``."""

    blocks = False

    def __init__(self, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.time) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()  # by when it was put

    def __len__(self) -> int:
        """Return the number of responses."""
        return len(self._kept)

    def put(self, response: StoredResponse) -> None:
        """Keep ``response``; one that is larger than everything together is not kept."""
        self.delete(response.response_id)
        self._kept[response.response_id] = (self._clock(), response)
        self.num_bytes += response.num_bytes
        self._drop_old()

    def get(self, response_id: str) -> StoredResponse | None:
        """Return the response, None if it is not here or too old."""
        self._drop_old()
        found = self._kept.get(response_id)
        return None if found is None else found[1]

    def delete(self, response_id: str) -> bool:
        """Forget the response; False if there was none."""
        found = self._kept.pop(response_id, None)
        if found is None:
            return False
        self.num_bytes -= found[1].num_bytes
        return True

    def close(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.num_bytes = 0

    def _drop_old(self) -> None:
        oldest_s = self._clock() - self._max_age_s
        while self._kept:
            response_id, (put_s, _) = next(iter(self._kept.items()))
            if put_s >= oldest_s and self.num_bytes <= self._max_bytes:
                return
            self.delete(response_id)
