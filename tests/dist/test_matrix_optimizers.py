"""Optimizers that read whole matrices train as in one process where ranks hold parts of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.matrix_training import LAYOUTS, SPREAD, Alone, Job, Run, distance
from tests.dist.pool import Pool, RankFailure

STEPS = 4
NAMES = ["Muon", "Shampoo", "LAMB", "Adafactor", "8 bits"]


def train_many(rank: int, jobs: list[Job]) -> list[tuple[float, float, list[dict[int, bool]]]]:
    """Returns the distance from one process, how far that has come, and who owns what."""
    import smp

    results = []
    for job in jobs:
        try:
            run, alone = Run(job), Alone(job)
            begin = {name: value.clone() for name, value in alone.net.state_dict().items()}
            run.train(range(STEPS))
            alone.train(range(STEPS))
            moved = distance(begin, alone.net)
            results.append((distance(run.whole(), alone.net), moved, run.owned()))
        except Exception as error:
            error.add_note(f"while running {job}")
            raise
        smp.shutdown()
    return results


def check_owners(job: Job, by_rank: list[list[dict[int, bool]]]) -> None:
    """Every tensor that is updated whole has one owner in the group that holds its parts."""
    spread = [owned for flags in by_rank for owned in flags if owned]
    assert bool(spread) == (job.layout in SPREAD), job
    if not spread or job.world_size != 2:
        return
    for flags in zip(*by_rank, strict=True):
        assert len({tuple(owned) for owned in flags}) == 1
        for index in flags[0]:
            assert sum(owned[index] for owned in flags) == 1, (job, index)
    assert all(any(any(owned.values()) for owned in flags) for flags in by_rank), "one has all"


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_equals_one_process(pool: Pool, layout: str) -> None:
    jobs = [Job(layout, name, clip=clip) for name in NAMES for clip in (None, 0.05)]
    results = pool.run(LAYOUTS[layout][0], train_many, jobs)
    for idx, job in enumerate(jobs):
        for rank in results:
            difference, moved, _ = rank[idx]
            assert moved > 1e-3, job
            assert difference < 1e-10, (job, difference)
        check_owners(job, [rank[idx][2] for rank in results])


# ---- rules ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["state2", "tp2"])
def test_the_key_chooses_the_rule(pool: Pool, layout: str) -> None:
    jobs = [Job(layout, "AdamW", {"optimizer_state": rule}) for rule in ("auto", "tensors")]
    results = pool.run(2, train_many, [*jobs, Job(layout, "Muon")])
    for rank in results:
        assert all(difference < 1e-12 for difference, _, _ in rank)
        by_elements, by_tensors, of_muon = (owned for _, _, owned in rank)
        assert by_elements == [{}] and len(by_tensors[0]) > 2
        assert len(of_muon[0]) > 2 and of_muon[1] == {}, "AdamW beside Muon works on elements"
    with pytest.raises(RankFailure, match='by other elements of its parameter.*"auto"'):
        pool.run(2, train_many, [Job(layout, "LAMB", {"optimizer_state": "elements"})])


# ---- bytes ---------------------------------------------------------------------------


def bytes_of_steps(rank: int, job: Job) -> tuple[list[int], list[dict[int, tuple[int, bool]]]]:
    """Returns the bytes that this rank sends in each step, and what it holds of each tensor."""
    import smp
    from smp.precision.holdings import parameters_of

    run, sent = Run(job), []
    for step in range(STEPS):
        before = run.bytes_sent
        run.train([step])
        sent.append(run.bytes_sent - before)
        if step == STEPS - 2:  # the script writes: values go to owners once more
            with torch.no_grad():
                for p in run.model.local_parameters():
                    p.data.mul_(0.99)
    held = []
    for optimizer, owned in zip(run.optimizers, run.owned(), strict=True):
        parameters = parameters_of(optimizer.optimizer)
        held.append({i: (parameters[i].numel(), flag) for i, flag in owned.items()})
    smp.shutdown()
    return sent, held


@pytest.mark.parametrize("layout", ["state2", "state3", "sdp2", "tp2"])
def test_what_is_sent_is_the_least(pool: Pool, layout: str) -> None:
    job = Job(layout, "Muon")
    results = pool.run(job.world_size, bytes_of_steps, job)
    # Each element that its owner does not hold is sent there, and comes back.
    not_held = sum(
        numel for _, held in results for flags in held for numel, owns in flags.values() if not owns
    )
    least = 2 * not_held * torch.float64.itemsize
    # Two equal parts of this net's flat bucket have whole matrices.
    assert (least > 0) == (layout != "state2")
    sums = [sum(sent[step] for sent, _ in results) for step in range(STEPS)]
    assert sums == [least * 3 // 2, least, least, least * 3 // 2], "values go to owners twice"
    whole = sum(8 * a * b for a, b in itertools.pairwise((8, 12, 6, 10, 8)))
    gathered = (job.world_size - 1) * whole  # of gradients alone, to every rank
    assert least < 2 * gathered


# ---- checkpoints ---------------------------------------------------------------------


def save(rank: int, jobs: list[Job], folder: str) -> None:
    import smp

    for job in jobs:
        run = Run(job)
        run.train(range(2))
        for idx, optimizer in enumerate(run.optimizers):
            tag = f"{job}-{idx}"
            smp.save_checkpoint(folder, tag=tag, model=run.model, optimizer=optimizer)
            state = optimizer.state_dict()
            if rank == 0:
                torch.save(state, Path(folder) / f"{tag}.state")
            torch.save(optimizer.local_state_dict(False), Path(folder) / f"{tag}.{rank}")
        smp.shutdown()


def resume(rank: int, tasks: list[tuple[Job, Job]], folder: str, way: str) -> list[float]:
    """Goes on from a checkpoint of another layout; returns the distance from one process.

    Args:
        tasks: jobs that go on, and those that were saved.
        way: "folder", "state" (a whole state dict) or "local" (that of this rank).
    """
    import smp

    results = []
    for job, source in tasks:
        try:
            run, alone = Run(job, seed=9), Alone(job)
            if way != "folder":
                run.train([7])  # there is state to be replaced
            for idx, optimizer in enumerate(run.optimizers):
                tag = f"{source}-{idx}"
                smp.resume_from_checkpoint(
                    folder, tag=tag, optimizer=optimizer, load_optimizer=way == "folder"
                )
                if way != "folder":
                    name = f"{tag}.state" if way == "state" else f"{tag}.{rank}"
                    optimizer.load_state_dict(torch.load(Path(folder) / name, weights_only=True))
            run.train(range(2, 4))
            alone.train(range(4))
            results.append(distance(run.whole(), alone.net))
        except Exception as error:
            error.add_note(f"while going on as {job} from {source}, by {way}")
            raise
        smp.shutdown()
    return results


RULES = [{"optimizer_state": rule} for rule in ("elements", "tensors")]
MOVES = ["pp2", "state2", "sdp2", "tp2"]


def moves() -> list[tuple[Job, Job]]:
    """Jobs that go on, and those that were saved: each layout after another one."""
    pairs = []
    for source, target in zip(MOVES, [*MOVES[1:], MOVES[0]], strict=True):
        pairs += [(Job(target, name), Job(source, name)) for name in NAMES]
        pairs += [
            (Job(target, "AdamW", rule), Job(source, "AdamW", former))
            for rule, former in (RULES, RULES[::-1])
        ]
    return pairs


def check_resumed(pool: Pool, folder: Path, pairs: list[tuple[Job, Job]], way: str) -> None:
    sources = {str(source): source for _, source in pairs}
    pool.run(2, save, list(sources.values()), str(folder))
    for rank in pool.run(2, resume, pairs, str(folder), way):
        for difference, (target, source) in zip(rank, pairs, strict=True):
            assert difference < 1e-10, (str(target), str(source), difference)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("way", ["folder", "state"])
def test_state_moves_between_layouts_and_rules(pool: Pool, tmp_path: Path, way: str) -> None:
    check_resumed(pool, tmp_path, moves(), way)


@pytest.mark.sample(keep=0)
def test_the_state_of_a_rank_loads_there(pool: Pool, tmp_path: Path) -> None:
    kinds = [(Job("", name), Job("", name)) for name in ("Muon", "Shampoo")]
    kinds += [
        (Job("", "AdamW", rule), Job("", "AdamW", former)) for rule, former in (RULES, RULES[::-1])
    ]
    pairs = [
        (replace(target, layout=layout), replace(source, layout=layout))
        for layout in ("state2", "sdp2", "tp2")
        for target, source in kinds
    ]
    check_resumed(pool, tmp_path, pairs, "local")


# ---- precision, closures, writes -----------------------------------------------------


def train_half(rank: int, job: Job) -> dict[str, Any]:
    import smp

    run = Run(job)
    run.train(range(STEPS))
    state = run.optimizers[0].state_dict()["state"]
    result = {"whole": run.whole(), "state": state, "owned": run.owned()}
    smp.shutdown()
    return result


@pytest.mark.parametrize("layout", ["state2", "sdp2"])
@pytest.mark.parametrize("name", ["Muon", "Shampoo"])
def test_masters_are_updated_whole(pool: Pool, layout: str, name: str) -> None:
    half = {"bf16": True}
    plain = pool.run(2, train_half, Job("dp2", name, half, torch.float32))[0]
    for rank in pool.run(2, train_half, Job(layout, name, half, torch.float32)):
        assert rank["owned"][0]
        for key, value in plain["whole"].items():
            assert value.dtype == torch.bfloat16
            assert torch.equal(rank["whole"][key], value), key
        assert rank["state"].keys() == plain["state"].keys()
        for index, entry in plain["state"].items():
            assert rank["state"][index].keys() == entry.keys() >= {"_smp_master"}
            for key, value in entry.items():
                assert torch.equal(
                    torch.as_tensor(rank["state"][index][key]), torch.as_tensor(value)
                )


def train_with_closure(rank: int, job: Job) -> float:
    import smp

    run, alone = Run(job), Alone(job)
    for step in range(STEPS):
        (optimizer,) = run.optimizers
        optimizer.step(lambda step=step: run.backward(step))
    alone.train(range(STEPS))
    result = distance(run.whole(), alone.net)
    smp.shutdown()
    return result


@pytest.mark.parametrize("layout", ["state2", "tp2"])
def test_a_closure_makes_the_gradients(pool: Pool, layout: str) -> None:
    assert max(pool.run(2, train_with_closure, Job(layout, "LAMB"))) < 1e-10


def train_and_write(rank: int, job: Job) -> float:
    import smp

    run, alone = Run(job), Alone(job)
    for step in range(STEPS):
        run.train([step])
        alone.train([step])
        with torch.no_grad():
            for p in [*run.model.local_parameters(), *alone.net.parameters()]:
                p.data.clamp_(-0.3, 0.3)
            for group in run.optimizers[0].param_groups:
                group["lr"] *= 0.7
            for group in alone.optimizers[0].param_groups:
                group["lr"] *= 0.7
    result = distance(run.whole(), alone.net)
    smp.shutdown()
    return result


@pytest.mark.parametrize("layout", ["state2", "sdp2", "tp2"])
def test_writes_of_a_script_reach_owners(pool: Pool, layout: str) -> None:
    assert max(pool.run(2, train_and_write, Job(layout, "LAMB"))) < 1e-10
