"""Ways between ranks of this machine, measured: a few processes that call smp.init."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from smp_cli.doctor.report import Section
from smp_cli.sagemaker import count_gpus

_SLOW_ROUND_TRIP_US = 2000.0
_SLOW_BYTES_PER_S = 2e8
_LANE_BYTES = 64 << 20
_MAX_LANE_RANKS = 8
_LIMIT_S = 100.0  # less than that of the probe


def shared_memory() -> Section:
    """Messages through memory that ranks of a host share."""
    section = _measure("transport shared memory", {"SMP_SHM": "1"})
    if section.values and not section.values["shared"]:
        section.problems.append(
            "two ranks of this machine cannot share memory and exchange messages over TCP; see "
            "memfd, and sandboxes that forbid pidfd_getfd or /proc/<pid>/fd"
        )
    return section


def tcp() -> Section:
    """Messages over Gloo, the way between hosts, here over the loopback device."""
    return _measure("transport tcp", {"SMP_SHM": "0"})


def nccl() -> Section:
    """Collectives between two GPUs."""
    count = count_gpus(os.environ)
    if count < 2:
        return Section("transport nccl", {"not measured": f"it needs two GPUs, there are {count}"})
    return _measure("transport nccl", {"SMP_DEVICE": "cuda"}, "nccl")


def lanes() -> Section:
    """How tensors go from the device of one rank to that of another one."""
    count = count_gpus(os.environ)
    if count == 0:
        section = Section("lanes between devices")
        section.values["no GPUs"] = (
            "tensors travel in messages, through shared memory or sockets: see the transports"
        )
        return section
    size = max(2, min(count, _MAX_LANE_RANKS))
    settings = {"SMP_DEVICE": "cuda", "SMP_SHARE_GPU": "1"}
    return measure_lanes(settings, size, _LANE_BYTES)


def measure_lanes(settings: dict[str, str], size: int, num_bytes: int) -> Section:
    """The lane of each pair of ``size`` ranks, and bytes per second of tensors of ``num_bytes``."""
    section, found = run_link("lanes between devices", settings, ["lanes", str(num_bytes)], size)
    if found is None:
        return section
    for source, destination, lane, why, bytes_per_s in found["pairs"]:
        words = f"{lane}, {bytes_per_s / 1e9:.2f} GB/s"
        section.values[f"ranks {source} and {destination}"] = (
            words if lane == "ipc" else f"{words} ({why})"
        )
    if found["missed"]:
        section.problems.append(
            f"{found['missed']:.0f} tensors of {num_bytes} bytes found no place on the lane of "
            "their pair and went through the host; its bandwidth is that of both"
        )
    return section


def _measure(name: str, settings: dict[str, str], kind: str = "messages") -> Section:
    """Two ranks; the first one's result."""
    section, found = run_link(name, settings, [kind], 2)
    if found is not None:
        section.values = found
        _judge(section)
    return section


def run_link(
    name: str,
    settings: dict[str, str],
    arguments: list[str],
    size: int,
    limit_s: float = _LIMIT_S,
) -> tuple[Section, dict[str, Any] | None]:
    """What the first of some ranks has found; None with the problem in the section."""
    section = Section(name)
    with tempfile.TemporaryDirectory(prefix="smp-doctor-") as folder:
        ranks = [_start(Path(folder), rank, size, arguments, settings) for rank in range(size)]
        try:
            outputs = [rank.communicate(timeout=limit_s)[0] for rank in ranks]
        except subprocess.TimeoutExpired:
            section.problems.append(
                f"{_count(size)} ranks did not meet or talk within {limit_s:g} s"
            )
            return section, None
        finally:
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
                rank.wait()
    failed = [i for i, rank in enumerate(ranks) if rank.returncode != 0]
    if failed:
        lines = [line for line in outputs[failed[0]].splitlines() if line.strip()]
        section.problems.append(
            f"{_count(size)} ranks could not talk to each other: "
            f"{lines[-1] if lines else 'no output'}"
        )
        return section, None
    return section, json.loads(outputs[0].splitlines()[-1])


def _start(
    folder: Path, rank: int, size: int, arguments: list[str], settings: dict[str, str]
) -> subprocess.Popen[str]:
    ours = ("SMP_", "SM_", "OMPI_", "PMIX_", "SLURM_", "TORCHELASTIC_")
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in others}
    env |= {
        "SMP_RANK": str(rank),
        "SMP_WORLD_SIZE": str(size),
        "SMP_RENDEZVOUS": f"file://{folder}/rendezvous",
        "SMP_TIMEOUT_S": "60",
        "SMP_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        **settings,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "smp_cli.doctor.link", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _count(size: int) -> str:
    return "two" if size == 2 else str(size)


def _judge(section: Section) -> None:
    round_trip_us, bytes_per_s = (section.values[k] for k in ("round trip us", "bytes per s"))
    section.values["bandwidth"] = f"{section.values.pop('bytes per s') / 1e9:.2f} GB/s"
    section.values["round trip"] = f"{section.values.pop('round trip us'):.0f} us"
    if round_trip_us > _SLOW_ROUND_TRIP_US:
        section.problems.append(
            f"a message takes {round_trip_us / 1e3:.1f} ms there and back; the machine is busy, or "
            "threads of ranks share too few cores"
        )
    if bytes_per_s < _SLOW_BYTES_PER_S:
        section.problems.append(
            f"{bytes_per_s / 1e6:.0f} MB/s between two ranks of one machine is slow; it is busy, "
            "or its memory or network is throttled"
        )
