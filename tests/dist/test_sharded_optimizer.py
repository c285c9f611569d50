"""Sharded optimizer state: the numbers of plain data parallelism, in a share of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.model import engine_of
from smp.storage.whole import WholeParameters
from tests.dist.pool import Pool
from tests.dist.sharded_optimizer import (
    STEPS,
    ShardRecord,
    ShardRun,
    init_sharded,
    train_both,
    train_sharded,
)
from tests.reference.models import build
from tests.reference.tolerances import relative_difference

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}

TWO = [
    ShardRun("branches", microbatches=1),
    ShardRun("branches", microbatches=3, dtype=torch.float32),
    ShardRun("gpt2", microbatches=3),
    ShardRun("gpt2", microbatches=1, dtype=torch.float32),
    ShardRun("gpt2", microbatches=3, dtype=torch.float32, config=(("bf16", True),)),
    ShardRun("branches", microbatches=3, model_args=(("overlapping_allreduce", False),)),
]
FOUR = [
    ShardRun("branches", dp=4, microbatches=3),
    ShardRun("gpt2", dp=4, dtype=torch.float32),
    ShardRun("gpt2", pp=2, microbatches=3),
    ShardRun("zigzag", pp=2, dtype=torch.float32),
    ShardRun("gpt2", tp=2, microbatches=3),
    ShardRun("gpt2", tp=2, config=(("optimize", "speed"), ("prescaled_batch", True))),
]


def check(run: ShardRun, records: list[tuple[ShardRecord, ShardRecord]]) -> None:
    bitwise = run.world_size == 2
    for plain, sharded in records:
        assert set(plain.params[-1]) == set(sharded.params[-1]) != set()
        for name, expected in plain.params[-1].items():
            got = sharded.params[-1][name]
            if bitwise:
                assert torch.equal(got, expected), f"{run}: {name}"
            else:
                difference = relative_difference(got, expected)
                assert difference <= TOLERANCE[run.dtype], f"{run}: {name}: {difference}"
        losses = torch.tensor(sharded.losses), torch.tensor(plain.losses)
        assert relative_difference(*losses) <= TOLERANCE[run.dtype], str(run)
        assert torch.equal(*losses) or not bitwise, str(run)
        assert len(set(plain.norms)) == STEPS and min(plain.norms) > 1e-3
        norms = torch.tensor(sharded.norms), torch.tensor(plain.norms)
        assert relative_difference(*norms) <= 1e-6, f"{run}: norms {norms}"
        # Shards were used, and gathered while modules went on.
        assert sharded.num_buckets >= 2 and sharded.num_gathers == STEPS * sharded.num_buckets
        overlaps = not run.model_args
        assert (sharded.num_overlapped >= (STEPS - 1) * sharded.num_buckets) == overlaps
        assert (sharded.num_early_buckets > 0) == overlaps


@pytest.mark.parametrize("runs", [TWO, FOUR], ids=["two ranks", "four ranks"])
def test_training_equals_plain_data_parallelism(pool: Pool, runs: list[ShardRun]) -> None:
    results = pool.run(runs[0].world_size, train_both, runs)
    for index, run in enumerate(runs):
        check(run, [records[index] for records in results])


def replicas_after_training(rank: int, run: ShardRun) -> dict[str, Tensor]:
    return train_sharded(run, True).params[-1]


def test_replicas_stay_alike_and_overlap_changes_nothing(pool: Pool) -> None:
    run = ShardRun("gpt2", dp=4, microbatches=3, dtype=torch.float32)
    waits = ShardRun(
        "gpt2",
        dp=4,
        microbatches=3,
        dtype=torch.float32,
        config=(("overlapping_allreduce", False),),
    )
    results = pool.run(4, replicas_after_training, run)
    results += pool.run(4, replicas_after_training, waits)
    for other in results[1:]:
        assert set(other) == set(results[0])
        for name, value in results[0].items():
            assert torch.equal(other[name], value), name


# ---- memory ------------------------------------------------------------------


def state_bytes(rank: int, half: bool) -> dict[str, Any]:
    """Bytes of storages after a step: what a rank keeps of a model of equal layers."""
    import smp

    init_sharded(ShardRun("chain", dp=4, config=(("bf16", half),)), True)
    torch.manual_seed(1)
    plain = nn.Sequential(*(nn.Linear(250, 250) for _ in range(6)), nn.Linear(250, 3))
    total = sum(p.numel() for p in plain.parameters())
    model = smp.DistributedModel(plain, bucket_cap_mb=0.6)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        model.backward(model(torch.randn(2, 250)).square().mean())
        optimizer.step()
    (reducer,) = engine_of(model).gradients.reducers
    holdings = engine_of(model).holdings.values()
    stats = reducer.stats
    return {
        "total": total,
        "buckets": reducer.num_buckets,
        "held": sum(h.numel for h in holdings),
        "flat": stats.flat_bytes,
        "peak": stats.peak_flat_bytes,
        "gradients": distinct([h.master.grad for h in holdings]),
        "masters": distinct([h.master for h in holdings]),
        "parameters": distinct(list(model.parameters())),
        "moments": sum(
            value.numel() * value.element_size()
            for entry in optimizer.state.values()
            for name, value in entry.items()
            if name != "step"
        ),
        "share_memory": all(h.master.data_ptr() == h.piece.data_ptr() for h in holdings if h.numel),
        "kept": all(p.grad is None for p in model.parameters()),
    }


def distinct(tensors: list[Tensor | None]) -> int:
    """Bytes of the storages behind tensors, each once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors if t is not None
    }
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "bf16"])
def test_a_rank_keeps_its_share_of_gradients_and_state(pool: Pool, half: bool) -> None:
    ranks = pool.run(4, state_bytes, half)
    total, buckets = ranks[0]["total"], ranks[0]["buckets"]
    item_bytes = 2 if half else 4
    # A shard is a multiple of 256 B of parameters, and parameters begin at such.
    padding = 256 // item_bytes * (2 * 7 + buckets)
    assert buckets >= 3 and sum(rank["held"] for rank in ranks) == total
    for rank in ranks:
        assert abs(rank["held"] - total / 4) <= padding
        most = (total / 4 + padding) * 4
        assert 0 < rank["gradients"] <= most
        assert rank["moments"] == 2 * rank["held"] * 4
        assert rank["flat"] == 0 < rank["peak"]
        assert rank["parameters"] <= (total + 4 * padding) * item_bytes
        assert rank["share_memory"] != half and rank["kept"]
        if half:
            assert rank["masters"] <= most


# ---- what waits for updates ------------------------------------------------------


class ReadsItsChild(nn.Module):
    """Never runs the forward of the module whose weight it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 40)
        self.table = nn.Linear(40, 50)
        self.recurrent = nn.GRU(50, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(self.first(x), self.table.weight)
        return self.recurrent(hidden[:, None])[0]


def update_and_read(rank: int, overlap: bool) -> list[Tensor]:
    import copy

    import smp

    init_sharded(ShardRun("chain"), True)
    torch.manual_seed(3)
    model = smp.DistributedModel(
        ReadsItsChild(), bucket_cap_mb=0.004, overlapping_allreduce=overlap
    )
    module = model.get_module()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    flat = engine_of(model).storage
    seen = []

    def update() -> None:
        generator = torch.Generator().manual_seed(smp.dp_rank())
        module(torch.randn(4, 30, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert flat._gathers.pending == overlap

    update()
    update()  # the forward has waited: equal inputs give equal outputs
    with torch.no_grad():
        seen.append(module(torch.ones(2, 30)))
    update()
    seen.append(module.table.weight.detach().clone())
    update()
    seen.extend(value.clone() for value in module.state_dict().values())
    assert not flat._gathers.pending
    update()
    seen.extend(p.detach().clone() for p in module.parameters())
    update()
    copied = copy.deepcopy(module.first)
    assert type(copied._parameters) is dict
    seen.append(copied.weight.detach())
    update()
    smp.shutdown()  # waits for the last parts
    assert not flat._gathers.pending
    seen.extend(dict.values(module.table._parameters))
    return [tensor.detach().clone() for tensor in seen]


def test_whoever_reads_a_parameter_waits_for_it(pool: Pool) -> None:
    results = [seen for overlap in (True, False) for seen in pool.run(2, update_and_read, overlap)]
    for seen in results[1:]:
        assert len(seen) == len(results[0]) > 10
        for got, expected in zip(seen, results[0], strict=True):
            assert torch.equal(got, expected)


def read_after_deletion(rank: int) -> Tensor:
    import gc

    import smp

    init_sharded(ShardRun("chain"), True)
    torch.manual_seed(3)
    module = nn.Linear(30, 40)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    model(torch.full((1, 30), 1.0 + smp.dp_rank())).sum().backward()
    optimizer.step()
    assert engine_of(model).storage._gathers.pending
    del model, optimizer
    gc.collect()
    return module.weight.detach().clone()


def test_a_module_that_outlives_its_model_waits_too(pool: Pool) -> None:
    got = pool.run(2, read_after_deletion)
    torch.manual_seed(3)
    expected = nn.Linear(30, 40).weight - 0.5 * 1.5
    for weight in got:
        torch.testing.assert_close(weight, expected.detach())


# ---- together with the rest ------------------------------------------------------


def accumulate_passes(rank: int, is_sharded: bool) -> list[Tensor]:
    import smp
    from tests.reference.data import compute_loss, make_batch

    init_sharded(ShardRun("branches"), is_sharded)
    model = smp.DistributedModel(
        build("branches", torch.float64), backward_passes_per_step=2, bucket_cap_mb=0.001
    )
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), eps=1e-3))
    for step in range(4):
        batch = make_batch("branches", torch.float64, smp.dp_rank(), step)
        compute_loss("branches", model, batch).backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def test_passes_are_accumulated_on_the_shard(pool: Pool) -> None:
    plain, sharded = (pool.run(2, accumulate_passes, way)[0] for way in (False, True))
    start = list(build("branches", torch.float64).parameters())
    assert any(not torch.equal(a, b) for a, b in zip(plain, start, strict=True))
    for got, expected in zip(sharded, plain, strict=True):
        assert relative_difference(got, expected) <= 1e-12


def load_state(rank: int) -> bool:
    import smp

    init_sharded(ShardRun("branches"), True)
    model = smp.DistributedModel(build("branches", torch.float64))
    other = build("branches", torch.float64, seed=9)
    model.load_state_dict(other.state_dict())
    values = dict(other.named_parameters())
    for holding in engine_of(model).holdings.values():
        whole = values[holding.name].detach().reshape(-1)
        part = whole[holding.begin : holding.begin + holding.numel]
        assert torch.equal(holding.master.detach().reshape(-1), part)
        assert torch.equal(holding.parameter.detach().reshape(-1), whole)
    return len(engine_of(model).holdings) > 3


def test_loaded_values_are_those_of_the_masters(pool: Pool) -> None:
    assert all(pool.run(2, load_state))


def one_rank(rank: int) -> bool:
    import smp

    init_sharded(ShardRun("branches", dp=1), True)
    model = smp.DistributedModel(build("branches", torch.float64))
    return isinstance(engine_of(model).storage, WholeParameters) and not engine_of(model).holdings


def test_one_rank_keeps_everything(pool: Pool) -> None:
    assert pool.run(1, one_rank) == [True]
