"""Checkpoints load on every layout: two steps, a save, and two more steps somewhere else.

A sample of pairs of layouts runs; ``SMP_GRID=all`` runs more of them, ``SMP_GRID_SEED`` another
sample. Every one has to have the same state, bit by bit, where it goes on, and to end where a run
without interruption ends.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.resume_training import BEFORE, Job, Seen, State, resume_many, save_many
from tests.samples import part_of

SEED = int(os.environ["SMP_GRID_SEED"])
NUM_SOME = 1  # source in `make test`
NUM_SOURCES, NUM_TARGETS = (20, 10) if os.environ.get("SMP_GRID") == "all" else (8, 5)
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-6, "fp16": 4e-3, "bf16": 3e-2}

LAYOUTS = tuple(
    Job(pp, tp, rdp, sharding)
    for pp, tp, rdp in itertools.product((1, 2, 4), (1, 2), (1, 2, 4))
    for sharding in ("none", "state", "sdp2", "sdp4")
    if pp * tp * rdp <= 4 and Job(pp, tp, rdp, sharding).is_legal
)


def sample() -> dict[Job, list[Job]]:
    """Sources and what goes on from them; every layout is a target of some of all samples."""
    draw = random.Random(SEED)
    precisions = itertools.cycle(("fp64", "fp32", "fp64", "fp16"))
    chosen = [draw.choice(LAYOUTS) for _ in range(NUM_SOURCES)]
    sources = [replace(job, precision=next(precisions)) for job in chosen]
    targets: list[Job] = []
    while len(targets) < NUM_SOURCES * NUM_TARGETS:
        targets += draw.sample(LAYOUTS, len(LAYOUTS))
    pairs: dict[Job, list[Job]] = {}
    for idx in part_of(range(NUM_SOURCES), NUM_SOME):
        source = sources[idx]
        own = targets[idx * NUM_TARGETS : (idx + 1) * NUM_TARGETS]
        own = [replace(t, precision=source.precision, delayed=draw.random() < 0.3) for t in own]
        pairs.setdefault(source, []).extend(own)
    return pairs


PAIRS = sample()


def run_all(pool: Any, folder: Path, pairs: dict[Job, list[Job]]) -> Iterator[Any]:
    """Yields source, target and what their ranks saw."""
    saved: dict[Job, list[Seen]] = {}
    for world_size, group in by_world_size(pairs):
        results = pool.run(world_size, save_many, group, str(folder))
        saved |= {job: [seen[idx] for seen in results] for idx, job in enumerate(group)}
    tasks = [(target, str(source), source) for source, ts in pairs.items() for target in ts]
    for world_size in sorted({target.world_size for target, _, _ in tasks}):
        own = [task for task in tasks if task[0].world_size == world_size]
        given = [(target, tag) for target, tag, _ in own]
        results = pool.run(world_size, resume_many, given, str(folder))
        for idx, (target, _, source) in enumerate(own):
            yield source, target, saved[source], [seen[idx] for seen in results]


def by_world_size(jobs: Sequence[Job] | dict[Job, Any]) -> list[tuple[int, list[Job]]]:
    sizes = sorted({job.world_size for job in jobs})
    return [(size, [job for job in jobs if job.world_size == size]) for size in sizes]


@pytest.mark.sample
def test_sampled_pairs_of_layouts(pool: Pool, tmp_path: Path) -> None:
    num_pairs = 0
    for source, target, before, after in run_all(pool, tmp_path, PAIRS):
        where = f"seed {SEED}: {source} to {target}"
        check_layout(where, source, before)
        check_layout(where, target, after)
        check_parts(where, source, tmp_path)
        assert after[0].content == {"steps": BEFORE}, where
        check_loaded(where, before[0].at, after[0].at)
        check_end(where, source, target, before[0], after[0])
        num_pairs += 1
    assert num_pairs == sum(len(targets) for targets in PAIRS.values())
    assert num_pairs >= NUM_SOME * NUM_TARGETS


EQUAL = (
    Job(2, 1, 1, "none", "fp32", dropout=True),
    Job(1, 2, 2, "state", "bf16", dropout=True),
    Job(2, 1, 2, "sdp2", "fp16", dropout=True),
    Job(1, 2, 2, "none", "fp16", dropout=True),
)


@pytest.mark.sample
def test_equal_layouts_go_on_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    pairs = {job: [job] for job in part_of(EQUAL, 2)}
    for source, target, before, after in run_all(pool, tmp_path, pairs):
        where = f"{source} to {target}"
        check_loaded(where, before[0].at, after[0].at)
        assert after[0].losses == before[0].losses[BEFORE:], where
        check_equal(f"{where}, at the end", before[0].end, after[0].end)


PRECISIONS = {
    Job(1, 1, 2, "sdp2", "fp16"): [Job(2, 1, 1, "none", "fp32"), Job(1, 1, 2, "state", "bf16")],
    Job(1, 2, 1, "none", "fp32"): [Job(1, 1, 2, "sdp2", "bf16"), Job(2, 1, 1, "none", "fp16")],
}


@pytest.mark.sample(keep=0)
def test_precisions_change_without_loss(pool: Pool, tmp_path: Path) -> None:
    """Checks that the optimizer's values stay the same bits; the model is their rounding."""
    for source, target, before, after in run_all(pool, tmp_path, PRECISIONS):
        where = f"{source} to {target}"
        saved, loaded = updated_values(before[0].at), updated_values(after[0].at)
        assert len(saved) == len(loaded) > 10
        for expected, actual in zip(saved, loaded, strict=True):
            assert expected.dtype == actual.dtype == torch.float32
            assert torch.equal(expected, actual), where
        dtypes = {tensor.dtype for tensor in after[0].at.model.values()}
        assert dtypes == {getattr(torch, NAMES[target.precision])}, where


NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}


def updated_values(state: State) -> list[Tensor]:
    """Returns the masters in the order of the optimizer; in FP32 these are the model's values."""
    entries = state.optimizer["state"]
    masters = [entry["_smp_master"] for entry in entries.values() if "_smp_master" in entry]
    if not masters:
        named = {n: t for n, t in state.model.items() if n != "lm_head.weight"}
        masters = [t for n, t in named.items() if not n.endswith("bias")]
        masters += [t for n, t in named.items() if n.endswith("bias")]
    return masters


# ---- judging ---------------------------------------------------------------------------


def check_layout(where: str, job: Job, seen: Sequence[Seen]) -> None:
    """Refuses a vacuous pass: ranks are where the job says, with parts that are parts."""
    facts = [one.facts for one in seen]
    assert len({fact["places"] for fact in facts}) == job.world_size, where
    assert all(fact["is_sharded"] == job.sharding.startswith("sdp") for fact in facts), where
    assert all(fact["is_flat"] == (job.sharding == "state") for fact in facts), where
    if job.pp > 1:
        whole = sum(f["local"] for f in facts if f["places"][1:] == (0, 0, 0))
        assert all(0 < fact["local"] < whole for fact in facts), where


def check_parts(where: str, job: Job, folder: Path) -> None:
    """The ranks wrote parts, each once, and all together everything."""
    from smp.checkpoint import inspection, manifest

    assert not list(inspection.problems(folder / f"{job}_partial")), where
    stored = manifest.read(folder / f"{job}_partial")
    blocks = [len(entry.blocks) for entry in stored.entries.values()]
    for name, entry in stored.entries.items():
        numel = sum(block.part.flat_numel for block in entry.blocks)
        assert numel == torch.Size(entry.shape).numel(), f"{where}: {name}"
    num_parts = job.tp * job.num_shards
    assert (max(blocks) > 1) == (num_parts > 1), where
    assert sum(name.startswith("model_") for name in stored.files) >= job.pp, where


def check_loaded(where: str, saved: State | None, loaded: State | None) -> None:
    assert saved is not None and loaded is not None
    check_equal(f"{where}, as it is loaded", saved, loaded)


def check_equal(where: str, first: State | None, second: State | None) -> None:
    """Bit by bit."""
    assert first is not None and second is not None
    assert first.model.keys() == second.model.keys()
    for name, tensor in first.model.items():
        assert torch.equal(tensor, second.model[name]), f"{where}: {name}"
    assert first.loss_scale == second.loss_scale, where
    assert first.optimizer["param_groups"] == second.optimizer["param_groups"], where
    entries, others = first.optimizer["state"], second.optimizer["state"]
    assert entries.keys() == others.keys() and len(entries) > 10, where
    for index, entry in entries.items():
        assert entry.keys() == others[index].keys(), f"{where}: {index}"
        for key, value in entry.items():
            assert torch.equal(value, others[index][key]), f"{where}: {key} of {index}"


def check_end(where: str, source: Job, target: Job, before: Seen, after: Seen) -> None:
    assert before.at is not None and before.end is not None and after.end is not None
    if replace(target, delayed=False) == source:
        check_equal(f"{where}, at the end", before.end, after.end)
    num_moved = 0
    for name, tensor in before.end.model.items():
        num_moved += not torch.equal(tensor, before.at.model[name])
        difference = (tensor - after.end.model[name]).abs().max().item()
        assert difference <= TOLERANCE[source.precision], f"{where}: {name}: {difference:.1e}"
    assert num_moved > len(before.end.model) / 2, f"{where}: only {num_moved} tensors were trained"
    if source.precision == "fp16":
        assert before.end.loss_scale == 2.0**16, "nothing overflowed"
