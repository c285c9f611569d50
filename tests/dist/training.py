"""Training tests: the jobs that ranks run, and the comparison of their records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import train_step_of
from tests.patience import PATIENCE_S
from tests.reference.data import compute_loss, make_batch
from tests.reference.lifted_casts import lift_forwards, lifted_casts
from tests.reference.models import HF_LAYERS, HF_MODELS, Place, build, nowhere
from tests.reference.single_process import make_optimizer, train_reference
from tests.reference.tolerances import TOLERANCE, assert_close, largest, relative_difference

LAYOUTS = ((2, 1), (1, 2), (2, 2), (4, 1), (4, 2))  # (pipeline, data parallel)
SCHEDULES = ("interleaved", "simple")
MICROBATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Run:
    """A training run: its model, its layout and its settings."""

    case: str
    pp: int
    dp: int
    schedule: str = "interleaved"
    microbatches: int = 4
    dtype: torch.dtype = torch.float64
    manual: bool = False  # partition: smp.partition contexts or automatic
    steps: int = 3
    dummies: bool = False  # ranks other than the driver get [batch, 0] inputs
    config: tuple[tuple[str, Any], ...] = ()  # further keys for smp.init
    model_args: tuple[tuple[str, Any], ...] = ()  # for DistributedModel
    placed: tuple[tuple[str, int], ...] = ()  # name and partition for smp.set_partition
    cp: int = 1  # ranks that read one batch
    lifted: bool = False  # the model, here and in one process, without its casts to float32

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp

    def __str__(self) -> str:
        kind = "manual" if self.manual else "auto"
        return (
            f"{self.case} pp{self.pp} dp{self.dp} cp{self.cp} {self.schedule} "
            f"mb{self.microbatches} {str(self.dtype).removeprefix('torch.')} {kind}"
        )


@dataclass
class RankRecord:
    """Records what one rank saw."""

    pp_rank: int
    dp_rank: int
    cp_rank: int = 0
    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # of local parameters
    params: dict[str, Tensor] = field(default_factory=dict)  # local, after the last step
    remote_calls: int = 0
    executed: list[Any] = field(default_factory=list)
    parts: dict[str, tuple[int, list[str]]] = field(default_factory=dict)  # by block: calls in
    # parts of sequences, reasons for whole ones


def init(run: Run) -> None:
    """``smp.init`` with the layout of a run."""
    import smp

    config: dict[str, Any] = {
        "pipeline_parallel_degree": run.pp,
        "context_parallel_degree": run.cp,
        "microbatches": run.microbatches,
        "pipeline": run.schedule,
        "ddp": run.dp * run.cp > 1,
        "auto_partition": not run.manual,
    }
    if run.manual:
        config["default_partition"] = 0
    smp.init(config | dict(run.config))


def make_model(run: Run, seed: int = 1) -> nn.Module:
    """The distributed model of a run, not partitioned yet."""
    import smp

    place: Place = nowhere
    if run.manual:

        def place(index: int) -> contextlib.AbstractContextManager[Any]:
            return smp.partition(index % run.pp)

    with lifted_casts(run.lifted):
        model = build(run.case, run.dtype, place, seed)
    if run.lifted:
        lift_forwards(model)
    distributed: nn.Module = smp.DistributedModel(model, **dict(run.model_args))
    if run.manual and run.case in HF_MODELS:
        for index, layer in enumerate(model.get_submodule(HF_LAYERS[run.case])):
            smp.set_partition(layer, index % run.pp)
    for name, index in run.placed:
        smp.set_partition(model.get_submodule(name), index)
    return distributed


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of this rank under the names of the plain model."""
    named: Iterable[tuple[str, nn.Parameter]] = model.local_named_parameters()
    return {strip(name): parameter for name, parameter in named}


def strip(name: str) -> str:
    """Removes the wrapper's own prefix from a parameter name."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def train(rank: int, run: Run) -> RankRecord:
    """Trains and records; leaves smp initialised."""
    import smp

    init(run)
    # Replicas other than the first start with wrong weights: they have to
    # receive the first one's.
    model = make_model(run, seed=1 + smp.dp_rank() * run.cp + smp.cp_rank())
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
    case = run.case
    train_step = train_step_of(model, lambda model, batch: compute_loss(case, model, batch))
    record = RankRecord(smp.pp_rank(), smp.dp_rank(), smp.cp_rank())
    for step in range(run.steps):
        batch = make_batch(case, run.dtype, smp.dp_rank(), step)
        if run.dummies and smp.pp_rank() != 0:
            batch = {name: torch.empty(t.shape[0], 0) for name, t in batch.items()}
        output = train_step(batch)
        record.losses.append([loss.item() for loss in output.outputs])
        record.grads.append(
            {
                name: None if p.grad is None else p.grad.detach().clone().cpu()
                for name, p in local_parameters(model).items()
            }
        )
        optimizer.step()
        optimizer.zero_grad()
    record.params = {name: p.detach().clone().cpu() for name, p in local_parameters(model).items()}
    record.remote_calls = smp.metrics.server_stats()["remote_calls"]
    record.executed = list(smp.metrics.executed_order())
    blocks = model._engine.sequences.blocks
    record.parts = {block.name: (block.num_cut, list(block.problems)) for block in blocks}
    return record


def train_all(rank: int, runs: list[Run]) -> list[RankRecord]:
    """Trains one run after the other, each with its own init and shutdown."""
    import smp

    records = []
    for run in runs:
        try:
            records.append(train(rank, run))
        except Exception as error:
            error.add_note(f"while running {run}")
            raise
        smp.shutdown()
    return records


# ---- judging ---------------------------------------------------------------


def join_parts(records: list[RankRecord], run: Run, what: str) -> dict[str, Any]:
    """Joins the local parts of one replica's ranks; replicas must agree bit by bit."""
    joined: dict[tuple[int, int], dict[str, Any]] = {}
    for record in records:
        part = record.params if what == "params" else record.grads[int(what)]
        own = joined.setdefault((record.dp_rank, record.cp_rank), {})
        assert not set(own) & set(part), f"{run}: two ranks hold {sorted(set(own) & set(part))}"
        own.update(part)
    assert {dp_rank for dp_rank, _ in joined} == set(range(run.dp)), f"{run}: replicas are missing"
    first, *others = joined.values()
    for other in others:
        assert_bitwise_equal(other, first, f"{run}: replicas, {what}")
    return first


def assert_bitwise_equal(a: dict[str, Any], b: dict[str, Any], what: str) -> None:
    assert set(a) == set(b), f"{what}: names differ: {sorted(set(a) ^ set(b))}"
    for name, tensor in a.items():
        same = tensor is b[name] is None or (
            tensor is not None and b[name] is not None and torch.equal(tensor, b[name])
        )
        assert same, f"{what}: {name} is not bitwise equal"


def check_against_reference(records: list[RankRecord], run: Run) -> None:
    """Losses, gradients and parameters equal the one-process run."""
    reference = train_reference(
        run.case, run.dtype, run.dp, run.microbatches, run.steps, run.lifted
    )
    check_was_distributed(records, run)
    worst = 0.0
    for step in range(run.steps):
        for record in records:
            where = f"{run}: step {step}, pp_rank {record.pp_rank}, dp_rank {record.dp_rank}"
            expected = torch.tensor(reference.losses[step][record.dp_rank])
            got = torch.tensor(record.losses[step])
            assert relative_difference(got, expected) <= loss_tolerance(run), (
                f"{where}: losses {got.tolist()} instead of {expected.tolist()}"
            )
        grads = join_parts(records, run, str(step))
        assert largest(grads) > 1e-3, f"{run}: gradients are zero, the test shows nothing"
        what = f"{run}: gradients of step {step}"
        worst = max(worst, assert_close(grads, reference.grads[step], run.dtype, what))
    params = join_parts(records, run, "params")
    what = f"{run}: parameters after {run.steps} steps"
    change = assert_close(params, reference.params, run.dtype, what)
    print(f"largest difference: gradients {worst:.1e}, parameters {change:.1e}: {run}")


def loss_tolerance(run: Run) -> float:
    return TOLERANCE[run.dtype]


def check_was_distributed(records: list[RankRecord], run: Run) -> None:
    """Refuses a vacuous pass: every pipeline rank holds and did something."""
    assert len(records) == run.world_size > 1
    assert {(r.pp_rank, r.dp_rank, r.cp_rank) for r in records} == {
        (p, d, c) for p in range(run.pp) for d in range(run.dp) for c in range(run.cp)
    }
    if run.pp > 1:
        for record in records:
            assert record.params, f"{run}: pp_rank {record.pp_rank} holds no parameter"
        for dp_rank in range(run.dp):
            calls = sum(r.remote_calls for r in records if r.dp_rank == dp_rank)
            assert calls >= run.steps * run.microbatches * run.cp, (
                f"{run}: only {calls} remote calls"
            )


def check_runs(pool: Any, runs: list[Run], timeout: float = PATIENCE_S) -> list[list[RankRecord]]:
    """Runs all of one world size in one visit to the pool and checks each.

    Returns:
        records of all ranks, run by run.
    """
    world_sizes = {run.world_size for run in runs}
    assert len(world_sizes) == 1, "all runs of one call share a world size"
    results = pool.run(world_sizes.pop(), train_all, runs, timeout=timeout)
    by_run = [[records[index] for records in results] for index in range(len(runs))]
    for run, records in zip(runs, by_run, strict=True):
        check_against_reference(records, run)
    return by_run
