"""``smp.trace`` around real steps: what it writes agrees with what the ranks did."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smp.observe.timeline import recorded
from tests.dist.pool import Pool
from tests.dist.training import Run, init, make_model
from tests.reference.data import compute_loss, make_batch

STEPS = 3


def make_step(run: Run) -> Any:
    """A training step on a fresh model, and the call of it."""
    import smp

    init(run)
    model = make_model(run)
    case = run.case

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss = compute_loss(case, model, batch)
        model.backward(loss)
        return loss

    def call(step: int) -> None:
        train_step(make_batch(case, run.dtype, smp.dp_rank(), step))
        model.zero_grad()

    return call


def trace_steps(rank: int, run: Run, path: str, warm_up: bool) -> list[list[str]]:
    """Traces `STEPS` steps; the executed order of each."""
    import smp

    step = make_step(run)
    if warm_up:
        step(0)
    orders = []
    with smp.trace(path):
        for index in range(STEPS):
            step(index)
            orders.append(smp.metrics.executed_order())
    step(0)  # recording is over, the ranks go on
    return orders


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(events of the Chrome trace, data of the page)"""
    trace = json.loads(path.with_name(path.name + ".json").read_text())
    page = path.with_name(path.name + ".html").read_text()
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return trace["traceEvents"], json.loads(data[1])


LAYOUTS = [
    Run("chain", 2, 1, manual=True),
    Run("chain", 4, 1, "simple", manual=True),
    Run("nested", 2, 2, manual=True),
]


@pytest.mark.parametrize("run", LAYOUTS, ids=str)
def test_trace_shows_what_the_ranks_executed(pool: Pool, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "steps"
    orders = pool.run(run.world_size, trace_steps, run, str(path), True)
    events, data = read(path)
    check_boxes(data, orders, first_step=1)
    check_transfers(data)
    check_recorded(recorded.read(path.with_name("steps.json").read_text()), run, data)
    assert data["notes"] == [], "nothing was dropped, every tensor has its arrow, a plan was made"
    assert {e["pid"] for e in events} == set(range(run.world_size))
    starts = sorted(e["id"] for e in events if e["ph"] == "s")
    assert starts == sorted(e["id"] for e in events if e["ph"] == "f")
    assert len(starts) == len(data["transfers"])


def check_boxes(data: dict[str, Any], orders: list[list[list[str]]], first_step: int) -> None:
    words = data["words"]
    assert sorted(row["rank"] for row in data["rows"]) == list(range(len(orders)))
    for row in data["rows"]:
        runs = row["runs"]
        for step, order in enumerate(orders[row["rank"]], start=first_step):
            begun = [words[r[5]] for r in runs if r[6] == step and "/" not in words[r[5]]]
            assert begun == order and order
        for before, after in zip(runs, runs[1:], strict=False):
            assert before[0] + before[1] <= after[0] + 0.2, "boxes of a rank must not overlap"
        assert len(row["bySteps"]) == STEPS
        for figures in row["bySteps"]:
            assert 0 <= figures["bubble"] < 1 and 0 <= figures["planned"] < 1
            assert figures["busy"] > 0
        assert 0 < row["bubble"] < 1
        assert row["plan"] and row["offset"] == row["uncertainty"] == 0
        # Waiting and idle times have a reason.
        assert row["waits"] and all(words[w[5]] for w in row["waits"])
        assert all(words[i[2]] for i in row["idles"])


def check_recorded(found: recorded.Recorded, run: Run, data: dict[str, Any]) -> None:
    """What `smp explain` reads of the file is what the page shows as busy."""
    assert (found.num_steps, found.microbatches) == (STEPS, run.microbatches)
    assert len(found.forward_ms) == len(found.backward_ms) == run.pp
    busy_ms = sum(figures["busy"] for row in data["rows"] for figures in row["bySteps"]) / 1e3
    rounds = STEPS * run.microbatches * run.world_size / run.pp
    assert found.total_ms == pytest.approx(busy_ms / rounds, rel=0.01)
    assert all(0 < bubble < 1 for bubble in found.bubbles)


def check_transfers(data: dict[str, Any]) -> None:
    replica_of = [row["replica"] for row in data["rows"]]
    assert data["transfers"]
    for source, target, sent, received, num_bytes, *_ in data["transfers"]:
        assert source != target and replica_of[source] == replica_of[target]
        assert received >= sent and num_bytes > 0
    # Activations go down the chain and gradients come back; the model's output goes one way.
    words = data["words"]
    ways = {(t[0], t[1]) for t in data["transfers"] if words[t[6]] != "model output"}
    assert all((b, a) in ways for a, b in ways)


def test_first_step_can_be_traced_and_a_folder_gets_files_of_its_own(
    pool: Pool, tmp_path: Path
) -> None:
    run = Run("chain", 2, 1, manual=True)
    orders = pool.run(2, trace_steps, run, str(tmp_path), False)
    _, data = read(tmp_path / "trace")
    check_boxes(data, orders, first_step=0)


def test_one_process_shows_one_row(pool: Pool, tmp_path: Path) -> None:
    run = Run("chain", 1, 1)
    pool.run(1, trace_steps, run, str(tmp_path / "alone.html"), True)
    events, data = read(tmp_path / "alone")
    (row,) = data["rows"]
    texts = [data["words"][r[5]] for r in row["runs"] if r[6] == 1]
    assert texts == [text for mb in range(4) for text in (f"F{mb}", f"B{mb}/1")]
    assert row["bubble"] < 0.5 and data["transfers"] == [] == data["notes"]
    assert [e["ts"] for e in events if e["ph"] == "X"]


# ---- what is refused -------------------------------------------------------


def misuse(rank: int, how: str, folder: str) -> str:
    import smp

    run = Run("chain", 2, 1, manual=True)
    if how == "no model":
        init(run)
        call = None
    else:
        call = make_step(run)
    path = str(Path(folder) / "trace")
    num_steps = 0
    try:
        if how == "no folder":
            path = str(Path(folder) / "missing" / "trace")
        if how == "is a folder":
            (Path(folder) / "trace.html").mkdir(exist_ok=True)
        with smp.trace(path, max_events=0 if how == "no room" and rank == 1 else 1000):
            if how == "nested":
                with smp.trace(path):
                    num_steps += 1
            elif how != "no step":
                num_steps += 1
                call(0)
    except (ValueError, RuntimeError) as error:
        assert num_steps == 0, "it must be refused before the steps run"
        if call is not None:
            with smp.trace(str(Path(folder) / "again")):  # nothing is left behind
                call(0)
        return f"{type(error).__name__}: {error}"
    return "accepted"


REFUSED = {
    "no model": "RuntimeError.*needs a model; wrap it in smp.DistributedModel",
    "nested": "RuntimeError.*inside of another smp.trace",
    "no folder": "ValueError.*missing' does not exist",
    "is a folder": "ValueError.*cannot write.*[Dd]irectory",
    "no room": "ValueError.*max_events is 0; expected 1 or more",
    "no step": "RuntimeError.*no step function was called inside",
}


@pytest.mark.parametrize("how", REFUSED)
def test_misuse_is_an_error_on_all_ranks(pool: Pool, tmp_path: Path, how: str) -> None:
    for text in pool.run(2, misuse, how, str(tmp_path)):
        assert re.search(REFUSED[how], text), text


def trace_inside_a_step(rank: int, folder: str) -> None:
    import smp

    run = Run("chain", 1, 1)
    init(run)
    make_model(run)

    @smp.step
    def step(x: Tensor) -> None:
        with smp.trace(folder):
            pass

    with pytest.raises(RuntimeError, match="inside step '.*call step functions inside of the tra"):
        step(torch.zeros(4, 1))


def test_a_trace_inside_of_a_step_is_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, trace_inside_a_step, str(tmp_path))


def drop_old_events(rank: int, path: str) -> None:
    import smp

    step = make_step(Run("chain", 2, 1, manual=True))
    with smp.trace(path, max_events=20):
        step(0)
        step(1)


def test_dropped_events_are_told_on_the_page(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, drop_old_events, str(tmp_path / "short"))
    _, data = read(tmp_path / "short")
    assert any("older events were dropped" in note for note in data["notes"])
    assert all(len(row["runs"]) <= 20 for row in data["rows"])


def raise_inside(rank: int, path: str) -> None:
    import smp

    step = make_step(Run("chain", 2, 1, manual=True))
    with pytest.raises(ZeroDivisionError), smp.trace(path):
        step(0)
        raise ZeroDivisionError
    assert not Path(path + ".html").exists()
    smp.barrier()  # rank 0 tries the path before the next trace
    with smp.trace(path):
        step(0)


def test_an_exception_in_the_block_passes_and_ends_the_recording(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(2, raise_inside, str(tmp_path / "raised"))
    assert (tmp_path / "raised.html").exists()
