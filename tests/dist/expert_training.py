"""Trains families whose experts are spread over ranks, and judges the runs by one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.split_training import marked_values
from tests.reference.expert_families import build_experts, make_expert_batch
from tests.reference.lifted_casts import lift_forwards, lifted_casts
from tests.reference.tolerances import assert_close, relative_difference

#: Families whose own plans split attention into heads, beside experts that ranks share.
SPLIT_ATTENTION = ("mixtral", "qwen3_moe")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class ExpertRun:
    """One training run of a family whose experts are spread over all tensor-parallel ranks.

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


@dataclass
class ExpertRecord:
    """What one rank saw."""

    rdp_rank: int
    batch_idx: int
    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Any]] = field(default_factory=list)  # [step], local, marked
    params: dict[str, Any] = field(default_factory=dict)  # whole, after the last step
    spread: dict[str, list[int]] = field(default_factory=dict)  # local shapes of experts
    blocks: list[str] = field(default_factory=list)  # names of what the model's plan splits
    traffic: int = 0


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    # With the default epsilon a gradient near zero turns rounding into a whole step.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


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
    """One run after the other, each with its own init and shutdown."""
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

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        model.backward(loss)
        return loss

    batch_idx = smp.rdp_rank() if run.prescaled else smp.dp_rank()
    record = ExpertRecord(smp.rdp_rank(), batch_idx)
    is_sharded = bool(run.config)
    for step in range(run.steps):
        losses = train_step(make_expert_batch(batch_idx, step))
        record.losses.append([loss.item() for loss in losses.outputs])
        if not is_sharded:
            record.grads.append(marked_values(model, "grad"))
        record.norms.append(float(smp.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.step()
        optimizer.zero_grad()
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


@dataclass
class Reference:
    """The same run in one process."""

    losses: list[list[list[float]]] = field(default_factory=list)  # [step][batch][microbatch]
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


@functools.cache
def reference_of(
    case: str, dtype: torch.dtype, num_batches: int, microbatches: int, steps: int, favourite: bool
) -> Reference:
    """Mean over batches and microbatches of the model's own loss; fp64 without float32 inside."""
    reference = Reference()
    with lifted_casts(dtype == torch.float64):
        model = build_experts(case, dtype, favourite=favourite)
        optimizer = make_optimizer(model.parameters())
        for step in range(steps):
            reference.losses.append([])
            for batch_idx in range(num_batches):
                batch = make_expert_batch(batch_idx, step)
                pieces = {name: tensor.chunk(microbatches) for name, tensor in batch.items()}
                losses = []
                for mb in range(microbatches):
                    output = model(**{name: piece[mb] for name, piece in pieces.items()})
                    (output["loss"] / (microbatches * num_batches)).backward()
                    losses.append(output["loss"].item())
                reference.losses[-1].append(losses)
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            reference.grads.append(grads)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            reference.norms.append(norm.item())
            optimizer.step()
            optimizer.zero_grad()
    reference.params = {n: p.detach().clone() for n, p in model.named_parameters()}
    return reference


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
        for step in range(run.steps):
            losses = torch.tensor(record.losses[step], dtype=torch.float64)
            wanted = torch.tensor(expected.losses[step][record.batch_idx], dtype=torch.float64)
            difference = relative_difference(losses, wanted)
            assert difference <= tolerance, f"{run}: losses of step {step}: {difference:.1e}"
            norm = abs(record.norms[step] / expected.norms[step] - 1)
            assert norm <= 1e-5, f"{run}: norm {record.norms[step]}, not {expected.norms[step]}"
    for rdp_rank in range(run.rdp):
        replica = [record for record in records if record.rdp_rank == rdp_rank]
        for step, grads in enumerate(expected.grads):
            if not replica[0].grads:
                continue
            whole = partial.merge([record.grads[step] for record in replica])
            assert set(grads) <= set(whole), f"{run}: no gradients of {set(grads) - set(whole)}"
            got = {name: whole[name] for name in grads}
            assert_close(got, grads, run.dtype, f"{run}: gradients of step {step}", tolerance)
    for record in records:
        got = {name: record.params[name] for name in expected.params}
        assert_close(got, expected.params, run.dtype, f"{run}: parameters", tolerance)


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
