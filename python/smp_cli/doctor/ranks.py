"""Measures pairs of ranks of this machine: runs a small job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from smp_cli.doctor.report import Section
from smp_cli.sagemaker import count_gpus

_SLOW_ROUND_TRIP_S = 2e-3
_SLOW_BYTES_PER_S = 2e8
_HOST_BYTES, _DEVICE_BYTES = 16 << 20, 64 << 20
_MAX_DEVICE_RANKS = 8
_LIMIT_S = 100.0  # less than the limit of the probe
_LAUNCHERS = ("SMP_", "SM_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_", "MASTER_")


def over_shared_memory() -> Section:
    """Measures messages through memory that the ranks of a host share."""
    section = measure_pairs("ranks over shared memory", {"SMP_SHM": "1"}, 2, _HOST_BYTES)
    if any(text.startswith("tcp") for text in section.values.values()):
        section.problems.append(
            "two ranks of this machine cannot share memory and exchange messages over TCP; see "
            "memfd, and sandboxes that forbid pidfd_getfd or /proc/<pid>/fd"
        )
    return section


def over_tcp() -> Section:
    """Measures messages over sockets, as between hosts, here over the loopback device."""
    return measure_pairs("ranks over tcp", {"SMP_SHM": "0"}, 2, _HOST_BYTES)


def on_devices() -> Section:
    """Measures tensors from the GPU of each rank to that of each other one."""
    name = "ranks on devices"
    count = count_gpus(os.environ)
    if count == 0:
        return Section(name, {"not measured": "there are no GPUs; tensors travel in messages"})
    size = max(2, min(count, _MAX_DEVICE_RANKS))
    settings = {"SMP_DEVICE": "cuda", "SMP_SHARE_GPU": "1"}
    return measure_pairs(name, settings, size, _DEVICE_BYTES)


def measure_pairs(name: str, settings: Mapping[str, str], size: int, num_bytes: int) -> Section:
    """Starts ranks that measure each pair of them.

    Args:
        name: heading of the section.
        settings: environment variables of the ranks.
        size: number of ranks.
        num_bytes: size of the tensors whose bandwidth is measured.
    """
    section = Section(name)
    try:
        found = run_ranks(["smp_cli.doctor.rank", str(num_bytes)], settings, size, _LIMIT_S)
    except RuntimeError as error:
        section.problems.append(str(error))
        return section
    for pair in found["pairs"]:
        reason = f" ({pair['reason']})" if pair["reason"] else ""
        section.values[f"ranks {pair['first']} and {pair['second']}"] = (
            f"{pair['way']}, round trip {pair['round_trip_s'] * 1e6:.0f} us, "
            f"{pair['bytes_per_s'] / 1e9:.2f} GB/s{reason}"
        )
    _judge(section, found["pairs"])
    if found["missed"]:
        section.problems.append(
            f"{found['missed']:.0f} tensors of {num_bytes} bytes did not fit into the lane of "
            "their pair and were sent through the host; the bandwidth is that of both ways"
        )
    return section


def _judge(section: Section, pairs: list[dict[str, Any]]) -> None:
    slowest_s = max(pair["round_trip_s"] for pair in pairs)
    bytes_per_s = min(pair["bytes_per_s"] for pair in pairs)
    if slowest_s > _SLOW_ROUND_TRIP_S:
        section.problems.append(
            f"a message takes {slowest_s * 1e3:.1f} ms there and back; the machine is busy, or "
            "threads of ranks share too few cores"
        )
    if bytes_per_s < _SLOW_BYTES_PER_S:
        section.problems.append(
            f"{bytes_per_s / 1e6:.0f} MB/s between two ranks of one machine is slow; it is busy, "
            "or its memory or network is throttled"
        )


def run_ranks(
    command: list[str], settings: Mapping[str, str], size: int, limit_s: float
) -> dict[str, Any]:
    """Runs a module by ``smp run`` and returns the JSON that the first rank prints last.

    Args:
        command: module, and its arguments.
        settings: environment variables of the ranks.
        size: number of ranks.
        limit_s: seconds until they have to be done.

    Raises:
        RuntimeError: A rank failed or was not done in time.
    """
    launcher = [sys.executable, "-m", "smp_cli", "run", "-n", str(size), "--output", "raw", "-m"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHERS)}
    own = {"SMP_TIMEOUT_S": "60", "SMP_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [*launcher, *command],
            env={**kept, **own, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{size} ranks did not communicate within {limit_s:g} s") from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip(" +-")]
        said = [line for line in lines if not line.startswith("smp run: ")]
        who = [line for line in said if line.startswith("| who ")]
        reason = (who or said[-1:] or lines or ["no output"])[0]
        raise RuntimeError(f"{size} ranks could not communicate: {reason.removeprefix('| who ')}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
