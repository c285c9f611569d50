"""`smp explain` and `smp simulate`: figures agree with the partition, circles are named."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from smp_cli.main import main
from torch import Tensor, nn

from smp.pipeline import schedules
from smp.planning.simulation import NotOrdered, prove

MODEL = "tests.unit.test_explain_simulate:stack"
TWO = "pipeline_parallel_degree=2,microbatches=4"


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6))
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def stack() -> tuple[nn.Module, dict[str, Tensor]]:
    return Stack(), {"x": torch.zeros(1, 16)}


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    command, *options = words
    assert main([command, MODEL, *options]) == status
    captured = capsys.readouterr()
    if status:
        assert captured.err.count("\n") == 1 or captured.out
    return captured.out if not status or captured.out else captured.err


def facts(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *words, "--json", status=status))
    return found


# ---- explain


def test_explanation_has_all_costs_and_one_candidate_is_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = facts(capsys, "explain", "--config", TWO, "--microbatch", "8")
    assert sum(module["compute_share"] for module in found["modules"]) == pytest.approx(1, abs=0.02)
    parameters = 4 * sum(p.numel() for p in Stack().parameters())
    assert sum(module["param_bytes"] for module in found["modules"]) == parameters
    assert sum(rank["param_bytes"] for rank in found["ranks"]) == parameters
    assert {module["pp_rank"] for module in found["modules"]} == {0, 1}
    taken = [candidate for candidate in found["considered"] if candidate["is_taken"]]
    assert taken and min(c["step_ratio"] for c in found["considered"]) == pytest.approx(
        found["step_ratio"]
    )
    assert found["bounds"]["step_ratio"] == found["step_ratio"] > 1


@pytest.mark.sample(keep=0)
def test_what_if_is_the_partition_of_the_file_that_it_writes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file, page = tmp_path / "partition.txt", tmp_path / "page.html"
    words = ("--what-if", "blocks.0=1", "--write", str(file), "--page", str(page))
    asked = facts(capsys, "explain", "--config", TWO, *words)
    moved = asked["what_if"]
    place = {module["name"]: module["pp_rank"] for module in moved["modules"]}
    assert place["blocks.0"] == 1 and moved["largest_load"] > asked["largest_load"]
    again = facts(capsys, "explain", "--config", f"{TWO},partition_file={file}")
    assert again["decided_by"] == "file" and again["considered"] == []
    assert again["modules"] == moved["modules"]
    assert again["bounds"]["step_ratio"] == pytest.approx(moved["step_ratio"])
    text = page.read_text()
    assert "What if" in text and "<script" not in text and not re.search(r"(src|href)=", text)


@pytest.mark.sample(keep=0)
def test_memory_of_a_what_if_is_answered_by_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    config = ("--config", f"{TWO},partition_memory_limit=1GB")
    moves = ("--what-if", *(f"blocks.{i}=1" for i in range(6)))
    found = facts(capsys, "explain", *config, "--memory", "90kB", *moves, status=1)
    memory = [rank["memory_bytes"] for rank in found["what_if"]["ranks"]]
    assert max(memory) > 90_000
    facts(capsys, "explain", *config, "--memory", "1GB", *moves)


def test_text_tells_why_a_module_is_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, "explain", "--config", TWO, "--module", "head")
    assert "'head' is on rank" in text and "What if" not in text
    assert "bounds the step" in text and "Candidates" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--what-if", "blocks.9=1"), "no module 'blocks.9'"),
        (("--what-if", "blocks.0=2"), "partitions are 0 to 1"),
        (("--what-if", "blocks.0"), "is not NAME=RANK"),
        (("--module", "tail"), "no module 'tail'"),
        (("--page", "/no/such/folder/page.html"), "cannot write"),
        (("--microbatch", "0"), "must be at least 1"),
        (("--config", "microbatches=4"), "there is one partition"),
        (("--config", "pipeline_parallel_degree=40"), ""),
    ],
)
def test_bad_questions_are_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    config = () if "--config" in words else ("--config", TWO)
    status = 2 if text else 1  # too few modules for 40 ranks: it does not fit
    assert text in run(capsys, "explain", *config, *words, status=status)


# ---- simulate


@pytest.mark.parametrize("policy", schedules.POLICIES)
def test_every_action_of_a_policy_stands_behind_what_it_waits_for(
    capsys: pytest.CaptureFixture[str], policy: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    config = f"pipeline_parallel_degree=2,microbatches=6,pipeline={policy}"
    found = facts(capsys, "simulate", "--config", config, "--page", str(page))
    chunks = 2 if policy == "virtual_interleaved" else 1
    kinds = 3 if policy == "zero_bubble" else 2
    assert found["deadlock"]["actions"] == 6 * 2 * chunks * kinds == len(found["timeline"])
    assert found["unit"] == "units" and 0 < found["bubble"] < 1
    busy = sum(rank["busy"] for rank in found["ranks"])
    assert busy == pytest.approx(6 * 1000, rel=1e-3), "six microbatches of the whole model"
    text = page.read_text()
    assert text.count("<title>") == len(found["timeline"]) + 1 and "Why it cannot deadlock" in text


def test_given_time_of_a_microbatch_scales_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys, "simulate", "--config", TWO, "--microbatch-ms", "50")
    assert found["unit"] == "ms"
    assert sum(rank["busy"] for rank in found["ranks"]) == pytest.approx(4 * 50, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--config", TWO, "--microbatch-ms", "0"), "no time above 0"),
        (("--config", f"{TWO},pipeline=circle"), "pipeline='circle'"),
    ],
)
def test_bad_use_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    assert text in run(capsys, "simulate", *words, status=2)


STAGES = [schedules.Stage(rank, 1.0, 2.0) for rank in range(3)]


def swapped(found: schedules.Simulation, first: str, second: str) -> schedules.Simulation:
    """The same step with two actions of rank 1 in each other's place."""
    by_name = {e.action: e for e in found.timeline if e.rank == 1}
    changed = {
        id(by_name[a]): dataclasses.replace(
            by_name[a], start_ms=by_name[b].start_ms, end_ms=by_name[b].end_ms
        )
        for a, b in ((first, second), (second, first))
    }
    return dataclasses.replace(found, timeline=tuple(changed.get(id(e), e) for e in found.timeline))


def test_proof_follows_waits_itself() -> None:
    found = schedules.simulate(STAGES, 4)
    proof = prove(found, 3, 4, 4)
    # 21 of the 24 actions have one before them, 8 an input, 12 a forward, 8 a gradient.
    assert len(proof.order) == 24 and proof.num_waits == 21 + 8 + 12 + 8
    assert [(w.rank, w.action) for w in proof.order[-1][2]] == [(0, "B2"), (0, "F3"), (1, "B3")]
    with pytest.raises(NotOrdered, match=r"rank 1 runs B0 before"):
        prove(swapped(found, "F0", "B0"), 3, 4, 4)
    with pytest.raises(NotOrdered, match=r"rank 1 runs B1 before"):
        prove(swapped(found, "B1", "B0"), 3, 4, 4)
    with pytest.raises(NotOrdered, match="lets 2 microbatches in"):
        prove(found, 3, 4, 1)
    lost = dataclasses.replace(found, timeline=found.timeline[:-1])
    with pytest.raises(NotOrdered, match="23 of 24 actions"):
        prove(lost, 3, 4, 4)
