"""Training jobs for tests of sharded optimizer state, each without and with sharding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smp.model import engine_of
from smp.storage.flat_parameters import FlatParameters
from tests.reference.data import compute_loss, make_batch
from tests.reference.models import build
from tests.reference.split_families import build_split_family, make_split_batch

STEPS = 5
# Several buckets also for small models.
BUCKET_CAP_MB = 0.0015


@dataclass(frozen=True)
class ShardRun:
    """A training run.

    Attributes:
        case: model of `tests.reference.models`, or with ``tp`` > 1 of
            `tests.reference.split_families`.
        dp: replicas of the model, i.e. ranks that share an optimizer state.
        dtype: type of the parameters before training.
        config: further keys for ``smp.init``.
        model_args: further arguments of DistributedModel.
    """

    case: str
    dp: int = 2
    pp: int = 1
    tp: int = 1
    microbatches: int = 1
    dtype: torch.dtype = torch.float64
    config: tuple[tuple[str, Any], ...] = ()
    model_args: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        extra = "".join(f" {key}={value}" for key, value in self.config + self.model_args)
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.case} dp{self.dp} pp{self.pp} tp{self.tp} mb{self.microbatches} {dtype}{extra}"
        )


@dataclass
class ShardRecord:
    """Records what one rank saw in one training run."""

    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    norms: list[float] = field(default_factory=list)  # [step], before clipping
    params: list[dict[str, Tensor]] = field(default_factory=list)  # [step], local, after it
    num_buckets: int = 0
    num_gathers: int = 0
    num_overlapped: int = 0
    num_early_buckets: int = 0


def init_sharded(run: ShardRun, is_sharded: bool) -> None:
    """``smp.init`` with the layout of a run."""
    import smp

    config: dict[str, Any] = {
        "pipeline_parallel_degree": run.pp,
        "tensor_parallel_degree": run.tp,
        "microbatches": run.microbatches,
        "ddp": True,
        "shard_optimizer_state": is_sharded,
    }
    smp.init(config | dict(run.config))


def make_sharded(run: ShardRun, seed: int = 1) -> tuple[Any, Any]:
    """Model and optimizer."""
    import smp

    with smp.tensor_parallelism(run.tp > 1):
        plain: nn.Module = (
            build_split_family(run.case, run.dtype, seed)
            if run.tp > 1
            else build(run.case, run.dtype, seed=seed)
        )
    model = smp.DistributedModel(plain, bucket_cap_mb=BUCKET_CAP_MB, **dict(run.model_args))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    return model, smp.DistributedOptimizer(inner)


def batch_of(run: ShardRun, step: int) -> dict[str, Tensor]:
    """Makes this rank's batch of six samples, which one and three microbatches divide."""
    import smp

    if run.tp > 1:
        batch = make_split_batch(run.case, smp.dp_rank(), step)
    else:
        batch = make_batch(run.case, run.dtype, smp.dp_rank(), step)
    return {name: value[:6] for name, value in batch.items()}


def train_sharded(run: ShardRun, is_sharded: bool) -> ShardRecord:
    """Trains and records; leaves smp initialised."""
    import smp

    init_sharded(run, is_sharded)
    # Replicas other than the first have to receive the first one's weights.
    model, optimizer = make_sharded(run, seed=1 + smp.rdp_rank())

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch)["loss"] if run.tp > 1 else compute_loss(run.case, model, batch)
        model.backward(loss)
        return loss

    record = ShardRecord()
    for step in range(STEPS):
        losses = train_step(batch_of(run, step))
        record.losses.append([loss.item() for loss in losses.outputs])
        record.norms.append(float(optimizer.clip_grad_norm(1e9)))
        optimizer.step()
        optimizer.zero_grad()
        if step < STEPS - 1:  # a module has to wait, not this test
            continue
        named = model.local_named_parameters()
        record.params.append({name: p.detach().clone() for name, p in named})
    engine = engine_of(model)
    record.num_buckets = sum(reducer.num_buckets for reducer in engine.gradients.reducers)
    record.num_early_buckets = sum(r.stats.num_early_buckets for r in engine.gradients.reducers)
    storage = engine.storage
    assert isinstance(storage, FlatParameters) == is_sharded
    if isinstance(storage, FlatParameters):
        record.num_gathers = storage.num_gathers
        record.num_overlapped = storage.num_overlapped
    return record


def train_both(rank: int, runs: list[ShardRun]) -> list[tuple[ShardRecord, ShardRecord]]:
    """Trains each run without and with shards, each time with its own init and shutdown."""
    import smp

    records = []
    for run in runs:
        try:
            plain = train_sharded(run, False)
            smp.shutdown()
            records.append((plain, train_sharded(run, True)))
            smp.shutdown()
        except Exception as error:
            error.add_note(f"while running {run}")
            raise
    return records
