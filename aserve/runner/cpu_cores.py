"""How many compute threads this process may use with profit: physical cores, within affinity and cgroup limits."""

import math
import os
from pathlib import Path

CPU_FOLDER = Path("/sys/devices/system/cpu")
CGROUP_FOLDER = Path("/sys/fs/cgroup")


def count_cores(cpu_folder: Path = CPU_FOLDER, cgroup_folder: Path = CGROUP_FOLDER) -> tuple[int, str]:
    """Return the number of cores and where it came from."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    num_cores, source = count_physical_cores(cpus, cpu_folder), "physical cores"
    quota = read_cpu_quota(cgroup_folder)
    if quota is not None and quota < num_cores:
        return max(1, math.floor(quota)), f"this container's limit of {quota:g} CPUs"
    return num_cores, source


def count_physical_cores(cpus: list[int], cpu_folder: Path) -> int:
    """Count the cores behind logical ``cpus``: siblings share one. Without that knowledge each counts."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((cpu_folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(f"cpu{cpu}")
    return len(cores)


def read_cpu_quota(folder: Path) -> float | None:
    """Return the CPUs that the control group grants (version 2, then 1), None if it sets no limit."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    return None if quota in ("max", "-1") else int(quota) / int(period)
