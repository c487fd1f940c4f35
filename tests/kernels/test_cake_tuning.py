"""What the tuning of the cake family tries, prints and writes, on tiny steps and without a clock."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aserve.kernels.cake import decode_case, tune
from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.decode_candidates import RESERVED_BYTES, candidates, step_sizes
from aserve.kernels.cake.decode_case import GROUP, DecodeCase, StepSize
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS
from aserve.kernels.cake.select_variant import refuse_gpu
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.tuned_launches import read_launches

CPU = torch.device("cpu")
ROWS = {row.name: row for row in DECODE_VARIANTS}
SHORT = ROWS["decode-16-d64-short"]
PRESENT = SplitLaunch(128, 4, 3, 3, 1)
FAST, SLOW, CLOSE = (dataclasses.replace(PRESENT, num_stages=stages) for stages in (2, 4, 5))
TIMES_US = {PRESENT: 4.0, FAST: 2.0, SLOW: 9.0, CLOSE: 3.96}


class Clock:
    """Takes calls for what the tests say that their launch takes."""

    def __init__(self) -> None:
        self.launch = PRESENT

    def run(self, call: object, launch: SplitLaunch, *rest: object) -> None:
        self.launch = launch
        run_split_decode(call, launch, *rest)  # type: ignore[arg-type]

    def time_calls(self, calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return TIMES_US[self.launch]


run_split_decode = decode_case.run_split_decode


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(decode_case, "run_split_decode", clock.run)
    monkeypatch.setattr(decode_case, "time_calls", clock.time_calls)
    monkeypatch.setattr(decode_case, "num_cold_copies", lambda num_bytes: 1)
    monkeypatch.setattr(decode_case, "NUM_KV_HEADS", 1)
    return clock


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of one multiprocessor that is the CPU."""
    monkeypatch.setattr(tune, "DEVICE", CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tune, "step_sizes", lambda row: [StepSize(1, 40), StepSize(2, 128)])
    monkeypatch.setattr(tune, "candidates", lambda row, capability: [PRESENT, SLOW, FAST])


@pytest.mark.usefixtures("gpu")
def test_the_fastest_launch_is_printed_and_written_beside_those_of_other_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "nvidia-x.toml"
    output.write_text("[decode-16-d512]\nnum_stages = 9\n")
    assert tune.main(["--rows", SHORT.name, "--output", str(output), "--jobs", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"# {SHORT.name}: SplitLaunch(128, 4, 3, 3, 1) 4.0 4.0 us, the present one",
        f"# {SHORT.name}: SplitLaunch(128, 4, 4, 3, 1) 9.0 9.0 us, 2.250 of the present time",
        f"# {SHORT.name}: SplitLaunch(128, 4, 2, 3, 1) 2.0 2.0 us, 0.500 of the present time",
        f"{SHORT.name}: SplitLaunch(128, 4, 2, 3, 1), 0.500 of the present time",
        f"wrote {output}",
    ]
    assert output.read_text().startswith("# Measured on: NVIDIA X.\n")
    assert read_launches(output) == {"decode-16-d512": {"num_stages": 9}, SHORT.name: dataclasses.asdict(FAST)}


def test_a_launch_that_is_hardly_faster_does_not_take_the_place_of_the_present_one() -> None:
    cases = [DecodeCase(SHORT, StepSize(1, 20), CPU)]
    assert tune.tune_row(SHORT, cases, [PRESENT, CLOSE], 1) == PRESENT


def test_a_launch_that_is_wrong_is_not_timed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(call: object, launch: SplitLaunch, *rest: object) -> None:
        clock.run(call, launch, *rest)
        if launch == FAST:
            call.out[0, 0] += 9.0  # type: ignore[attr-defined]

    monkeypatch.setattr(decode_case, "run_split_decode", wrong)
    assert tune.tune_row(SHORT, [DecodeCase(SHORT, StepSize(1, 20), CPU)], [PRESENT, FAST], 1) == PRESENT
    assert "SplitLaunch(128, 4, 2, 3, 1) failed: the result is off by " in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 1
    assert "torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
@pytest.mark.parametrize("row", [row for row in DECODE_VARIANTS if row.launch], ids=lambda row: row.name)
def test_candidates_fit_and_keep_what_makes_a_row_exact(row, capability) -> None:  # type: ignore[no-untyped-def]
    if refuse_gpu(row, capability):
        return
    launches = candidates(row, capability)
    assert launches[0] == row.launch, "the present one"
    assert 3 <= len(set(launches)) == len(launches) <= 64
    for launch in launches[1:]:
        needed = launch.shared_bytes(row.head_dims[-1], GROUP, row.dtypes[-1][1].itemsize)
        assert launch.programs_per_sm * (needed + RESERVED_BYTES) <= SHARED_BYTES[capability] + RESERVED_BYTES
        assert launch.min_units == row.launch.min_units
        assert row.max_keys is None or launch.block_len >= row.max_keys


def test_rows_are_measured_within_what_they_serve() -> None:
    for row in DECODE_VARIANTS:
        for size in step_sizes(row):
            assert size.num_seqs <= (row.max_seqs or size.num_seqs)
            assert size.key_len <= (row.max_keys or size.key_len)
    assert [size.num_seqs for size in step_sizes(ROWS["decode-16-d256-few"])] == [1, 4]
    assert {size.key_len for size in step_sizes(SHORT)} == {128}
