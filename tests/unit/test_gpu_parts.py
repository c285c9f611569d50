"""Every part of `make gpu` runs on the CPU at tiny sizes, with the tools of a machine for GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import build, kernels, page, parts, training
from benchmarks.gpu.figures import Figures
from benchmarks.gpu.parts import CALLS, PARTS
from tests.dist.pool import Pool
from tests.dist.processes import run_ranks
from tests.patience import PATIENCE_S
from tests.unit.test_gpu_figures import Gpu

REPO = Path(__file__).resolve().parents[2]
RUN = REPO / "benchmarks" / "gpu" / "run.py"
#: Packages of developers that a machine for GPUs need not have.
ABSENT = ("accelerate", "peft", "rich", "xdist", "ruff", "mypy")
#: All that `make gpu` calls, but for the compiler and what CMake finds.
TOOLS = ("bash", "sh", "make", "nproc", "dirname", "mkdir", "tee", "timeout")
#: A figure that each dry run must have.
FIGURES = {
    "build": "operators",
    "kernels": "tests/unit/test_optim_ops.py: passed",
    "training": "tests/gpu/test_no_synchronisation.py: passed",
    "bandwidth": "FusedAdam, 1e+04 parameters",
    "attention": "smp.nn, a layer and its ends, padding: forward and backward",
    "attention-order": "cases of the table",
    "gptj-layer": "Hugging Face, compiled, 1 layer, 2 x 4 sequences: tokens per second",
    "gptj-steps": "smp.nn, all 2 layers, 8 x 4 sequences: peak memory over the formula",
    "share": "backward: a hop of 0 MB over ipc",
    "nccl": "kill 1: status of the other rank",
    "graph": "FusedAdam: largest difference",
    "sanitizer": "what the sanitizer runs",
}
#: Parts that the test of `make` runs.
BY_MAKE = ("build", "kernels")

WITHOUT = """
import importlib.machinery, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            return None
        return super().find_spec(name, path, target)

finders = sys.meta_path
finders[finders.index(importlib.machinery.PathFinder)] = Without
"""


def lines_of(folder: Path, part: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / f"{part}.jsonl").read_text().splitlines()]


def check(folder: Path, part: str, output: str) -> None:
    """The lines of a dry run, and the page that is made of them."""
    lines = lines_of(folder, part)
    assert not [line for line in lines if line["state"] == "failed"], output
    assert FIGURES[part] in {line["name"] for line in lines}
    assert {line["part"] for line in lines} == {part} and all(line["is_dry"] for line in lines)
    for line in lines:
        assert (line["value"] is None) == (line["state"] == "skipped")
        assert line["note"] or line["state"] != "skipped"
    text = page.page(lines)
    assert "A dry run" in text and FIGURES[part] in text


def test_there_is_a_figure_to_look_for_in_every_part() -> None:
    assert list(FIGURES) == list(PARTS)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("part", [part for part in PARTS if part not in BY_MAKE])
def test_a_part_runs_dry(pool: Pool, tmp_path: Path, part: str) -> None:
    argv = [part, "--out", str(tmp_path), "--device", "cpu", "--limit-s", "280"]
    env = {"SMP_DEVICE": "cpu", "COMMIT": "0"}
    [ended] = run_ranks(pool, RUN, 1, argv, env=env, launcher=None)
    assert ended.returncode == 0, ended.output
    check(tmp_path, part, ended.output)


def with_few_tools(folder: Path) -> dict[str, str]:
    """Variables of a machine that has what `make gpu` needs and nothing else."""
    tools, packages = folder / "tools", folder / "packages"
    tools.mkdir()
    packages.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (tools / tool).symlink_to(found)
    (packages / "sitecustomize.py").write_text(WITHOUT.replace("{absent}", repr(ABSENT)))
    own = {name: value for name, value in os.environ.items() if name.startswith(("LC_", "LANG"))}
    return own | {
        "PATH": str(tools),
        "PYTHONPATH": str(packages),
        "PYTEST_ADDOPTS": "-p no:xdist -p no:xdist.looponfail",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }


def make_gpu(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [shutil.which("make") or "make", "gpu", "NO_VENV=1", f"PYTHON={sys.executable}"]
    return subprocess.run(
        [*command, "DEVICE=cpu", f"GPU_OUT={folder / 'out'}", *arguments],
        cwd=REPO,
        env=with_few_tools(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.sample(keep=0)
def test_make_needs_nothing_that_only_developers_have(tmp_path: Path) -> None:
    before = set((REPO / "benchmarks" / "results").iterdir())
    done = make_gpu(tmp_path, "PART=kernels")
    assert done.returncode == 0, done.stdout
    for part in BY_MAKE:
        check(tmp_path / "out", part, done.stdout)
        assert (tmp_path / "out" / f"{part}.log").read_text() in done.stdout
    [made] = (tmp_path / "out").glob("*.md")
    text = made.read_text()
    assert "A dry run" in text and FIGURES["build"] in text and FIGURES["kernels"] in text
    assert set((REPO / "benchmarks" / "results").iterdir()) == before


def test_packages_that_are_absent_there_are_hidden_here(tmp_path: Path) -> None:
    probe = f"import importlib.util as u; print([n for n in {ABSENT} if u.find_spec(n)])"
    command = [sys.executable, "-c", probe]
    assert subprocess.check_output(command, env=with_few_tools(tmp_path), text=True) == "[]\n"
    assert "xdist" in subprocess.check_output(command, text=True)


@pytest.mark.sample(keep=0)
def test_a_part_that_is_killed_fails_and_the_others_go_on(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/bash\n"
        f'case "$*" in *"gpu.run graph"*) echo begins; exec {shutil.which("sleep")} 60;;\n'
        f'*"gpu.run"*) exit 0;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    done = make_gpu(tmp_path, "PART=graph share", "GPU_LIMIT=26", f"PYTHON={python}")
    assert done.returncode != 0 and "FAILED: graph\n" in done.stdout, done.stdout
    assert re.search(r"=== share: \d+ s, status 0", done.stdout)
    [line] = lines_of(tmp_path / "out", "graph")
    assert (line["name"], line["state"], line["note"]) == ("end", "failed", "ended by its limit")
    assert (tmp_path / "out" / "graph.log").read_text() == "begins\n"
    assert "ended by its limit" in next((tmp_path / "out").glob("*.md")).read_text()


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    done = make_gpu(tmp_path, "PART=kernel")
    assert done.returncode != 0 and "no part is called ['kernel']; there are build" in done.stdout


def test_the_build_leaves_the_development_build_alone() -> None:
    words = build.command("python3")
    assert "build/dev" not in words and {"-DSMP_TESTS=OFF", "-DSMP_MPI=off"} <= set(words)
    assert words[words.index("--target") + 1] == "smp_extension"


def test_all_files_of_tests_for_gpus_are_in_a_part() -> None:
    found = {f"tests/gpu/{path.name}" for path in (REPO / "tests" / "gpu").glob("test_*.py")}
    assert found <= {*training.files(), *training.OTHERS}
    assert [row.name for row in training.rows("training", is_dry=False)] == training.files()
    assert [row.name for row in kernels.rows("kernels", is_dry=False)] == list(kernels.FILES)
    assert all((REPO / path).exists() for path in (*training.files(), *training.OTHERS))


@pytest.mark.parametrize("part", PARTS)
def test_rows_of_a_part_are_known_without_a_device(part: str) -> None:
    rows = PARTS[part].rows(is_dry=False)
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) and all(row.needed_s < row.limit_s for row in rows)
    # A dry run does the same; the sanitizer's tools and the long files of tests are left out.
    assert {row.name for row in PARTS[part].rows(is_dry=True)} <= set(names)


def test_four_calls_of_less_than_ten_minutes_do_everything_in_half_an_hour() -> None:
    assert ["build", *(part for call in CALLS for part in call)] == list(PARTS)
    assert parts.named([]) == list(PARTS) and parts.named(["--call", "3"]) == list(CALLS[2])
    for wrong in (["--call"], ["--call", "0"], ["--call", "5"], ["--call", "x"]):
        with pytest.raises(ValueError, match="expected one of 1 2 3 4"):
            parts.named(wrong)
    text = (REPO / "scripts" / "gpu.sh").read_text()
    [whole] = re.findall(r"^limit=(\d+)$", text, re.MULTILINE)
    [call] = re.findall(r"== --call \]\] && limit=(\d+)$", text, re.MULTILINE)
    start_s, page_s = 60, 10
    assert len(CALLS) == 4 and 4 * (int(call) + start_s + page_s) <= 1800
    assert int(whole) + start_s <= 600


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    done = make_gpu(tmp_path, "CALL=1")
    assert done.returncode != 0 and "===" not in done.stdout


def test_a_checkout_that_cannot_be_written_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = Figures("build", tmp_path, Gpu(), 60.0)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    build.build(figures)
    [line] = lines_of(tmp_path, "build")
    assert line["state"] == "failed" and "run make gpu in a copy of it" in line["note"]


def test_a_build_that_its_limit_ends_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        build, "command", lambda python: [python, "-c", "import signal; signal.pause()"]
    )
    build.build(Figures("build", tmp_path, Gpu(), 6.0))
    [line] = lines_of(tmp_path, "build")
    assert line["state"] == "failed" and "did not end within" in line["note"]
