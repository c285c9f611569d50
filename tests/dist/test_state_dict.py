"""Full and partial state dicts, `smp.save`, `smp.load`, resuming a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.training import Run, init, local_parameters, make_model
from tests.harness import train_step_of
from tests.reference.data import compute_loss, make_batch
from tests.reference.models import build
from tests.reference.single_process import make_optimizer
from tests.reference.tolerances import assert_close

LAYOUTS = ((1, 1), (2, 1), (2, 2), (4, 1))
on_layouts = pytest.mark.parametrize(("pp", "dp"), LAYOUTS)


def start(run: Run, seed: int = 1) -> tuple[Any, Any, Any]:
    """Model, optimizer, step function."""
    import smp

    init(run)
    model = make_model(run, seed)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
    train_step = train_step_of(model, lambda model, batch: compute_loss(run.case, model, batch))
    return model, optimizer, train_step


def train(run: Run, optimizer: Any, train_step: Any, steps: range) -> list[float]:
    import smp

    losses = []
    for step in steps:
        batch = make_batch(run.case, run.dtype, smp.dp_rank(), step)
        losses.append(train_step(batch).reduce_mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def full_dicts(rank: int, run: Run) -> dict[str, Any]:
    import smp

    model, optimizer, train_step = start(run)
    early = {name: value.clone() for name, value in model.state_dict().items()}
    train(run, optimizer, train_step, range(1))
    full = model.state_dict()
    only_first = model.state_dict(True)
    with pytest.raises(ValueError, match="gather_to_rank0 only"):
        model.state_dict(prefix="x.")
    with pytest.raises(ValueError, match="a bool"):
        model.state_dict({})
    partial = model.local_state_dict()
    assert partial.pop("_smp_is_partial") is True
    assert all(isinstance(value, Tensor) for value in full.values())
    for name, value in partial.items():
        assert torch.equal(value, full[name])
    assert set(only_first) == (set(full) if rank == 0 else set())
    assert not any(value.isnan().any() for value in full.values())
    return {
        "early": early,
        "full": full,
        "partial": set(partial),
        "coords": (smp.pp_rank(), smp.dp_rank()),
    }


@on_layouts
@pytest.mark.parametrize("case", ["chain", "gpt2"])
def test_state_dicts_join_the_parts(pool: Pool, case: str, pp: int, dp: int) -> None:
    run = Run(case, pp, dp, manual=case == "chain")
    results = pool.run(run.world_size, full_dicts, run)
    plain = build(case, run.dtype)
    optimizer = make_optimizer(plain.parameters())
    from tests.reference.single_process import accumulate_gradients

    for result in results:
        assert_close(result["early"], plain.state_dict(), run.dtype, "state dict before partition")
    batches = [make_batch(case, run.dtype, replica, 0) for replica in range(dp)]
    accumulate_gradients(case, plain, batches, run.microbatches)
    optimizer.step()
    for result in results:
        assert list(result["full"]) == list(plain.state_dict())
        assert_close(result["full"], plain.state_dict(), run.dtype, "full state dict")
    for replica in range(dp):
        parts = [r["partial"] for r in results if r["coords"][1] == replica]
        assert set().union(*parts) == set(plain.state_dict())
        assert pp == 1 or all(part != set(plain.state_dict()) for part in parts)


def load_full(rank: int, run: Run, before_partition: bool) -> None:
    import smp

    wanted = build(run.case, run.dtype, seed=5).state_dict()
    model, _, train_step = start(run, seed=1)
    batch = make_batch(run.case, run.dtype, smp.dp_rank(), 0)
    if not before_partition:
        train_step(batch)
        model.zero_grad()
    model.load_state_dict(wanted)
    loss = train_step(batch).stack()
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    plain = build(run.case, run.dtype, seed=5)
    pieces = {n: t.chunk(run.microbatches) for n, t in batch.items()}
    for mb in range(run.microbatches):
        expected = compute_loss(run.case, plain, {n: p[mb] for n, p in pieces.items()})
        assert torch.allclose(loss[mb], expected, rtol=1e-6 if run.case == "gpt2" else 1e-12)


@pytest.mark.sample(keep=3)
@on_layouts
@pytest.mark.parametrize("before_partition", [True, False])
def test_full_state_dicts_load(pool: Pool, pp: int, dp: int, before_partition: bool) -> None:
    for case in ("chain", "gpt2"):
        run = Run(case, pp, dp, manual=case == "chain")
        pool.run(run.world_size, load_full, run, before_partition)


def load_partial(rank: int, run: Run) -> None:
    model, optimizer, train_step = start(run)
    train(run, optimizer, train_step, range(1))
    saved = {
        n: v.clone() if isinstance(v, Tensor) else v for n, v in model.local_state_dict().items()
    }
    full = {n: v.clone() for n, v in model.state_dict().items()}
    train(run, optimizer, train_step, range(1, 2))
    changed = model.state_dict()
    assert any(not torch.equal(changed[n], full[n]) for n in full)
    model.load_state_dict(saved)
    assert all(torch.equal(v, full[n]) for n, v in model.state_dict().items())
    train(run, optimizer, train_step, range(2, 3))
    model.load_state_dict(saved, same_partition_load=True)
    assert all(torch.equal(v, full[n]) for n, v in model.state_dict().items())


def test_partial_state_dicts_load(pool: Pool) -> None:
    pool.run(4, load_partial, Run("chain", 2, 2, manual=True))


def load_strictly(rank: int, run: Run) -> None:
    model, _, train_step = start(run)
    train_step(make_batch(run.case, run.dtype, 0, 0))
    wanted = build(run.case, run.dtype, seed=5).state_dict()
    removed = wanted.pop("layers.1.linear.weight")
    wanted["surplus"] = removed
    report = model.load_state_dict(wanted, strict=False)
    assert list(report.missing_keys) == ["layers.1.linear.weight"]
    assert list(report.unexpected_keys) == ["surplus"]
    with pytest.raises(RuntimeError, match="(?s)layers.1.linear.weight.*surplus|surplus.*layers.1"):
        model.load_state_dict(wanted, strict=True)
    wanted.pop("surplus")
    wanted["layers.1.linear.weight"] = torch.zeros(2, 2, dtype=run.dtype)
    with pytest.raises(RuntimeError, match="layers.1.linear.weight"):
        model.load_state_dict(wanted)


def test_missing_unexpected_and_misshapen_keys_are_told(pool: Pool) -> None:
    pool.run(2, load_strictly, Run("chain", 2, 1, manual=True))


# ---- resuming --------------------------------------------------------------


def save_and_go_on(rank: int, run: Run, folder: str) -> tuple[list[float], list[str]]:
    import smp

    model, optimizer, train_step = start(run)
    train(run, optimizer, train_step, range(2))
    content = {
        "model": model.local_state_dict(),
        "optimizer": optimizer.local_state_dict(),
        "step": 2,
    }
    if smp.dp_rank() == 0:
        smp.save(content, f"{folder}/partial.pt", partial=True)
    full = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert "_smp_is_partial" not in full["model"]
    if smp.rank() == 0:
        smp.save(full, f"{folder}/full.pt", partial=False)
    smp.barrier()
    return train(run, optimizer, train_step, range(2, 5)), sorted(os.listdir(folder))


def resume(rank: int, run: Run, folder: str, partial: bool, early: bool) -> list[float]:
    import smp

    # Weights that must be overwritten, whatever happens.
    model, optimizer, train_step = start(run, seed=9)
    if not early:
        train(run, optimizer, train_step, range(1))
    name = "partial.pt" if partial else "full.pt"
    content = smp.load(f"{folder}/{name}", partial=partial)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return train(run, optimizer, train_step, range(2, 5))


@pytest.mark.parametrize(("pp", "dp"), [(1, 1), (2, 1), (2, 2)])
def test_training_resumes_bitwise_from_partial_and_full_files(
    pool: Pool, pp: int, dp: int, tmp_path: Path
) -> None:
    run = Run("gpt2", pp, dp)
    results = pool.run(run.world_size, save_and_go_on, run, str(tmp_path))
    expected = [f"partial.pt_{mp_rank}" for mp_rank in range(pp)]
    assert results[0][1] == ["full.pt", *expected]
    for partial in (True, False):
        for early in (True, False):
            again = pool.run(run.world_size, resume, run, str(tmp_path), partial, early)
            assert again == [losses for losses, _ in results], f"partial={partial} early={early}"


def test_files_move_between_layouts(pool: Pool, tmp_path: Path) -> None:
    run = Run("gpt2", 2, 1)
    # A job with more ranks has left this file, which the next job does not overwrite.
    (tmp_path / "partial.pt_2").write_bytes(b"left behind")
    losses = pool.run(2, save_and_go_on, run, str(tmp_path))[0][0]
    for pp, partial in ((1, True), (4, True), (4, False)):
        again = pool.run(pp, resume, Run("gpt2", pp, 1), str(tmp_path), partial, True)
        for other in again:
            assert max(abs(a - b) for a, b in zip(other, losses, strict=True)) < 1e-6


def full_file_is_a_plain_checkpoint(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=False)
    return content


def test_a_full_file_is_a_plain_torch_file(pool: Pool, tmp_path: Path) -> None:
    run = Run("gpt2", 2, 1)
    pool.run(2, save_and_go_on, run, str(tmp_path))
    content = full_file_is_a_plain_checkpoint(tmp_path / "full.pt")
    plain = build("gpt2", run.dtype)
    plain.load_state_dict(content["model"], strict=True)
    optimizer = make_optimizer(plain.parameters())
    optimizer.load_state_dict(content["optimizer"])
    assert len(optimizer.state) == len(list(plain.parameters()))


def load_missing(rank: int, folder: str) -> None:
    import smp

    init(Run("chain", 2, 1))
    with pytest.raises(Exception, match=r"nothing\.pt_" + str(rank)):
        smp.load(f"{folder}/nothing.pt", partial=True)
    with pytest.raises(Exception, match=r"nothing\.pt"):
        smp.load(f"{folder}/nothing.pt", partial=False)


def test_a_missing_file_is_named(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, load_missing, str(tmp_path))


def save_same_file(rank: int, folder: str) -> None:
    import smp

    init(Run("chain", 2, 1))
    for i in range(20):
        smp.save({"i": i, "data": torch.full((1000,), float(i))}, f"{folder}/same", partial=False)
    smp.barrier()
    content = smp.load(f"{folder}/same", partial=False)
    assert content["i"] == 19 and content["data"].eq(19.0).all()


def test_ranks_that_save_one_full_file_at_once_leave_a_whole_file(
    pool: Pool, tmp_path: Path
) -> None:
    pool.run(2, save_same_file, str(tmp_path))
    assert os.listdir(tmp_path) == ["same"], "temporary files must not stay"


def merge_partials(rank: int, folder: str) -> None:
    import smp

    run = Run("chain", 2, 1, manual=True)
    model, optimizer, train_step = start(run)
    train(run, optimizer, train_step, range(1))
    smp.save({"model": model.local_state_dict()}, f"{folder}/merged.pt", partial=False)
    smp.barrier()
    merged = smp.load(f"{folder}/merged.pt", partial=False)["model"]
    full = model.state_dict()
    assert {k for k in merged if k != "_smp_is_partial"} == set(full)
    assert all(torch.equal(merged[name], value) for name, value in full.items())


def test_full_saving_of_partial_dicts_merges_them(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, merge_partials, str(tmp_path))


def named_local(rank: int, run: Run) -> list[str]:
    model, _, train_step = start(run)
    train_step(make_batch(run.case, run.dtype, 0, 0))
    return list(local_parameters(model))


def test_tied_parameters_stay_on_one_rank(pool: Pool) -> None:
    names = pool.run(4, named_local, Run("gpt2", 4, 1))
    holders = [n for n in names if any("wte" in name or "lm_head" in name for name in n)]
    assert len(holders) == 1, "embedding and head share their weight"
