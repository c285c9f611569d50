"""`requirements/locked` has what `requirements` asks for; environments are made of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
REQUIREMENTS = REPO / "requirements"
LOCKED = REQUIREMENTS / "locked"
#: Locked file to those it is made of.
SOURCES = {
    "run": ("torch", "run"),
    "all": ("torch", "run", "test", "tools"),
    "system": ("system",),
    "site": ("site",),
    "wheel": ("wheel",),
    "cuda": ("cuda",),
}
_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", re.MULTILINE)


def pins(path: Path) -> dict[str, set[str]]:
    """Normal names of packages to their versions, of which markers choose one."""
    found: dict[str, set[str]] = {}
    for name, version in _PIN.findall(path.read_text()):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


@pytest.mark.parametrize("name", SOURCES)
def test_locked_files_have_the_versions_that_are_asked_for(name: str) -> None:
    locked = pins(LOCKED / f"{name}.txt")
    for source in SOURCES[name]:
        wanted = pins(REQUIREMENTS / f"{source}.txt")
        assert wanted, source
        differs = {p: v for p, v in wanted.items() if locked.get(p) != v}
        assert differs == {}, f"{source}.txt was changed: run scripts/lock.sh"


def test_there_is_no_other_locked_file() -> None:
    assert {path.stem for path in LOCKED.iterdir()} == set(SOURCES)


def test_what_scripts_import_is_locked_as_for_the_tests() -> None:
    everything = pins(LOCKED / "all.txt")
    run = pins(LOCKED / "run.txt")
    assert len(run) > 30 and {p: v for p, v in run.items() if everything.get(p) != v} == {}


@pytest.mark.parametrize("name", SOURCES)
def test_every_package_has_hashes_of_its_files(name: str) -> None:
    text = (LOCKED / f"{name}.txt").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert lines
    for line in lines:
        assert _PIN.match(line), line
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", line), line


# ---- what `scripts/setup_venv.sh` gives to pip -----------------------------------------

_PYTHON = """#!/bin/sh
case $1 in
  -m) mkdir -p "$3/bin" && ln -s "$0" "$3/bin/python" ;;
  scripts/install.py) shift 2 && echo "$@" >> calls ;;
esac
"""


def _calls(folder: Path, *arguments: str, **variables: str) -> list[str]:
    """Arguments of pip, one line for each time that it is started."""
    shutil.copytree(REQUIREMENTS, folder / "requirements")
    (folder / "scripts").mkdir()
    shutil.copy(REPO / "scripts" / "setup_venv.sh", folder / "scripts")
    python = folder / "python"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    command = [str(folder / "scripts" / "setup_venv.sh"), "venv", *arguments]
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), **variables}
    subprocess.run(command, check=True, cwd=folder, env=environment, capture_output=True)
    return (folder / "calls").read_text().splitlines()


def test_environments_are_made_of_locked_files_alone(tmp_path: Path) -> None:
    calls = _calls(tmp_path, "all")
    files = ("venv/.smp_build.txt", "requirements/locked/run.txt", "requirements/locked/all.txt")
    assert calls == [f"--no-deps --require-hashes -r {name}" for name in files]
    first = (tmp_path / files[0]).read_text().splitlines()
    torch = (REQUIREMENTS / "torch.txt").read_text().splitlines()[-1]
    assert first[0].startswith(f"{torch} ") and not first[-1].endswith("\\")
    assert all("--hash=sha256:" in line for line in first[1:] if line.startswith(" "))


@pytest.mark.parametrize(
    ("arguments", "variables"), [(("all", "2.6.0"), {}), (("all",), {"HASHES": "off"})]
)
def test_another_torch_and_other_files_are_asked_for(
    tmp_path: Path, arguments: tuple[str, ...], variables: dict[str, str]
) -> None:
    calls = _calls(tmp_path, *arguments, **variables)
    assert len(calls) == 3 and not any("locked" in call or "hashes" in call for call in calls)
    assert calls[-1].endswith("-r requirements/test.txt -r requirements/tools.txt")


# ---- images ------------------------------------------------------------------------------


def test_images_install_locked_files_alone() -> None:
    text = (REPO / "docker" / "cuda.Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install ([^&\n]*)", text)
    assert len(installs) == 3
    for arguments in installs:
        assert "--no-index" in arguments or "--require-hashes" in arguments, arguments
    names = re.findall(r"-r (\S+)", text)
    assert len(names) == 2 and all((REPO / name).is_file() for name in names)
