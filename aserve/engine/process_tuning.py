"""Settings of the whole Python process that keep the event loop prompt, and their undoing.

The collector is the loop's worst enemy: a full collection with torch loaded takes a third of a second. So what exists
at ready is frozen, and while steps run nothing is collected unless garbage piles up; when the engine is idle the
process has its normal collector again, so that a notebook's own garbage goes, too. A load without a pause must not
leak, either: then the oldest generation is collected now and then, which is short because what was there at ready is
frozen, and rare enough to take at most a hundredth of the time. The short switch interval lets the
loop's thread run between two instructions of a tokenizer or template thread.
"""

import gc
import sys
import time

SWITCH_INTERVAL_S = 0.0005
MAX_YOUNG_OBJECTS = 20_000  # new containers after which a busy engine collects the youngest, about 1 ms
MAX_YOUNG_COLLECTIONS = 10  # after which it collects the middle generation
MAX_MIDDLE_COLLECTIONS = 10  # after which a busy engine collects the oldest generation, too
MIN_REST_S = 1.0  # between two full collections
MAX_FULL_SHARE = 0.01  # of the time of a busy engine, for full collections


class ProcessTuning:
    """Applied at ready, undone at stop; ``tighten`` when steps run and ``relax`` when idle."""

    def __init__(self) -> None:
        self._is_applied = False
        self._is_tight = False
        self._had_collector = True
        self._old_interval_s = 0.0
        self._collected_s = 0.0  # when the last full collection ended
        self._cost_s = 0.0  # and how long it took

    def apply(self) -> None:
        """Freeze what exists and shorten the switch interval. Takes as long as a full collection."""
        self._old_interval_s = sys.getswitchinterval()
        self._had_collector = gc.isenabled()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()
        self._collected_s = time.monotonic()
        self._is_applied = True

    def tighten(self) -> None:
        """Note that steps run; called once a step."""
        if not self._is_applied:
            return
        if not self._is_tight:
            self._is_tight = True
            gc.disable()
        elif gc.get_count()[0] > MAX_YOUNG_OBJECTS:
            _, num_young, num_middle = gc.get_count()
            if num_middle > MAX_MIDDLE_COLLECTIONS and self._has_rested(self._cost_s / MAX_FULL_SHARE):
                self._collect_all()
            else:
                gc.collect(1 if num_young > MAX_YOUNG_COLLECTIONS else 0)

    def relax(self) -> None:
        """Note that nothing runs: collect now rather than in a step, and give the collector back."""
        if not self._is_tight:
            return
        self._is_tight = False
        if self._had_collector:
            gc.enable()
        if self._has_rested(0.0):
            self._collect_all()

    def undo(self) -> None:
        """Restore what ``apply`` found. Idempotent."""
        if not self._is_applied:
            return
        self._is_applied = self._is_tight = False
        gc.unfreeze()
        if self._had_collector:
            gc.enable()
        sys.setswitchinterval(self._old_interval_s)

    def _has_rested(self, rest_s: float) -> bool:
        return time.monotonic() - self._collected_s > max(MIN_REST_S, rest_s)

    def _collect_all(self) -> None:
        started_s = time.monotonic()
        gc.collect()
        self._collected_s = time.monotonic()
        self._cost_s = self._collected_s - started_s
