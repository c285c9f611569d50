"""Trains models with blocks that compute parts of sequences, and compares with one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.harness import Heard, train_step_of
from tests.reference.context_models import batch_of, build
from tests.reference.tolerances import assert_close, relative_difference

TOLERANCE = 1e-9
HALF_TOLERANCE = 2e-2  # of losses, after updates with other roundings


@dataclass(frozen=True)
class ContextRun:
    """A training run of a model of `context_models`.

    Attributes:
        name: name of the model.
        cp: number of ranks that compute parts.
        lengths: numbers of tokens, step by step.
        num_samples: samples of a microbatch.
        config: further keys for ``smp.init``.
        checkpointed: whether smp checkpoints the blocks.
    """

    name: str
    cp: int = 2
    lengths: tuple[int, ...] = (7, 10, 9)
    num_samples: int = 2
    microbatches: int = 2
    steps: int = 3
    config: tuple[tuple[str, Any], ...] = ()
    checkpointed: bool = False

    @property
    def is_half(self) -> bool:
        """Returns whether the ranks train a float32 model with 16 bits."""
        return bool({"bf16", "fp16"} & dict(self.config).keys())

    @property
    def is_sharded(self) -> bool:
        """Returns whether ranks have gradients of other parameters, or parts of them."""
        keys = {"sharded_data_parallel_degree", "shard_optimizer_state"}
        return bool(keys & dict(self.config).keys())

    def batch(self, step: int) -> dict[str, Tensor]:
        return batch_of(step, self.lengths, self.num_samples * self.microbatches)


@dataclass
class Calls:
    """The calls of a block.

    Attributes:
        in_parts, whole: numbers of calls.
        problems: reasons why calls had whole sequences.
        in_ring: number of calls of attention that went around rings.
    """

    in_parts: int
    whole: int
    problems: list[str]
    in_ring: int


def calls_of(model: Any) -> dict[str, Calls]:
    """Returns the calls of the blocks of a model by their names."""
    blocks = model._engine.sequences.blocks
    return {
        block.name: Calls(block.num_cut, block.num_whole, list(block.problems), block.num_in_ring)
        for block in blocks
    }


@dataclass
class Trained:
    """Records what one rank, or one process, saw.

    Attributes:
        blocks: calls of blocks by name.
        warnings: lines of the log about blocks that compute whole sequences, or share heads.
        num_bytes: number of bytes that this rank sent to those that compute parts.
    """

    losses: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    blocks: dict[str, Calls] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    num_bytes: int = 0


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def train(rank: int, runs: Sequence[ContextRun]) -> list[Trained | str]:
    """Trains one run after the other; a run that raises gives the error's text."""
    import smp

    records: list[Trained | str] = []
    for run in runs:
        try:
            records.append(_train(run))
        except Exception as error:
            records.append(f"{type(error).__name__}: {error}")
        smp.shutdown()
    return records


def _train(run: ContextRun) -> Trained:
    import smp

    keys = {"context_parallel_degree": run.cp, "ddp": True, "microbatches": run.microbatches}
    smp.init(keys | dict(run.config))
    heard = Heard("smp: context_parallel_")
    record = Trained()
    plain = build(run.name)
    if run.is_half:
        plain.float()
    model: Any = smp.DistributedModel(plain)
    if run.checkpointed:
        for block in model._engine.sequences.blocks:
            smp.set_activation_checkpointing(block.module)
    optimizer = smp.DistributedOptimizer(optimizer_of(model.parameters()))
    step_of = train_step_of(model, lambda model, batch: model(**batch))
    for step in range(run.steps):
        record.losses.append(step_of(run.batch(step)).reduce_mean().item())
        if not run.is_sharded:
            record.grads.append(
                {n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None}
            )
        optimizer.step()
        optimizer.zero_grad()
    record.params = {name: value.clone() for name, value in model.state_dict().items()}
    record.blocks, record.warnings = calls_of(model), heard.texts
    record.num_bytes = model._engine._current.rank.comms.cp_group.traffic()[1]
    return record


@functools.cache
def reference_of(run: ContextRun) -> Trained:
    """Trains the plain model in this process."""
    model = build(run.name)
    optimizer = optimizer_of(model.parameters())
    record = Trained()
    for step in range(run.steps):
        parts = {name: value.chunk(run.microbatches) for name, value in run.batch(step).items()}
        losses = []
        for mb in range(run.microbatches):
            loss = model(**{name: part[mb] for name, part in parts.items()}) / run.microbatches
            loss.backward()
            losses.append(loss.item())
        record.losses.append(sum(losses))
        record.grads.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        optimizer.zero_grad()
    record.params = {name: value.clone() for name, value in model.state_dict().items()}
    return record


def check_numbers(run: ContextRun, record: Trained) -> None:
    """Losses, gradients and parameters equal those of one process; losses alone with 16 bits."""
    expected = reference_of(run)
    difference = relative_difference(torch.tensor(record.losses), torch.tensor(expected.losses))
    tolerance = HALF_TOLERANCE if run.is_half else TOLERANCE
    assert difference <= tolerance, f"{run}: losses {record.losses}, not {expected.losses}"
    if run.is_half:
        return
    for step, grads in enumerate([] if run.is_sharded else expected.grads):
        found = {strip(name): grad for name, grad in record.grads[step].items()}
        assert found.keys() == grads.keys()
        assert max(grad.abs().max().item() for grad in grads.values()) > 1e-3
        assert_close(found, grads, torch.float64, f"{run}: gradients of step {step}", TOLERANCE)
    params = {strip(name): value for name, value in record.params.items()}
    assert_close(params, expected.params, torch.float64, f"{run}: parameters", TOLERANCE)


def strip(name: str) -> str:
    """Removes the wrapper's own prefix from a parameter name."""
    return name.removeprefix("module.")


def check_runs(pool: Pool, runs: Sequence[ContextRun]) -> list[Trained]:
    """Trains on ranks and compares each with one process; returns the first rank's records."""
    (cp,) = {run.cp for run in runs}
    by_rank = pool.run(cp, train, list(runs))
    for records in by_rank:
        for run, record in zip(runs, records, strict=True):
            assert isinstance(record, Trained), f"{run}: {record}"
            check_numbers(run, record)
    return by_rank[0]
