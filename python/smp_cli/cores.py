"""Counts the cores that this process may use: affinity and the quota of its control group."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the cores of the affinity mask, or fewer if the control group has a smaller quota."""
    quota = cpu_quota(cgroup)
    cores = len(os.sched_getaffinity(0))
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Returns the number of cores whose time the control group may use; None without a limit."""
    try:  # version 2, then version 1
        quota, period = (cgroup / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        micros = int((cgroup / "cpu" / "cpu.cfs_quota_us").read_text())
        period_micros = int((cgroup / "cpu" / "cpu.cfs_period_us").read_text())
        return micros / period_micros if micros > 0 else None
    except (OSError, ValueError):
        return None
