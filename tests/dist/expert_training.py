"""Families whose experts are spread over ranks: their runs, judged by one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.dist.pool import Pool
from tests.dist.steps import (
    TOLERANCES,
    Reference,
    Steps,
    check_numbers,
    compare,
    make_optimizer,
    reference_steps,
    replicas_of,
    run_steps,
)
from tests.reference.expert_families import build_experts, make_expert_batch
from tests.reference.lifted_casts import lift_forwards, lifted_casts

#: Families whose own plans split attention into heads, beside experts that ranks share.
SPLIT_ATTENTION = ("mixtral", "qwen3_moe")


@dataclass(frozen=True)
class ExpertRun:
    """A training run of a family whose experts are spread over all tensor-parallel ranks.

    Attributes:
        favourite: the router sends all tokens to the experts with the lowest numbers.
        checkpointing: activations of layers are computed again in backward.
        config: further keys of the configuration.
    """

    case: str
    tp: int
    pp: int = 1
    rdp: int = 1
    prescaled: bool = False
    dtype: torch.dtype = torch.float64
    microbatches: int = 2
    steps: int = 2
    favourite: bool = False
    checkpointing: bool = False
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.rdp

    @property
    def num_batches(self) -> int:
        """Different batches that the ranks read."""
        return self.rdp if self.prescaled else self.tp * self.rdp


@dataclass(kw_only=True)
class ExpertRecord(Steps):
    """Records what one rank saw."""

    params: dict[str, Any] = field(default_factory=dict)  # whole, after the last step
    spread: dict[str, list[int]] = field(default_factory=dict)  # local shapes of experts
    blocks: list[str] = field(default_factory=list)  # names of what the model's plan splits
    traffic: int = 0


def init_experts(run: ExpertRun, spreads: bool = True) -> None:
    """``smp.init`` with the layout of a run.

    Args:
        spreads: experts are spread over the ranks; else each rank of a group has all of them.
    """
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": run.pp,
            "tensor_parallel_degree": run.tp,
            "expert_parallel_degree": run.tp if spreads else 1,
            "microbatches": run.microbatches,
            "prescaled_batch": run.prescaled,
            "ddp": True,
            **dict(run.config),
        }
    )


def make_model(run: ExpertRun) -> tuple[Any, Any]:
    """The wrapped model of a run, and the module in it."""
    import smp

    is_lifted = run.dtype == torch.float64
    with lifted_casts(is_lifted), smp.tensor_parallelism():
        plain = build_experts(run.case, run.dtype, favourite=run.favourite)
    if is_lifted:
        lift_forwards(plain)
    if run.checkpointing:
        plain.gradient_checkpointing_enable()
    return smp.DistributedModel(plain), plain


def train_experts(rank: int, runs: Sequence[ExpertRun]) -> list[ExpertRecord]:
    """Trains one run after the other, each with its own init and shutdown."""
    import smp

    records = []
    for run in runs:
        try:
            records.append(_train(run))
        except Exception as error:
            error.add_note(f"while running {run}")
            raise
        smp.shutdown()
    return records


def _train(run: ExpertRun) -> ExpertRecord:
    import smp
    from smp.nn.experts import SpreadExperts
    from smp.nn.planned.block import PlannedBlock
    from smp.tensor_parallel import regions

    init_experts(run)
    model, plain = make_model(run)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    batch_idx = smp.rdp_rank() if run.prescaled else smp.dp_rank()
    record = ExpertRecord(rdp_rank=smp.rdp_rank(), batch_idx=batch_idx)
    batch_of = functools.partial(make_expert_batch, batch_idx)
    run_steps(record, model, optimizer, batch_of, run.steps, keeps_grads=not run.config)
    record.spread = {
        f"{name}.{key}": list(parameter.shape)
        for name, module in plain.named_modules()
        if isinstance(module, SpreadExperts)
        for key, parameter in module.named_parameters()
    }
    record.blocks = [n for n, module in plain.named_modules() if isinstance(module, PlannedBlock)]
    record.traffic = regions.traffic()[0]
    record.params = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return record


@functools.cache
def reference_of(
    case: str, dtype: torch.dtype, num_batches: int, microbatches: int, steps: int, favourite: bool
) -> Reference:
    """Mean over batches and microbatches of the model's own loss; fp64 without float32 inside."""
    with lifted_casts(dtype == torch.float64):
        model = build_experts(case, dtype, favourite=favourite)
        return reference_steps(model, make_expert_batch, num_batches, microbatches, steps)


def check_runs(pool: Pool, runs: Sequence[ExpertRun], timeout: float = 240.0) -> None:
    """Runs all of one world size in one visit to the pool and checks each."""
    (world_size,) = {run.world_size for run in runs}
    by_rank = pool.run(world_size, train_experts, list(runs), timeout=timeout)
    for index, run in enumerate(runs):
        check_run(run, [records[index] for records in by_rank])


def check_run(run: ExpertRun, records: Sequence[ExpertRecord]) -> None:
    """Losses, norms, every gradient and the parameters equal the one-process run."""
    from smp.tensor_parallel import partial

    expected = reference_of(
        run.case, run.dtype, run.num_batches, run.microbatches, run.steps, run.favourite
    )
    tolerance = TOLERANCES[run.dtype]
    _check_was_spread(run, records, expected)
    for record in records:
        check_numbers(str(run), record, expected, tolerance, 1e-5)
    for replica in replicas_of(records):
        for step in range(len(replica[0].grads)):
            whole = partial.merge([record.grads[step] for record in replica])
            what = f"{run}: gradients of step {step}"
            compare(whole, expected.grads[step], run.dtype, tolerance, what)
    for record in records:
        compare(record.params, expected.params, run.dtype, tolerance, f"{run}: parameters")


def _check_was_spread(run: ExpertRun, records: Sequence[ExpertRecord], expected: Reference) -> None:
    """Refuses a vacuous pass: experts are on different ranks, and tokens went between them."""
    shapes: dict[str, int] = {}
    for record in records:
        for name, shape in record.spread.items():
            shapes[name] = shapes.get(name, 0) + shape[0]
    experts = {n for n in expected.params if ".experts." in n and "shared" not in n}
    assert set(shapes) == experts, f"{run}: {sorted(shapes)}"
    for name, number in shapes.items():
        # On other pipeline ranks there are placeholders of the same shape.
        assert number == expected.params[name].shape[0] * run.rdp * run.pp, f"{run}: {name}"
        assert expected.grads[0][name].abs().max() > 1e-6, f"{run}: no gradient of {name}"
    assert any(record.traffic > 0 for record in records), run
    if run.case in SPLIT_ATTENTION:
        attention = {n[: n.index("self_attn") + 9] for n in expected.params if "self_attn" in n}
        for record in records:
            assert attention <= set(record.blocks), f"{run}: only {record.blocks} are split"
