"""Cores as described by the files of a made-up machine."""

from pathlib import Path

import pytest

from aserve.runner import cpu_cores
from aserve.runner.cpu_cores import count_cores, count_physical_cores, read_cpu_quota


def make_cpus(folder: Path, siblings: list[str]) -> Path:
    for cpu, text in enumerate(siblings):
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")
    return folder


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    folder = make_cpus(tmp_path, ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"])
    assert count_physical_cores(list(range(8)), folder) == 4
    assert count_physical_cores([0, 4], folder) == 1
    assert count_physical_cores([0, 1, 4], folder) == 2


def test_without_topology_each_processor_counts(tmp_path: Path) -> None:
    assert count_physical_cores([0, 1, 2], tmp_path) == 3


@pytest.mark.parametrize(
    ("text", "quota"), [("200000 100000", 2.0), ("150000 100000", 1.5), ("max 100000", None), ("garbage", None)]
)
def test_quota_of_control_groups_version_2(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu.max").write_text(f"{text}\n")
    assert read_cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("text", "quota"), [("50000", 0.5), ("-1", None)])
def test_quota_of_control_groups_version_1(tmp_path: Path, text: str, quota: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{text}\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert read_cpu_quota(tmp_path) == quota


def test_no_control_group_no_quota(tmp_path: Path) -> None:
    assert read_cpu_quota(tmp_path) is None


@pytest.mark.parametrize(
    ("quota", "expected"), [("200000 100000", 2), ("50000 100000", 1), ("270000 100000", 2), ("900000 100000", 4)]
)
def test_the_smaller_of_cores_and_quota_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(cpu_cores.os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    folder = make_cpus(tmp_path, ["0", "1", "2", "3"])
    (tmp_path / "cpu.max").write_text(quota)
    num_cores, source = count_cores(folder, tmp_path)
    assert num_cores == expected
    assert source == (
        "physical cores" if expected == 4 else f"this container's limit of {int(quota[:-7]) / 1e5:g} CPUs"
    )


def test_affinity_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_cores.os, "sched_getaffinity", lambda pid: {1}, raising=False)
    assert count_cores(make_cpus(tmp_path, ["0", "1", "2", "3"]), tmp_path)[0] == 1
