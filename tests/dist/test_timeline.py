"""``smp.trace`` around real steps: what it writes agrees with what the ranks did."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.training import Run, init, make_model
from tests.harness import train_step_of
from tests.reference.data import compute_loss, make_batch

STEPS = 3


def make_step(run: Run) -> Any:
    """A training step on a fresh model, and the call of it."""
    import smp

    init(run)
    model = make_model(run)
    case = run.case
    train_step = train_step_of(model, lambda model, batch: compute_loss(case, model, batch))

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


def read(path: Path) -> dict[str, Any]:
    """The Chrome trace, which the page has as well."""
    trace: dict[str, Any] = json.loads(path.with_name(path.name + ".json").read_text())
    page = path.with_name(path.name + ".html").read_text()
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert data is not None and json.loads(data[1]) == trace
    return trace


def boxes_of(trace: dict[str, Any], rank: int, row: str) -> list[dict[str, Any]]:
    events = trace["traceEvents"]
    (tid,) = (
        e["tid"]
        for e in events
        if (e["name"], e["pid"]) == ("thread_name", rank) and e["args"]["name"] == row
    )
    found = [e for e in events if (e["ph"], e["pid"], e["tid"]) == ("X", rank, tid)]
    return sorted(found, key=lambda e: e["ts"])


def arrows_of(trace: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    return [(start, ends[number]) for number, start in starts.items()]


LAYOUTS = [
    Run("chain", 2, 1, manual=True),
    Run("chain", 4, 1, "simple", manual=True),
    Run("nested", 2, 2, manual=True),
]


@pytest.mark.parametrize("run", LAYOUTS, ids=str)
def test_trace_shows_what_the_ranks_executed(pool: Pool, tmp_path: Path, run: Run) -> None:
    path = tmp_path / "steps"
    orders = pool.run(run.world_size, trace_steps, run, str(path), True)
    trace = read(path)
    assert {e["pid"] for e in trace["traceEvents"]} == set(range(run.world_size))
    check_boxes(trace, orders, first_step=1)
    check_transfers(trace)
    other = trace["otherData"]
    assert other["notes"] == [], "nothing was dropped, all tensors have arrows, a plan was made"
    assert set(other["clock_uncertainty_us"].values()) == {0.0}


def check_boxes(trace: dict[str, Any], orders: list[list[list[str]]], first_step: int) -> None:
    steps = trace["otherData"]["steps"]
    for rank, order_of_steps in enumerate(orders):
        runs = boxes_of(trace, rank, "executed")
        for step, order in enumerate(order_of_steps, start=first_step):
            tasks = [r["args"]["task"] for r in runs if r["args"]["step"] == step]
            assert [task for task in tasks if "/" not in task] == order and order
        for before, after in zip(runs, runs[1:], strict=False):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.2, "boxes must not overlap"
        own = [step["ranks"][str(rank)] for step in steps if str(rank) in step["ranks"]]
        assert len(own) == STEPS
        for figures in own:
            assert 0 <= figures["bubble"] < 1 and 0 <= figures["planned_bubble"] < 1
            assert figures["busy_us"] > 0
        assert 0 < trace["otherData"]["bubble"][str(rank)] < 1
        assert boxes_of(trace, rank, "planned")
        # Waiting and idle times have a reason.
        waits = [e for e in trace["traceEvents"] if (e["ph"], e["pid"]) == ("b", rank)]
        assert waits and all(re.search(r"waits for \w", e["name"]) for e in waits)
        assert all(e["name"] for e in boxes_of(trace, rank, "idle"))


def check_transfers(trace: dict[str, Any]) -> None:
    replicas = [set(step["ranks"]) for step in trace["otherData"]["steps"]]
    arrows = arrows_of(trace)
    assert arrows
    for sent, received in arrows:
        ends = {str(sent["pid"]), str(received["pid"])}
        assert len(ends) == 2 and any(ends <= replica for replica in replicas)
        assert received["ts"] >= sent["ts"] and sent["args"]["bytes"] > 0
    # Activations go down the chain and gradients come back; the model's output goes one way.
    ways = {(s["pid"], r["pid"]) for s, r in arrows if s["args"]["what"] != "model output"}
    assert all((b, a) in ways for a, b in ways)


def test_first_step_can_be_traced_and_a_folder_gets_files_of_its_own(
    pool: Pool, tmp_path: Path
) -> None:
    run = Run("chain", 2, 1, manual=True)
    orders = pool.run(2, trace_steps, run, str(tmp_path), False)
    check_boxes(read(tmp_path / "trace"), orders, first_step=0)


def test_one_process_shows_one_row(pool: Pool, tmp_path: Path) -> None:
    run = Run("chain", 1, 1)
    pool.run(1, trace_steps, run, str(tmp_path / "alone.html"), True)
    trace = read(tmp_path / "alone")
    tasks = [e["args"]["task"] for e in boxes_of(trace, 0, "executed") if e["args"]["step"] == 1]
    assert tasks == [text for mb in range(4) for text in (f"F{mb}", f"B{mb}/1")]
    assert trace["otherData"]["bubble"]["0"] < 0.5
    assert arrows_of(trace) == [] == trace["otherData"]["notes"]


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
    trace = read(tmp_path / "short")
    assert any("older events were dropped" in note for note in trace["otherData"]["notes"])
    assert all(len(boxes_of(trace, rank, "executed")) <= 20 for rank in (0, 1))


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
