"""Optimizer state in fewer bytes, in layouts: training, and checkpoints from one to another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.resume_training import AFTER, BEFORE, Job, Seen, State
from tests.dist.test_resume import check_layout, check_parts, run_all
from tests.samples import part_of

# A code has a spacing of a sixteenth of 1 + y, where 1 is the share below of the largest moment.
CODE = 1 / 16
ONES = {"exp_avg": 1 / 247, "exp_avg_sq": 1 / 63487}
LR = 1e-2
#: Largest distance of parameters that took the same steps, by what is rounded.
FAR = {"fp32": 2 * LR * CODE, "bf16": 2**-6}

EXACT = {
    Job(2, 1, 1, "none", "fp32", state_dtype="bf16"): [
        Job(1, 1, 2, "sdp2", "fp32", state_dtype="bf16"),
    ],
    Job(1, 1, 2, "sdp2", "bf16", state_dtype="bf16", masters="residue"): [
        Job(1, 2, 2, "state", "bf16", state_dtype="bf16", masters="residue"),
    ],
    Job(1, 1, 2, "state", "bf16", state_dtype="bf16", masters="none"): [
        Job(2, 1, 1, "none", "bf16", state_dtype="fp32", masters="none"),
    ],
}
CODES = {
    Job(1, 1, 2, "sdp2", "fp32", state_dtype="int8"): [
        Job(1, 1, 2, "sdp2", "fp32", state_dtype="int8"),
        Job(2, 1, 1, "none", "fp32", state_dtype="int8"),
    ],
}
MASTERS = {
    Job(1, 1, 2, "state", "bf16", state_dtype="fp32"): [
        Job(2, 1, 1, "none", "bf16", state_dtype="fp32", masters="residue"),
    ],
    Job(1, 1, 2, "sdp2", "bf16", state_dtype="fp32", masters="residue"): [
        Job(1, 1, 1, "none", "fp32", state_dtype="fp32"),
    ],
}


def entries_of(state: State | None) -> dict[int, dict[str, Tensor]]:
    assert state is not None
    found: dict[int, dict[str, Tensor]] = state.optimizer["state"]
    assert len(found) > 10
    for entry in found.values():
        assert entry["exp_avg"].dtype == entry["exp_avg_sq"].dtype == torch.float32
        assert {"step", "exp_avg", "exp_avg_sq"} <= entry.keys() <= {*NAMES, "_smp_master"}
    return found


NAMES = ("step", "exp_avg", "exp_avg_sq")


def check_trained(where: str, before: Seen, after: Seen, job: Job) -> None:
    """Checks that the resumed run ends near the uninterrupted one, and that both have moved."""
    assert before.at is not None and before.end is not None and after.end is not None
    num_moved = 0
    for name, tensor in before.end.model.items():
        num_moved += not torch.equal(tensor, before.at.model[name])
        off = (tensor.double() - after.end.model[name].double()).abs().max()
        assert off <= FAR[job.precision] * max(1.0, float(tensor.abs().max())), f"{where}: {name}"
    assert num_moved > len(before.end.model) / 2, where


def check_bits(where: str, first: State | None, second: State | None) -> None:
    entries, others = entries_of(first), entries_of(second)
    assert first is not None and second is not None
    for name, value in first.model.items():
        assert torch.equal(value, second.model[name]), f"{where}: {name}"
    for index, entry in entries.items():
        assert entry.keys() == others[index].keys(), f"{where}: {index}"
        for name, value in entry.items():
            assert torch.equal(value, others[index][name]), f"{where}: {name} of {index}"


def run(pool: Pool, folder: Path, pairs: dict[Job, list[Job]]) -> list[Any]:
    done = []
    for source, target, before, after in run_all(pool, folder, pairs):
        where = f"{source} to {target}"
        check_layout(where, source, before)
        check_layout(where, target, after)
        check_parts(where, source, folder)
        assert after[0].content == {"steps": BEFORE}
        check_trained(where, before[0], after[0], source)
        done.append((where, source, target, before[0], after[0]))
    assert len(done) == sum(map(len, pairs.values()))
    return done


def test_bf16_state_goes_to_other_layouts_bit_by_bit(pool: Pool, tmp_path: Path) -> None:
    for where, source, _, before, after in run(pool, tmp_path, EXACT):
        saved, loaded = entries_of(before.at), entries_of(after.at)
        assert saved.keys() == loaded.keys()
        for index, entry in saved.items():
            has_master = source.masters == "residue"
            assert ("_smp_master" in entry) == has_master
            for name, value in entry.items():
                assert torch.equal(value, loaded[index][name]), f"{where}: {name} of {index}"
                if name in NAMES[1:]:
                    assert torch.equal(value, value.bfloat16().float())
        assert before.at is not None and after.at is not None
        for name, value in before.at.model.items():
            assert torch.equal(value, after.at.model[name]), f"{where}: {name}"


def test_codes_go_to_other_layouts_but_for_a_rounding(pool: Pool, tmp_path: Path) -> None:
    for where, source, target, before, after in run(pool, tmp_path, CODES):
        if source == target:
            check_bits(f"{where}, as it is loaded", before.at, after.at)
            check_bits(f"{where}, at the end", before.end, after.end)
            continue
        saved, loaded = entries_of(before.at), entries_of(after.at)
        for index, entry in saved.items():
            for name in NAMES[1:]:
                value, other = entry[name], loaded[index][name]
                bound = CODE / 2 * value.abs() + CODE * ONES[name] * value.abs().max()
                assert ((value - other).abs() <= bound).all(), f"{where}: {name} of {index}"
                assert value.abs().max() > 0


@pytest.mark.sample(keep=0)
def test_masters_become_residues_and_back(pool: Pool, tmp_path: Path) -> None:
    for where, source, target, before, after in run(pool, tmp_path, MASTERS):
        saved, loaded = entries_of(before.at), entries_of(after.at)
        for index, entry in saved.items():
            value = entry["_smp_master"]
            if target.precision == "fp32":
                assert "_smp_master" not in loaded[index]
                continue
            other = loaded[index]["_smp_master"]
            # 24 bits are exact; a master of 32 is rounded to them.
            bound = 0.0 if source.masters == "residue" else 2**-16
            assert ((value - other).abs() <= bound * value.abs()).all(), f"{where}: {index}"
            assert not torch.equal(value, value.bfloat16().float())


OFFLOADED = (
    Job(1, 1, 2, "sdp2", "bf16", state_dtype="bf16", masters="residue"),
    Job(2, 1, 1, "none", "fp32", state_dtype="fp32"),
    Job(1, 1, 2, "state", "bf16", state_dtype="int8"),
    Job(1, 2, 2, "none", "fp16", state_dtype="fp32"),  # its first update is skipped
    Job(1, 1, 2, "state", "bf16", state_dtype="int8", masters="none"),
)


@pytest.mark.sample
def test_moments_in_host_memory_change_no_bit(pool: Pool, tmp_path: Path) -> None:
    """Trains, saves and resumes with and without them, each from the checkpoint of the other."""
    pairs: dict[Job, list[Job]] = {}
    for job in part_of(OFFLOADED, 1):
        other = replace(job, offloads_state=True)
        pairs |= {job: [other], other: [job]}
    states: dict[Job, Seen] = {}
    for source, target, before, after in run_all(pool, tmp_path, pairs):
        where = f"{source} to {target}"
        for job, ranks in ((source, before), (target, after)):
            check_layout(where, job, ranks)
            for seen in ranks:
                pieces = seen.facts["pieces"]
                assert (len(pieces) >= AFTER and min(pieces) > 3) == job.offloads_state, where
        check_bits(f"{where}, as it is loaded", before[0].at, after[0].at)
        check_bits(f"{where}, at the end", before[0].end, after[0].end)
        assert after[0].losses == before[0].losses[BEFORE:]
        other = states.setdefault(replace(source, offloads_state=False), before[0])
        check_bits(f"{where}, with and without", other.end, before[0].end)
    assert len(states) == len(pairs) // 2


LAYOUTS = [
    Job(1, 1, 2, "none"),
    Job(1, 1, 2, "state"),
    Job(2, 1, 2, "sdp2"),
    Job(1, 2, 1, "none"),
]
CHOICES = [
    {"precision": "fp32", "state_dtype": "bf16"},
    {"precision": "fp32", "state_dtype": "int8"},
    {"precision": "bf16", "state_dtype": "bf16", "masters": "residue"},
    {"precision": "bf16", "state_dtype": "int8", "masters": "none"},
]


def train_all(rank: int, jobs: list[Job]) -> list[dict[str, Tensor]]:
    import smp
    from tests.dist.resume_training import make, state_of

    ends = []
    for job in jobs:
        model, optimizer, train = make(job, seed=1)
        for step in range(6):
            train(step)
        ends.append(state_of(model, optimizer).model)
        smp.shutdown()
    return ends


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_training_stays_near_that_with_fp32_state(pool: Pool, layout: Job) -> None:
    jobs = [replace(layout, **choice) for choice in CHOICES]
    plain = [replace(layout, precision=p, state_dtype="fp32") for p in ("fp32", "bf16")]
    ends = pool.run(layout.world_size, train_all, [*plain, *jobs])[0]
    wanted = dict(zip(("fp32", "bf16"), ends, strict=False))
    for job, end in zip(jobs, ends[2:], strict=True):
        num_other = 0
        for name, want in wanted[job.precision].items():
            off = (want.double() - end[name].double()).abs().max()
            # Six steps of at most the learning rate, which halves; a code is off by a sixteenth.
            digits = 4 * 2**-8 * float(want.abs().max()) if job.precision == "bf16" else 0.0
            assert off <= 2 * LR * 2 * CODE + digits, f"{job}: {name}"
            num_other += off > 0
        assert num_other > len(end) / 2, f"{job} rounds nothing"
