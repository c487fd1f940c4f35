"""Which dtype a timing leads to, and a real timing."""

import logging
from typing import Any

import pytest
import torch

from aserve.quantization.unquantized import Unquantized
from aserve.runner import choose_dtype
from aserve.runner.choose_dtype import DtypeName, resolve_dtype, time_linears

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of float32 and of the other type, in place of a timing."""
    seconds = [1.0, 1.0]
    monkeypatch.setattr(choose_dtype, "time_linears", lambda method, dtypes: seconds)
    return seconds


@pytest.mark.parametrize(
    ("bfloat16_s", "expected"),
    [(2.0, torch.float32), (1.0, torch.float32), (0.97, torch.float32), (0.9, torch.bfloat16), (0.5, torch.bfloat16)],
)
def test_auto_needs_a_clear_win(
    measured: list[float], caplog: pytest.LogCaptureFixture, bfloat16_s: float, expected: torch.dtype
) -> None:
    caplog.set_level(logging.INFO)
    measured[1] = bfloat16_s
    assert resolve_dtype("auto", CPU, Unquantized()) == expected
    assert f"dtype={str(expected).removeprefix('torch.')}" in caplog.text
    assert f"{1 / bfloat16_s:.2f} times as fast as float32" in caplog.text


@pytest.mark.parametrize("setting", ["bfloat16", "float16"])
def test_what_is_set_is_honoured_with_a_warning_if_slower(
    measured: list[float], caplog: pytest.LogCaptureFixture, setting: DtypeName
) -> None:
    caplog.set_level(logging.INFO)
    measured[1] = 2.0
    assert resolve_dtype(setting, CPU, Unquantized()) == getattr(torch, setting)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "0.50 times as fast" in caplog.text
    caplog.clear()
    measured[1] = 0.5
    assert resolve_dtype(setting, CPU, Unquantized()) == getattr(torch, setting)
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_float32_is_taken_without_a_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(choose_dtype, "time_linears")
    assert resolve_dtype("float32", CPU, Unquantized()) == torch.float32


def test_the_timing_ranks_a_method_that_is_slow_in_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowInBfloat16(Unquantized):
        def apply(self, x: torch.Tensor, packed: object, bias: object) -> torch.Tensor:
            for _ in range(4 if x.dtype == torch.bfloat16 else 1):
                result = x.float() @ torch.ones(x.shape[1], 64)
            return result

    monkeypatch.setattr(choose_dtype, "NUM_LAYERS", 4)
    float32_s, bfloat16_s = time_linears(SlowInBfloat16(), (torch.float32, torch.bfloat16))
    assert bfloat16_s > 1.5 * float32_s


def test_the_timing_is_on_one_thread_and_leaves_the_number_as_it_was() -> None:
    seen = set()

    class Watched(Unquantized):
        def apply(self, x: torch.Tensor, packed: Any, bias: Any) -> torch.Tensor:
            seen.add(torch.get_num_threads())
            return x

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        time_linears(Watched(), (torch.float32, torch.bfloat16))
        assert (seen, torch.get_num_threads()) == ({1}, 2)
    finally:
        torch.set_num_threads(before)
