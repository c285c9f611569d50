"""Contenders of `pipeline`: smp, torch's 1F1B, and the model in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from allocation_meter import AllocationMeter
from models import GptShape, make_optimizer
from pipeline_models import loss_of, make_stage
from stage_clock import StageClock, StageCosts
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from workers import place

import smp

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and its batch, the same for all contenders."""

    kind: str
    shape: GptShape
    microbatches: int
    num_ranks: int
    batch: Batch


@dataclass
class Contender:
    """``run`` is timed; ``finish``, the optimizer, is not."""

    run: Callable[[], float]
    """One step; returns its loss where it is known, else NaN."""
    optimizer: object
    losses: list[float] = field(default_factory=list)

    def finish(self) -> None:
        self.optimizer.step()  # type: ignore[attr-defined]
        self.optimizer.zero_grad()  # type: ignore[attr-defined]


def with_smp(model: nn.Module, case: Case, cut: str) -> tuple[Contender, smp.DistributedModel]:
    """The unmodified model, partitioned by itself.

    Args:
        cut: module before which to cut in two, for comparison: it and all after it are on rank 1.
    """
    if cut:
        names = [name for name, _ in model.named_modules()]
        place(model, {name: int(i >= names.index(cut)) for i, name in enumerate(names) if name})
    distributed = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(make_optimizer(distributed))

    @smp.step
    def train_step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = distributed(ids, targets)
        distributed.backward(loss)
        return loss

    def run() -> float:
        return float(train_step(*case.batch).reduce_mean())

    return Contender(run, optimizer), distributed


def with_torch(model: nn.Module, case: Case) -> Contender:
    """Equal blocks per rank, cut by hand."""
    idx, last = smp.pp_rank(), case.num_ranks - 1
    module = make_stage(model, idx, case.num_ranks)
    stage = PipelineStage(module, idx, case.num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.microbatches, loss_fn=loss_of(case.kind))
    ids, targets = case.batch

    def run() -> float:
        losses: list[Tensor] = []
        if idx == 0:
            schedule.step(ids)
        elif idx == last:
            schedule.step(target=targets, losses=losses, return_outputs=False)
        else:
            schedule.step()
        return float(torch.stack(losses).mean()) if losses else float("nan")

    return Contender(run, make_optimizer(module))


class OneProcess:
    """The whole model in this process; its time is charged to the ranks of smp's partition."""

    def __init__(self, model: nn.Module, case: Case, count: int) -> None:
        self.model = model
        self.case = case
        self.count = count
        """Microbatches per run."""
        self.costs: list[StageCosts] = []
        self._clock: StageClock | None = None

    def watch(self, owner_of: dict[str, int], meter: AllocationMeter) -> None:
        self._clock = StageClock(self.model, owner_of, self.case.num_ranks, meter)

    def contender(self) -> Contender:
        return Contender(self.run, make_optimizer(self.model))

    def run(self) -> float:
        pieces = zip(*(part.chunk(self.case.microbatches) for part in self.case.batch), strict=True)
        losses = [self._train(piece) for piece in itertools.islice(pieces, self.count)]
        return sum(losses) / len(losses)

    def _train(self, piece: Batch) -> float:
        assert self._clock is not None
        loss = torch.zeros(())

        def run_forward() -> Tensor:
            nonlocal loss
            loss = self.model(*piece)
            return loss / self.case.microbatches

        self.costs.append(self._clock.run(run_forward))
        return float(loss.detach())
