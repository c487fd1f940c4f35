"""The collector under load: garbage goes, however long no pause comes, and the frozen heap keeps that short."""

import gc
import itertools
import time
import weakref

import pytest

from aserve.engine import process_tuning
from aserve.engine.process_tuning import ProcessTuning


class Cycle:
    """Garbage that only a collector finds."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def tuning():
    gc.unfreeze()
    tuning = ProcessTuning()
    tuning.apply()
    tuning.tighten()
    yield tuning
    tuning.undo()
    assert gc.isenabled()


def run_busy(tuning, num_steps):
    """Make steps that leave containers behind, enough for a collection each."""
    for _ in range(num_steps):
        kept = [[] for _ in range(2 * process_tuning.MAX_YOUNG_OBJECTS)]
        tuning.tighten()
        del kept


def test_cycles_that_grew_old_are_collected_under_unbroken_load(tuning, monkeypatch):
    monkeypatch.setattr(process_tuning, "MIN_REST_S", 0.0)
    monkeypatch.setattr(process_tuning, "MAX_FULL_SHARE", 1.0)
    monkeypatch.setattr(process_tuning, "MAX_YOUNG_OBJECTS", 1000)
    cycle = Cycle()
    is_alive = weakref.ref(cycle)
    gc.collect(1)  # now it is in the oldest generation
    del cycle
    run_busy(tuning, 3)
    assert is_alive() is not None
    # a middle collection after more than ten young ones, a full one after more than ten of those
    run_busy(tuning, 12 * 13)
    assert is_alive() is None
    assert not gc.isenabled()


def test_full_collections_under_load_take_a_small_share(tuning, monkeypatch):
    monkeypatch.setattr(process_tuning, "MAX_YOUNG_OBJECTS", 300)
    monkeypatch.setattr(process_tuning, "MAX_MIDDLE_COLLECTIONS", 0)
    monkeypatch.setattr(process_tuning, "MAX_YOUNG_COLLECTIONS", 0)
    clock = [0.0]
    monkeypatch.setattr(process_tuning.time, "monotonic", lambda: clock[0])
    full = []

    def note(phase, info):
        if phase == "stop" and info["generation"] == 2:
            clock[0] += 0.05  # a slow one
            full.append(clock[0])

    gc.callbacks.append(note)
    try:
        tuning._collected_s = 0.0
        for _ in range(2000):
            clock[0] += 0.01
            run_busy(tuning, 1)
    finally:
        gc.callbacks.remove(note)
    # the first after a second of rest, the others five seconds apart
    assert full[0] == pytest.approx(1.06, abs=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(full)]
    assert len(gaps) == 3
    assert min(gaps) >= 5


def test_a_full_collection_is_short_while_the_old_heap_is_frozen():
    gc.unfreeze()
    heap = [[number] for number in range(400_000)]
    durations = {}
    for is_frozen in (False, True):
        tuning = ProcessTuning()
        if is_frozen:
            tuning.apply()
        start = time.thread_time()
        gc.collect()
        durations[is_frozen] = time.thread_time() - start
        tuning.undo()
    del heap
    assert durations[True] < durations[False] / 5, durations
