"""What the tuning of mixtures of experts tries, calls and prints, on a tiny model and without a clock."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from aserve.builtin_models import BUILTIN_MODELS
from aserve.kernels.gpu import moe_case, tune_moe
from aserve.kernels.gpu.moe_launch import MoeLaunch, ProductLaunch
from aserve.kernels.gpu.tune_moe import best_launch, candidates

TINY = {"hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
FAST, SLOW = ProductLaunch(64, 32, 2, 4), ProductLaunch(64, 64, 2, 4)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draw on a CPU in float16, which the interpreter can multiply."""
    monkeypatch.setitem(BUILTIN_MODELS, "Tiny", TINY)
    monkeypatch.setattr(tune_moe, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(tune_moe, "candidates", lambda *_: [SLOW, FAST])
    monkeypatch.setattr(moe_case, "DTYPE", torch.float16)
    monkeypatch.setattr(moe_case, "NUM_DRAWS", 1)
    monkeypatch.setattr(moe_case, "time_calls", time_calls)


def time_calls(calls: Sequence[Callable[[], object]]) -> float:
    """Take launches with ``FAST`` products for faster ones, and 16 rows for the best."""
    launch: MoeLaunch = calls[0].args[4]  # type: ignore[attr-defined]
    return 2.0 + (launch.gate_up != FAST) + (launch.down != FAST) + (launch.block_rows != 16)


def test_a_line_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_moe.main(["--models", "Tiny", "--tokens", "1"]) == 0
    launch = "MoeLaunch(16, ProductLaunch(64, 32, 2, 4), ProductLaunch(64, 32, 2, 4))"
    # 2 of 4 experts, 3072 bytes each, in 2 us; 2 pairs of 3 * 512 products and sums
    assert capsys.readouterr().out == f"1: {launch},  # 2.0 us, 3 GB/s, 0 TFLOP/s; present 4.0 # Tiny, 1 tokens\n"


def test_a_launch_that_is_wrong_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = moe_case.run_moe
    monkeypatch.setattr(moe_case, "run_moe", lambda *arguments: right(*arguments) * 1.1)
    with pytest.raises(ArithmeticError, match="is wrong by"):
        tune_moe.main(["--models", "Tiny", "--tokens", "1"])


def test_a_launch_that_does_not_start_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_only_slow_ones(calls: Sequence[Callable[[], object]]) -> float:
        launch = calls[0].args[4]  # type: ignore[attr-defined]
        if FAST in (launch.gate_up, launch.down):
            raise OutOfResources(400 << 10, 227 << 10, "shared memory")
        return time_calls(calls)

    monkeypatch.setattr(moe_case, "time_calls", time_only_slow_ones)
    assert tune_moe.main(["--models", "Tiny", "--tokens", "1"]) == 0
    *failures, row = capsys.readouterr().out.splitlines()
    assert row.startswith("1: MoeLaunch(16, ProductLaunch(64, 64, 2, 4), ProductLaunch(64, 64, 2, 4)),  # 4.0 us")
    assert len(failures) == 2 * 2  # for each number of rows, of each product
    assert all(line.startswith("# failed: MoeLaunch(") and "shared memory" in line for line in failures)


def test_products_are_chosen_one_after_the_other() -> None:
    tried: list[MoeLaunch] = []

    def time_us(launch: MoeLaunch) -> float:
        tried.append(launch)
        return abs(launch.block_rows - 64) + (launch.gate_up != FAST) + (launch.down != FAST)

    assert best_launch(MoeLaunch(32, SLOW, SLOW), time_us) == MoeLaunch(64, FAST, FAST)
    assert {launch.block_rows for launch in tried} == {16, 32, 64}
    assert len(set(tried)) == 3 * 3


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("block_rows", [16, 32, 64, 128])
def test_candidates_fit(block_rows: int, num_parts: int) -> None:
    found: list[Any] = list(candidates(block_rows, num_parts))
    assert 4 <= len(found) <= 12
    for product in found:
        num_rows = product.block_outputs * num_parts + block_rows
        assert num_rows * product.block_width * 2 * product.num_stages < 227 << 10
        assert product.block_outputs * num_parts * block_rows <= 160 * 32 * product.num_warps
