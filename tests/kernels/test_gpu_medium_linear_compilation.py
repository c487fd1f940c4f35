"""What the compiler makes of the medium linear layers for a Hopper GPU, for which none is needed."""

from pathlib import Path
from typing import Any

import pytest
from doubles_hopper import compile_by

NUM_TWICE = 6  # kernels of two layers for two numbers of tokens
SHARED_BYTES = 227 << 10
REGISTERS = 1 << 16


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return compile_by(Path(__file__).with_name("hopper_compile_medium_linear.py"), tmp_path_factory.mktemp("triton"))


@pytest.fixture
def products(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    products = [report for report in reports if report["kernel"] == "multiply_tiles"]
    assert len(products) > 15
    return products


def test_matrix_units_take_tiles_that_the_copy_engine_brings(products: list[dict[str, Any]]) -> None:
    for report in products:
        assert report["products"] > 0
        assert report["other_products"] == 0
        assert "cp.async.bulk.tensor" in report["order"]
        assert len(report["loads"]) <= 2 * 64  # of the biases
        assert report["num_waits_for_products"] == 2, "one in the loop for what came before, one behind it"


def test_all_fits(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["spilled_bytes"] == 0
        assert report["shared_bytes"] <= SHARED_BYTES
        assert report["registers"] * report["num_threads"] <= REGISTERS


def test_results_are_stored_sixteen_bytes_at_a_time(products: list[dict[str, Any]]) -> None:
    for report in products:
        assert report["stores"]
        assert all(store.endswith((".v4.b32", ".v2.b32")) for store in report["stores"])


def test_parts_are_read_sixteen_bytes_at_a_time(reports: list[dict[str, Any]]) -> None:
    sums = [report for report in reports if report["kernel"] == "add_parts"]
    assert len(sums) > 5
    for report in sums:
        parts = [load for load in report["loads"] if load.endswith("v4.b32")]
        assert len(parts) >= 2


def test_another_number_of_tokens_compiles_nothing(reports: list[dict[str, Any]]) -> None:
    for first in (0, NUM_TWICE):
        counts = [report["compiled"] for report in reports[first : first + NUM_TWICE]]
        assert counts == [1, 1, 0, 0, 1, 0]


def test_weights_are_asked_for_before_the_wait_and_nothing_else_is(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        order = report["order"]
        waits = [place for place, name in enumerate(order) if name == "griddepcontrol.wait"]
        assert len(waits) == report["overlap"]
        if waits:
            assert order[0] == "griddepcontrol.launch_dependents"
            assert set(order[1 : waits[0]]) == ({"prefetch.L2"} if report["ahead"] else set())
