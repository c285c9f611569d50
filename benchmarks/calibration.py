"""Measures the CPU of this machine for ``smp plan --hardware``.

``python benchmarks/calibration.py here.json`` takes a minute or two; nothing else should run.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environment import REPO
from smp_cli.cores import usable_cores
from smp_cli.doctor.ranks import run_ranks

_LEAST_S = 1e-12  # differences of two measurements can come out below zero on a busy machine
_PIPELINE_RANKS = (2, 4)
_LIMIT_S = 400.0  # of one measurement


def calibrate() -> dict[str, Any]:
    """Returns the keys of a hardware file, for which the cores of this machine are the devices.

    Raises:
        RuntimeError: Ranks cannot start or talk.
    """
    count = usable_cores()
    rates, near = _measure("rates", count), _measure("messages", 2)
    found: dict[str, Any] = {
        "name": f"{platform.node() or 'this machine'}, cpu",
        "source": "measured by benchmarks/calibration.py; 'between' is TCP over the loopback "
        "device, as one machine has no other host: replace it for several",
        "flops": rates["flops"],
        "product_share": 1.0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count,
        "memory_bytes_per_s": rates["moved"],
        "inside": near,
        "between": _measure("messages", 2, shared_memory=False),
        "host_copy_bytes_per_s": rates["copied"],
        "at_once": count,
        "devices_per_host": count,
        "collective": {"bytes_per_s": _sums_per_s(count), "latency_s": near["latency_s"]},
        "overheads": _overheads(count, rates["alone"]),
    }
    found["overheads"]["crowded"] = _crowded(found)
    return found


def _sums_per_s(count: int) -> float:
    """Returns bytes that a rank of a ring sends per second: 2 (n - 1) of n pieces."""
    size = max(2, count)
    share: float = 2 * (size - 1) / size
    return share / _measure("sums", size)["byte s"]


def _overheads(count: int, alone: float) -> dict[str, float]:
    """Returns what cores take besides work and messages while all of them are busy."""
    trained, calls = _measure("training", max(2, count)), _measure("calls", 2)
    found = {
        "microbatch_element_s": trained["microbatch s"],
        "update_element_s": trained["update s"],
        "call_s": calls["call s"],
        "microbatch_s": calls["microbatch s"],
    }
    for name, seconds in found.items():
        if seconds < _LEAST_S:
            _warn_of_noise(name, seconds)
            found[name] = _LEAST_S
    return found | {"alone": max(alone, 1.0), "crowded": 1.0}


def _warn_of_noise(name: str, seconds: float) -> None:
    print(
        f"calibration: overheads.{name} came out as {seconds:.2g} s, which other work on this "
        f"machine has caused; the file counts it as almost nothing ({_LEAST_S:g} s). Measure "
        "again while nothing else runs",
        file=sys.stderr,
    )


def _crowded(known: Mapping[str, Any]) -> float:
    """Returns how many times as long a pipeline takes whose ranks share cores.

    What the prediction misses of a pipeline with a core for each rank as well does not count.

    Args:
        known: All other keys of the hardware file.
    """
    own, shared = (_measure("pipeline", size, text=json.dumps(known)) for size in _PIPELINE_RANKS)
    missed_own, missed_shared = (one["measured s"] / one["predicted s"] for one in (own, shared))
    return max(missed_shared / missed_own, 1.0)


def _measure(kind: str, size: int, *, shared_memory: bool = True, text: str = "") -> dict[str, Any]:
    folders = [str(REPO / "python"), str(REPO / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "SMP_DEVICE": "cpu",
        "SMP_SHM": str(int(shared_memory)),
        "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder),
    }
    command = ["calibration_rank", kind, *([text] if text else [])]
    return run_ranks(command, settings, size, _LIMIT_S)


def main() -> int:
    """Writes the file and prints it; 2 for a wrong path."""
    if len(sys.argv) != 2 or not Path(sys.argv[1]).parent.is_dir():
        print("usage: calibration.py FILE, in a folder that exists", file=sys.stderr)
        return 2
    text = json.dumps(calibrate(), indent=2)
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
