"""What the compiler makes of the kernels for a Hopper GPU, for which none is needed."""

from pathlib import Path
from typing import Any

import pytest
from doubles_hopper import compile_by

NUM_KERNELS = 15  # that one pass of the script compiles


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compile_by(Path(__file__).with_name("hopper_compile.py"), tmp_path_factory.mktemp("triton"))


def test_weights_and_activations_are_loaded_sixteen_bytes_at_a_time(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        if report["kernel"].startswith("walk"):
            weights = [load for load in report["loads"] if "evict_first" in load]
            assert weights
            assert all(load.endswith("v4.b32") for load in weights)
        wide = [load for load in report["loads"] if load.endswith("v4.b32")]
        assert wide, report["kernel"]


def test_another_number_of_tokens_compiles_nothing(reports: list[dict[str, Any]]) -> None:
    """The script runs 3, 4 and 1 tokens: 4 needs what 3 does, 1 its own small linear layers only."""
    for first in (0, 3 * NUM_KERNELS):
        counts = [report["compiled"] for report in reports[first : first + 3 * NUM_KERNELS]]
        assert counts == [1] * NUM_KERNELS + [0] * NUM_KERNELS + [0] * (NUM_KERNELS - 4) + [1] * 4


def test_overlapping_kernels_wait_before_they_touch_what_others_write(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        waits = [place for place, name in enumerate(report["order"]) if "wait" in name]
        assert len(waits) == report["overlap"]
        if not waits:
            continue
        early = report["order"][: waits[0]]
        assert not [name for name in early if name.startswith("st")]
        if report["kernel"].startswith("walk"):
            assert early, "the weight is under way before the wait"
            assert all("evict_first" in name for name in early)
        elif report["kernel"] not in ("_norm_rows", "_transform_store"):  # which load their gains and matrices
            assert not early
