"""One timer for all open streams: keep-alive frames in silence, an end for readers that stalled."""

import asyncio
import math
from typing import Protocol

BEATS_PER_LIMIT = 4  # how finely the shorter of the two limits is measured
MAX_INTERVAL_S = 1.0


class Beating(Protocol):
    """Something that is looked at regularly. It counts beats, so that a token costs no look at the clock."""

    def beat(self, keep_alive_beats: int, stall_beats: int) -> None:
        """Act if silent or stalled for that many beats; ``keep_alive_beats`` 0 means never."""


class Heartbeat:
    """Calls ``beat`` of each member, several times within the shorter of the two limits."""

    def __init__(self, *, keep_alive_s: float, stall_timeout_s: float) -> None:
        shorter_s = min(keep_alive_s or stall_timeout_s, stall_timeout_s)
        self.interval_s = min(MAX_INTERVAL_S, shorter_s / BEATS_PER_LIMIT)
        self._keep_alive_beats = math.ceil(keep_alive_s / self.interval_s)
        self._stall_beats = math.ceil(stall_timeout_s / self.interval_s)
        self._members: set[Beating] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, member: Beating) -> None:
        """Look at ``member`` from now on."""
        self._members.add(member)
        if self._timer is None:
            self._arm()

    def remove(self, member: Beating) -> None:
        """Forget ``member``. Idempotent."""
        self._members.discard(member)

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._members)

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.interval_s, self._beat)

    def _beat(self) -> None:
        self._timer = None
        for member in tuple(self._members):
            member.beat(self._keep_alive_beats, self._stall_beats)
        if self._members:
            self._arm()
