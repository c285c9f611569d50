"""The run manifest and the event file, as orchestrators read them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import smp
from smp import _event_lines
from smp.world import events
from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_ranks
from tests.installed import python_path
from tests.patience import PATIENCE_S

SCRIPT = REPO / "tests" / "dist" / "scripts" / "going_on.py"
HEAD = ["v", "time", "event", "run", "attempt"]


def read(path: Path) -> list[dict[str, Any]]:
    """Reads events; each line is whole, and has exactly the fields of its event."""
    text = path.read_text()
    assert text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    fields = {e.NAME: [f.name for f in dataclasses.fields(e)] for e in events.EVENTS}
    for line in lines:
        assert list(line) == [*HEAD, *fields[line["event"]]]
        assert line["v"] == 1
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    return lines


def names(lines: list[dict[str, Any]]) -> list[str]:
    return [line["event"] for line in lines]


def run(folder: Path, world_size: int, *arguments: str, **env: str) -> tuple[int, Path, Path]:
    """Runs the script of the tests of going on by ``smp run``."""
    found = folder / "events.jsonl", folder / "manifest.json"
    command = [sys.executable, "-m", "smp_cli", "run", "-n", str(world_size), "--grace-s=60"]
    done = subprocess.run(
        [*command, f"--events={found[0]}", f"--manifest={found[1]}", *arguments],
        env={**os.environ, "PYTHONPATH": python_path(), **env},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    print(done.stdout, done.stderr)
    return done.returncode, *found


@pytest.mark.sample(keep=0)
@pytest.mark.waits
def test_a_job_that_is_started_again_has_one_name(tmp_path: Path) -> None:
    config = json.dumps({"pipeline_parallel_degree": 2, "microbatches": 2})
    status, path, manifest = run(
        tmp_path, 2, "--max-restarts=1", str(SCRIPT), f"--config={config}", "--steps=3",
        f"--save={tmp_path / 'checkpoints'}", SMP_FAULT="rank=1,step=2,kind=exit,code=9",
    )  # fmt: skip
    assert status == 0
    lines = read(path)
    first, second = ([x for x in lines if x["attempt"] == attempt] for attempt in (0, 1))
    assert names(first) == ["started", "partitioned", "first_step", "failure", "ended"]
    assert names(second) == ["started", "partitioned", "first_step", "checkpoint", "ended"]
    assert len({line["run"] for line in lines}) == 1
    assert first[3]["rank"] == 1 and first[3]["kind"] == "raised"
    ended = first[4]
    assert (ended["status"], ended["exit_status"], ended["rank"]) == ("failed", 9, 1)
    assert ended["restarts"] and not second[4]["restarts"]
    assert (second[4]["status"], second[4]["exit_status"]) == ("finished", 0)

    saved = second[3]
    files = list(Path(saved["path"]).iterdir())
    there = sum(file.stat().st_size for file in files if file.name != "manifest.json")
    assert saved["bytes"] == there > 1000 and saved["step"] == 3 and saved["store"] is None

    content = json.loads(manifest.read_text())
    assert content["run"] == lines[0]["run"] and content["attempt"] == 1
    assert content["versions"]["smp"] == smp.__version__
    assert content["config"]["microbatches"] == 2 and content["config"]["optimize"] == "memory"
    assert content["layout"] == second[0]["layout"] and content["layout"]["pp"] == 2
    assert content["command"][1:3] == [str(SCRIPT), f"--config={config}"]
    assert [(r["rank"], r["pp"], r["device"]) for r in content["ranks"]] == [
        (0, 0, "cpu"), (1, 1, "cpu"),
    ]  # fmt: skip
    assert len({rank["pid"] for rank in content["ranks"]}) == 2
    (partition,) = content["partitions"]
    assert partition["model"] == 0 and set(partition["modules"].values()) == {"0", "1"}
    assert not list(tmp_path.glob("*.draft"))


@pytest.mark.waits
def test_another_rank_goes_on_with_the_file(tmp_path: Path) -> None:
    config = json.dumps(
        {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, "on_failure": "shrink"}
    )
    status, path, manifest = run(
        tmp_path, 4, str(SCRIPT), f"--config={config}", "--steps=5", "--die=0:backward:2"
    )
    assert status == 0
    lines = read(path)
    assert names(lines) == [
        "started", "partitioned", "first_step", "failure", "resized", "first_step", "ended",
    ]  # fmt: skip
    failure, resized, step = lines[3:6]
    assert (failure["rank"], failure["kind"]) == (0, "died") and "died" in failure["text"]
    assert (resized["lost"], resized["ranks"]) == ([0, 1], [2, 3])
    assert (resized["layout_before"]["dp"], resized["layout"]["dp"]) == (2, 1)
    assert {"agree", "groups", "models"} <= resized["seconds"].keys()
    assert step["after"] == "resized" and step["seconds"] > 0
    content = json.loads(manifest.read_text())
    assert [rank["rank"] for rank in content["ranks"]] == [2, 3]
    assert content["partitions"] and content["layout"] == resized["layout"]


@pytest.mark.waits
def test_a_process_that_takes_the_place_of_rank_0_goes_on_with_the_file(tmp_path: Path) -> None:
    config = json.dumps({"microbatches": 2, "ddp": True, "on_failure": "spare"})
    status, path, manifest = run(
        tmp_path, 2, "--spares=1", str(SCRIPT), f"--config={config}", "--steps=5",
        "--die=0:backward:2",
    )  # fmt: skip
    assert status == 0
    lines = read(path)
    assert len({line["run"] for line in lines}) == 1
    assert names(lines) == [
        "started", "partitioned", "first_step", "failure", "resized", "first_step", "ended",
    ]  # fmt: skip
    resized, step = lines[4:6]
    assert step["after"] == "resized"
    assert (resized["lost"], resized["ranks"]) == ([0], [2, 1])
    assert resized["layout_before"] == resized["layout"]
    content = json.loads(manifest.read_text())
    assert [rank["rank"] for rank in content["ranks"]] == [2, 1]
    assert content["partitions"] and content["run"] == lines[0]["run"]


@pytest.mark.waits
def test_processes_that_have_replaced_all_ranks_know_the_job(tmp_path: Path) -> None:
    config = json.dumps({"microbatches": 2, "ddp": True, "on_failure": "spare"})
    status, path, manifest = run(
        tmp_path, 2, "--spares=2", str(SCRIPT), f"--config={config}", "--steps=7",
        "--die=0:backward:2", "--die=1:backward:4",
    )  # fmt: skip
    assert status == 0
    lines = read(path)
    assert [line["ranks"] for line in lines if line["event"] == "resized"] == [[2, 1], [2, 3]]
    assert names(lines)[-1] == "ended" and len({line["run"] for line in lines}) == 1
    assert [rank["rank"] for rank in json.loads(manifest.read_text())["ranks"]] == [2, 3]


@pytest.mark.waits
def test_without_smp_run_ranks_write_the_end(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    config = json.dumps({"ddp": True})
    arguments = [f"--config={config}", "--steps=3", "--die=0:forward:1"]
    ended = run_ranks(
        pool, SCRIPT, 2, arguments, env={"SMP_EVENTS": str(path), "SMP_RUN_ID": "mine"}
    )
    assert ended[0].returncode == -signal.SIGKILL and ended[1].returncode == 1
    lines = read(path)
    assert names(lines) == ["started", "partitioned", "first_step", "failure", "ended"]
    assert {line["run"] for line in lines} == {"mine"}
    assert (lines[3]["rank"], lines[3]["kind"]) == (0, "died")
    assert (lines[4]["status"], lines[4]["exit_status"]) == ("failed", None)


@pytest.mark.waits
def test_a_file_that_cannot_be_written_ends_init_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for variable in ("SMP_EVENTS", "SMP_MANIFEST"):
        env = {variable: str(tmp_path / "missing" / "file")}
        ended = run_ranks(pool, SCRIPT, 2, ['--config={"ddp": true}', "--steps=1"], env=env)
        assert [rank.returncode for rank in ended] == [1, 1]
        said = f"{variable}={env[variable]!r} cannot be written on this host"
        assert any(said in rank.output for rank in ended)


def test_a_line_that_was_cut_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"v": 1, "event": "sta')
    _event_lines.append(str(path), "ended", "run", 0, {"status": "finished"})
    cut, line, end = path.read_text().split("\n")
    assert (cut, end) == ('{"v": 1, "event": "sta', "") and json.loads(line)["event"] == "ended"


def test_lines_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    code = (
        "import sys; from smp_cli.events import _LINES\nfor i in range(200):\n"
        "    _LINES['append'](sys.argv[1], 'ended', sys.argv[2], i, {'x': 'y' * i})"
    )
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path), name],
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        for name in "ab"
    ]
    assert [writer.wait(PATIENCE_S) for writer in writers] == [0, 0]
    lines = [json.loads(line) for line in path.read_text().splitlines() if line]
    assert sorted((x["run"], x["attempt"]) for x in lines) == [
        (r, i) for r in "ab" for i in range(200)
    ]


def test_a_step_has_no_observer_after_the_first(tmp_path: Path, monkeypatch: Any) -> None:
    from smp.observe.run_events import FirstStepEvent
    from smp.world import runtime

    monkeypatch.setenv("SMP_EVENTS", str(tmp_path / "events.jsonl"))
    smp.init({})
    try:
        import torch

        model = smp.DistributedModel(torch.nn.Linear(2, 2))

        @smp.step
        def step(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = model(x).square().mean()
            model.backward(loss)
            return loss

        observers = runtime.current().observers
        assert observers.of_kind(FirstStepEvent) is not None
        step(torch.ones(2, 2))
        assert observers.of_kind(FirstStepEvent) is None
        before = (tmp_path / "events.jsonl").read_text()
        step(torch.ones(2, 2))
        assert (tmp_path / "events.jsonl").read_text() == before
    finally:
        smp.shutdown()
    assert names(read(tmp_path / "events.jsonl")) == [
        "started", "partitioned", "first_step", "ended",
    ]  # fmt: skip
