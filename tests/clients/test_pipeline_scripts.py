"""Clients B, E, F: scripts that cut a model over a pipeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.running import Client
from tests.dist.pool import Pool


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("gather", [0, 1])
def test_client_b_never_updates_and_saves(pool: Pool, tmp_path: Path, gather: int) -> None:
    client = Client(pool, tmp_path, "client_b.py")
    parameters = {"ddp": True, "pipeline_parallel_degree": 2, "microbatches": 2}
    parameters |= {"shard_optimizer_state": True, "prescaled_batch": True}
    results = client.run(4, {"gather_if_shard": gather}, parameters)
    for result in results:
        assert len(result["losses"]) == 3
        if result["expected"]:
            assert result["losses"] == pytest.approx(result["expected"], rel=1e-5)
    assert results[0]["num_keys"] > 20 and results[1]["num_keys"] == 0
    suffixes = {"_0", "_1"} if gather else {f"_{pp}_0_{rdp}" for pp in (0, 1) for rdp in (0, 1)}
    files = set(results[0]["files"])
    assert {f"optimizer.pt{suffix}" for suffix in suffixes} | {"model.pt"} <= files


E = {"partitions": 2, "microbatches": 4, "memory_weight": 0.3, "overlapping_allreduce": True,
     "ddp": True}  # fmt: skip


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("use_sequential", [0, 1])
def test_client_e_pretrains_and_resumes(pool: Pool, tmp_path: Path, use_sequential: int) -> None:
    client = Client(pool, tmp_path, "client_e.py")
    argv = {"use_sequential": use_sequential}
    first = client.run(4, argv, E)
    losses = first[0]["losses"]
    assert sum(losses[2:]) < sum(losses[:2]), "an update comes after two steps"
    assert sum(result["num_local"] for result in first[:2]) >= 19
    assert all(result["num_local"] for result in first)
    assert {"ckpt_2.pt_0", "ckpt_2.pt_1", "ckpt_4.pt_0", "full.pt"} <= set(first[0]["files"])
    again = client.run(4, argv | {"resume_step": 2}, E)
    for one, other in zip(first, again, strict=True):
        assert other["losses"] == one["losses"][2:]


def test_client_e_without_the_library_asks_for_its_local_rank(pool: Pool, tmp_path: Path) -> None:
    results = Client(pool, tmp_path, "client_e.py").run(1, {"smp": 0, "max_steps": 2})
    assert len(results[0]["losses"]) == 2


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("amp", [0, 1])
def test_client_f_learns_digits_and_resumes(pool: Pool, tmp_path: Path, amp: int) -> None:
    client = Client(pool, tmp_path, "client_f.py")
    parameters = {"partitions": 2, "microbatches": 4, "ddp": True}
    world_size = 2 if amp else 4
    first = client.run(world_size, {"amp": amp}, parameters)
    for result in first:
        assert len(result["losses"]) == 6 and result["lr"] == pytest.approx(0.49)
        same = [r for r in first if r["dp_rank"] == result["dp_rank"]]
        assert len(same) == 2
        assert all(r["test_loss"] == result["test_loss"] for r in same)
        assert sum(result["losses"][3:]) < sum(result["losses"][:3])
    again = client.run(world_size, {"amp": amp, "resume": 1, "epochs": 0}, parameters)
    assert [r["test_loss"] for r in again] == [r["test_loss"] for r in first]
