"""``smp doctor --calibrate``: the numbers that ``smp plan`` asks of a machine, measured here."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smp_cli.cores import usable_cores
from smp_cli.doctor.probes import python_path
from smp_cli.doctor.transports import run_link
from smp_cli.sagemaker import count_gpus

# Of differences of two measurements, which may come out below zero on a busy machine.
_LEAST_S = 1e-12
_PIPELINES = (2, 4)  # ranks
_LIMIT_S = 400.0  # of one measurement; seconds where nothing else runs


def calibrate(path: str) -> int:
    """Writes a file for ``smp plan --hardware``; prints what it has measured.

    Args:
        path: of the file; its folder has to be there.

    Returns:
        0; 1 if something could not be measured; 2 if the file cannot be written.
    """
    target = Path(path)
    if not target.parent.is_dir() or target.is_dir():
        print(f"smp doctor: {path!r} is no file in a folder that is there", file=sys.stderr)
        return 2
    try:
        found = measure(count_gpus(os.environ))
    except RuntimeError as error:
        print(f"smp doctor: {error}", file=sys.stderr)
        return 1
    target.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))
    return 0


def measure(num_gpus: int) -> dict[str, Any]:
    """Rates of one device, and of the ways between two ranks.

    Args:
        num_gpus: of this machine; without any its cores count as devices, one thread each.

    Raises:
        RuntimeError: ranks cannot start or talk; says why.
    """
    device = {"SMP_DEVICE": "cuda" if num_gpus else "cpu"}
    count = num_gpus or usable_cores()
    rates = _result(device, "rates", 1 if num_gpus else count)
    several = {**device, "SMP_SHM": "1"} if num_gpus > 1 else {"SMP_SHM": "1"}
    near = _result(several, "nccl" if num_gpus > 1 else "messages", 2)
    far = _result({"SMP_SHM": "0"}, "messages", 2)
    found = {
        "name": f"{platform.node() or 'this machine'}, {rates['device']}",
        "source": "measured by smp doctor --calibrate; 'between' is TCP over the loopback device, "
        "as one machine has no other host: replace it for several",
        "flops": rates["flops"],
        "product_share": 1.0,
        "memory_bytes": rates["memory"] if num_gpus else _host_bytes() // count,
        "memory_bytes_per_s": rates["moved"],
        "inside": _link(near),
        "between": _link(far),
        "host_copy_bytes_per_s": rates["copied"],
        "at_once": 0 if num_gpus else count,
        "devices_per_host": count,
        "collective": None,
        "overheads": None,
    }
    if num_gpus == 0:
        found |= _of_cores(count, rates.get("alone", 1.0), near)
        found["overheads"]["crowded"] = _crowded(found)
    return found


def _of_cores(count: int, alone: float, near: dict[str, Any]) -> dict[str, Any]:
    """What cores of a CPU take besides work and messages, while all of them are busy."""
    cpu = {"SMP_DEVICE": "cpu"}
    trained = _result(cpu, "training", max(2, count))
    calls = _result(cpu, "calls", 2)
    size = max(2, count)
    # A ring sends 2 (n - 1) of n pieces.
    bytes_per_s = 2 * (size - 1) / size / _result(cpu, "sums", size)["byte s"]
    return {
        "collective": {"bytes_per_s": bytes_per_s, "latency_s": _link(near)["latency_s"]},
        "overheads": {
            "microbatch_element_s": max(trained["microbatch s"], _LEAST_S),
            "update_element_s": max(trained["update s"], _LEAST_S),
            "call_s": max(calls["call s"], _LEAST_S),
            "microbatch_s": max(calls["microbatch s"], _LEAST_S),
            "alone": max(alone, 1.0),
            "crowded": 1.0,
        },
    }


def _crowded(known: Mapping[str, Any]) -> float:
    """As many times as long as a plan says takes a pipeline whose ranks share cores.

    That is, more than one whose ranks have a core each: what a plan misses of both does not count.

    Args:
        known: all other numbers.
    """
    text = json.dumps(known)
    own, shared = (_result({"SMP_DEVICE": "cpu"}, "pipeline", n, text) for n in _PIPELINES)
    return max(_missed(shared) / _missed(own), 1.0)


def _missed(found: Mapping[str, float]) -> float:
    return found["measured s"] / found["predicted s"]


def _result(settings: dict[str, str], kind: str, size: int, *words: str) -> dict[str, Any]:
    settings = {**settings, "PYTHONPATH": python_path(os.environ)}
    section, found = run_link(f"calibration, {kind}", settings, [kind, *words], size, _LIMIT_S)
    if found is None:
        raise RuntimeError(f"{kind}: {'; '.join(section.problems)}")
    return found


def _link(found: dict[str, Any]) -> dict[str, float]:
    return {"bytes_per_s": found["bytes per s"], "latency_s": found["round trip us"] / 2e6}


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
