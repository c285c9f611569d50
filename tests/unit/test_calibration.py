"""``benchmarks/calibration.py`` measures what ``smp plan --hardware`` reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from smp_cli import cores

from smp.planning import hardware
from tests.conftest import REPO

SCRIPT = REPO / "benchmarks" / "calibration.py"


def calibrate(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_calibration_is_hardware_for_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    done = calibrate(file)
    assert done.returncode == 0, done.stderr
    found = hardware.load(str(file))
    assert json.loads(done.stdout) == found.to_json()
    assert found.at_once == found.devices_per_host == cores.usable_cores()
    assert found.flops_per_byte("fp32") > 0 and found.inside.latency_s > 0
    # Processor time of one core: an element of a small transformer takes nanoseconds.
    overheads = found.overheads
    assert overheads is not None and found.collective is not None
    assert 1e-10 < overheads.microbatch_element_s < 1e-7
    assert 1e-10 < overheads.update_element_s < 1e-7
    assert 1e-6 < overheads.call_s < 1e-1 and overheads.crowded >= 1


def test_calibration_into_no_folder_is_bad_use(tmp_path: Path) -> None:
    done = calibrate(tmp_path / "no" / "here.json")
    assert done.returncode == 2 and "usage: calibration.py FILE" in done.stderr
