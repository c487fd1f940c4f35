"""What the tuning of the cake family tries, prints and writes, on tiny steps and without a clock."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from aserve.kernels.cake import decode_candidates, decode_case, prefill_candidates, prefill_case, tune
from aserve.kernels.cake.architectures import SHARED_BYTES
from aserve.kernels.cake.case_pages import GROUP
from aserve.kernels.cake.decode_candidates import RESERVED_BYTES, candidates, step_sizes
from aserve.kernels.cake.decode_case import DecodeCase, StepSize
from aserve.kernels.cake.decode_variants import DECODE_VARIANTS, SEVERAL_VARIANTS, DecodeVariant
from aserve.kernels.cake.prefill_case import ChunkSize
from aserve.kernels.cake.prefill_launch import PrefillLaunch, plain_launch
from aserve.kernels.cake.prefill_variants import PREFILL_VARIANTS
from aserve.kernels.cake.select_variant import refuse_gpu
from aserve.kernels.cake.split_launch import SplitLaunch
from aserve.kernels.cake.tuned_launches import read_launches, tune_rows
from aserve.kernels.nvfp4 import element_bytes

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


class SmallTuning(tune.DecodeTuning):
    """By one step of one short sequence."""

    def cases(self) -> list[DecodeCase]:
        return [DecodeCase(self.row, StepSize(1, 20), CPU)]


run_split_decode = decode_case.run_split_decode


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(decode_case, "run_split_decode", clock.run)
    monkeypatch.setattr(decode_case, "time_calls", clock.time_calls)
    monkeypatch.setattr(decode_case, "num_cold_copies", lambda num_bytes: 1)
    monkeypatch.setattr(decode_case, "NUM_KV_HEADS", 1)
    return clock


@pytest.fixture
def gpu(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of one multiprocessor that is the CPU."""
    monkeypatch.setattr(tune, "DEVICE", CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = SimpleNamespace(multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(decode_candidates, "step_sizes", lambda row, num_queries: [StepSize(1, 20), StepSize(1, 40)])
    monkeypatch.setattr(decode_candidates, "candidates", lambda row, capability, num_queries: [PRESENT, SLOW, FAST])


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


@pytest.mark.usefixtures("clock")
def test_a_launch_that_is_hardly_faster_does_not_take_the_place_of_the_present_one() -> None:
    assert tune.tune_row(SmallTuning(SHORT), [PRESENT, CLOSE], 1) == PRESENT


def test_a_launch_that_is_wrong_is_not_timed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(call: object, launch: SplitLaunch, *rest: object) -> None:
        clock.run(call, launch, *rest)
        if launch == FAST:
            call.out[0, 0] += 9.0  # type: ignore[attr-defined]

    monkeypatch.setattr(decode_case, "run_split_decode", wrong)
    assert tune.tune_row(SmallTuning(SHORT), [PRESENT, FAST], 1) == PRESENT
    assert "SplitLaunch(128, 4, 2, 3, 1) failed: the result is off by " in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 1
    assert "torch finds no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
@pytest.mark.parametrize(
    ("row", "num_queries"),
    [(row, 1) for row in DECODE_VARIANTS if row.launch] + [(row, tune.SEVERAL) for row in SEVERAL_VARIANTS],
    ids=lambda row: getattr(row, "name", None),
)
def test_candidates_fit_and_keep_what_makes_a_row_exact(row, num_queries, capability) -> None:  # type: ignore[no-untyped-def]
    if refuse_gpu(row, capability):
        return
    launches = candidates(row, capability, num_queries)
    assert launches[0] == row.launch, "the present one"
    assert 3 <= len(set(launches)) == len(launches) <= 96
    for launch in launches[1:]:
        needed = launch.shared_bytes(row.head_dims[-1], GROUP * num_queries, element_bytes(row.dtypes[-1][1]))
        assert launch.programs_per_sm * (needed + RESERVED_BYTES) <= SHARED_BYTES[capability] + RESERVED_BYTES
        assert launch.min_units == row.launch.min_units
        assert row.max_keys is None or launch.block_len >= row.max_keys


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("row", SEVERAL_VARIANTS[::3], ids=lambda row: row.name)
def test_rows_for_several_queries_are_held_against_the_plain_kernel(row: DecodeVariant) -> None:
    """Which takes one query at a time; it refuses what is off by a query's key."""
    case = DecodeCase(row, StepSize(2, 37, 3), CPU)
    assert row.launch is not None
    TIMES_US[row.launch] = 1.0
    assert case.time(row.launch, num_sms=1) == 1.0
    wrong = DecodeCase(row, StepSize(2, 37, 3), CPU)
    wrong._size = StepSize(2, 36, 3)  # what the plain kernel goes by
    with pytest.raises(ArithmeticError, match="the result is off by "):
        wrong.time(row.launch, num_sms=1)


PROMPTS = PREFILL_VARIANTS[0]
FAST_PROMPTS = PrefillLaunch(32, 16, 4, 2)


def test_rows_of_prompts_are_tuned_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On chunks behind keys that are there; the result of each launch is held against that of the smallest tiles."""
    assert PROMPTS.launch is not None
    small = dataclasses.replace(PROMPTS.launch, tile_rows=64, block_len=32)
    row = dataclasses.replace(PROMPTS, launch=small)
    seen: list[PrefillLaunch] = []
    run_prefill = prefill_case.run_prefill

    def run(call: object, launch: PrefillLaunch, tiles: object) -> None:
        seen.append(launch)
        run_prefill(call, launch, tiles)  # type: ignore[arg-type]
        if launch.num_stages == 9:
            call.out[-1] += 1.0  # type: ignore[attr-defined]

    def time_calls(calls: Sequence[Callable[[], object]]) -> float:
        calls[0]()
        return 1.0 if seen[-1] == FAST_PROMPTS else 3.0

    monkeypatch.setattr(tune, "DEVICE", CPU)
    monkeypatch.setattr(prefill_case, "run_prefill", run)
    monkeypatch.setattr(prefill_case, "time_calls", time_calls)
    monkeypatch.setattr(prefill_case, "NUM_KV_HEADS", 1)
    monkeypatch.setattr(prefill_candidates, "SIZES", [ChunkSize(2, 11, 20)])
    wrong = dataclasses.replace(small, num_stages=9)
    best = tune.tune_row(tune.PrefillTuning(row), [small, wrong, FAST_PROMPTS], 1)
    assert best == FAST_PROMPTS
    assert plain_launch(*row.dtypes[-1]) in seen
    assert "PrefillLaunch(64, 32, 4, 9) failed: the result is off by " in capsys.readouterr().out
    tune.write(tmp_path / "x.toml", {row.name: best}, "NVIDIA X")
    assert read_launches(tmp_path / "x.toml") == {row.name: dataclasses.asdict(FAST_PROMPTS)}


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
@pytest.mark.parametrize("row", [row for row in PREFILL_VARIANTS if row.launch], ids=lambda row: row.name)
def test_candidates_for_prompts_fit(row, capability) -> None:  # type: ignore[no-untyped-def]
    (tuned,) = tune_rows((row,), "", capability)
    if refuse_gpu(tuned, capability):
        return
    launches = prefill_candidates.candidates(tuned, capability)
    assert launches[0] == tuned.launch
    assert 3 <= len(set(launches)) == len(launches) <= 72
    for launch in launches:
        needed = launch.shared_bytes(row.head_dims[-1], GROUP, element_bytes(row.dtypes[-1][1]))
        assert needed <= SHARED_BYTES[capability]


def test_rows_are_measured_within_what_they_serve() -> None:
    for row in DECODE_VARIANTS:
        for size in step_sizes(row):
            assert size.num_seqs <= (row.max_seqs or size.num_seqs)
            assert size.key_len <= (row.max_keys or size.key_len)
    assert [size.num_seqs for size in step_sizes(ROWS["decode-16-d256-few"])] == [1, 4]
    assert {size.key_len for size in step_sizes(SHORT)} == {128}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode-16-d64-short", "decode-16-d256-few", "prefill-16-d64"])
def test_a_row_is_measured_on_the_gpu(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its present launch and one other, each against the plain kernel's result."""
    for module in (decode_candidates, prefill_candidates):
        monkeypatch.setattr(module, "candidates", lambda *given, find=module.candidates: find(*given)[:2])
    output = tmp_path / "gpu.toml"
    assert tune.main(["--rows", name, "--output", str(output), "--jobs", "1"]) == 0
    (launch,) = read_launches(output).values()
    assert set(launch) >= {"block_len", "num_warps", "num_stages"}
