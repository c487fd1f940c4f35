"""What the compiler makes of mixtures of experts for a Hopper GPU, for which none is needed."""

from pathlib import Path
from typing import Any

import pytest
from doubles_hopper import compile_by

from aserve.kernels.gpu.moe_launch import LAUNCHES

SHARED_BYTES = 227 << 10
REGISTERS = 1 << 16
NUM_KERNELS = 5  # that a call launches
SCRIPT = Path(__file__).with_name("hopper_compile_moe.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compile_by(SCRIPT, tmp_path_factory.mktemp("triton"), "Qwen3-30B-A3B:3", "Qwen3-30B-A3B:512")


def check_products(reports: list[dict[str, Any]]) -> None:
    products = [report for report in reports if report["kernel"] == "multiply_experts"]
    assert len(products) == 2 * len([report for report in reports if report["kernel"] == "add_experts"])
    for report in products:
        assert report["products"] > 0
        assert report["other_products"] == 0
        assert report["copies"] > 0, "weights come through the copy engine"
        assert set(report["gathers"]) == {"10"}, "tokens are copied sixteen bytes at a time"
        assert report["num_waits_for_products"] == 2, "one in the loop for what came before, one behind it"
        assert all(store.endswith("v4.b32") for store in report["stores"])
        assert report["spilled_bytes"] == 0


def check_sizes(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["shared_bytes"] <= SHARED_BYTES
        assert report["registers"] < 255
        assert report["registers"] * report["num_threads"] <= REGISTERS


def test_matrix_units_take_what_is_copied_beside_them(reports: list[dict[str, Any]]) -> None:
    check_products(reports)
    check_sizes(reports)


def test_another_number_of_tokens_compiles_nothing(reports: list[dict[str, Any]]) -> None:
    for first in (0, 2 * NUM_KERNELS):
        assert {report["compiled"] for report in reports[first + NUM_KERNELS : first + 2 * NUM_KERNELS]} == {0}


def test_one_token_is_routed_and_sorted_by_one_kernel(reports: list[dict[str, Any]]) -> None:
    assert [report["kernel"] for report in reports[4 * NUM_KERNELS :]] == [
        "choose_experts",
        "multiply_experts",
        "multiply_experts",
        "add_experts",
    ]


def test_overlapping_kernels_wait_before_they_touch_what_others_write(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        order = report["order"]
        assert order[:2] == ["griddepcontrol.launch_dependents", "griddepcontrol.wait"]
        assert not any(name.startswith("griddepcontrol") for name in order[2:])


@pytest.mark.full
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "gpt-oss"])
def test_every_launch_in_the_table(model: str, tmp_path: Path) -> None:
    arguments = [f"{model}:{min(mean_rows, 512)}" for mean_rows in LAUNCHES]
    reports = compile_by(SCRIPT, tmp_path, *arguments)
    assert len(reports) > 2 * NUM_KERNELS * len(LAUNCHES) - len(LAUNCHES)
    check_products(reports)
    check_sizes(reports)
