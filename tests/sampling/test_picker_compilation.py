"""What the compiler makes of the sampling kernels for a Hopper GPU, for which none is needed."""

from pathlib import Path
from typing import Any

import pytest
from doubles_hopper import compile_by

LAUNCHES = ["sum_blocks", "pick_tokens", "sum_blocks", "find_limits", "sum_kept", "pick_tokens", "sum_blocks"]
LAUNCHES += ["pick_tokens"]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compile_by(Path(__file__).with_name("hopper_picks.py"), tmp_path_factory.mktemp("triton"))


def test_batches_of_any_size_and_alignment_share_what_is_compiled(reports: list[dict[str, Any]]) -> None:
    """The first of the script's five rounds compiles each kernel, and picks with a pool and without, once."""
    first, later = reports[: len(LAUNCHES)], reports[len(LAUNCHES) :]
    assert [report["kernel"] for report in first] == LAUNCHES
    assert [report["compiled"] for report in first] == [1, 1, 0, 1, 1, 1, 0, 1]
    assert [report["kernel"] for report in later] == LAUNCHES * 4
    assert sum(report["compiled"] for report in later) == 0


def test_logits_are_loaded_sixteen_bytes_at_a_time(reports: list[dict[str, Any]]) -> None:
    assert all(report["wide_loads"] for report in reports)


def test_two_launches_pick_plainly(reports: list[dict[str, Any]]) -> None:
    assert [report["grid"] for report in reports[:2]] == [[75, 256], [256]]
