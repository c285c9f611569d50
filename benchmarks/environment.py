"""Describes the machine and the software on which a result was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers

import smp

REPO = Path(__file__).resolve().parents[1]


def describe() -> dict[str, object]:
    """Hardware, versions and commit."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "num_cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "smp": smp.__version__,
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    """Commit of the checkout, with "+changes" if files differ from it; "none" outside of git."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "none"
    return head + ("+changes" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", REPO, *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""
