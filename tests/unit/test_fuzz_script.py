"""`scripts/fuzz.sh` ends as its fuzzers end."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.patience import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]
NAMES = ("liveness", "handshake", "schedule", "wire")


def run(folder: Path, fails: str = "none") -> subprocess.CompletedProcess[str]:
    """The script, with fuzzers that say how they were called; the one of `fails` ends with 1."""
    script = folder / "scripts" / "fuzz.sh"
    for path in (script.parent, folder / "build"):
        path.mkdir()
    shutil.copy(REPO / "scripts" / "fuzz.sh", script)
    _program(script.parent / "build.sh", "exit 0")
    for name in NAMES:
        status = 1 if name == fails else 0
        _program(folder / "build" / f"smp_fuzz_{name}", f'echo "called: $*"; exit {status}')
    return subprocess.run(
        [str(script), "build", "python", "70", "3"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_each_fuzzer_gets_its_corpus_and_the_seed(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{name}: called: -runs=70 -seed=3 tests/fuzz/corpus/{name}" for name in NAMES
    ]


def test_a_fuzzer_that_fails_ends_the_script(tmp_path: Path) -> None:
    done = run(tmp_path, fails="schedule")
    assert done.returncode == 1
    assert "handshake" in done.stdout and "wire" not in done.stdout
