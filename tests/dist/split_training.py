"""Trains Hugging Face families with split layers, and judges the runs by one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.reference.lifted_casts import lift_forwards, lifted_casts
from tests.reference.split_families import (
    PLANNED_FAMILIES,
    SPLIT_FAMILIES,
    build_split_family,
    make_split_batch,
)
from tests.reference.tolerances import assert_close, relative_difference

MODES = tuple((optimize, prescaled) for optimize in ("memory", "speed") for prescaled in (0, 1))
LAYOUTS = ((1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2))  # (pp, tp, rdp)
# With a window a query behind the padding may see no key at all; what it gets then is not defined,
# and differs between the attention functions of transformers. Nobody reads it.
WINDOWED = ("gptneo", "mistral")
# fp64 against a reference without casts to float32, and fp32.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
UNTOUCHED_TOLERANCE = 1e-5  # of fp64 against the model with its casts


@dataclass(frozen=True)
class SplitRun:
    """One training run of a family."""

    case: str
    pp: int
    tp: int
    rdp: int
    optimize: str = "memory"
    prescaled: bool = False
    dtype: torch.dtype = torch.float64
    microbatches: int = 2
    steps: int = 3
    schedule: str = "interleaved"

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.rdp

    @property
    def num_batches(self) -> int:
        """Different batches that the ranks read."""
        return self.rdp if self.prescaled else self.tp * self.rdp

    def __str__(self) -> str:
        batch = "prescaled" if self.prescaled else "own batch"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.case} pp{self.pp} tp{self.tp} rdp{self.rdp} {self.optimize} {batch} {dtype} "
            f"mb{self.microbatches}"
        )


@dataclass
class SplitRecord:
    """What one rank saw."""

    pp_rank: int
    tp_rank: int
    rdp_rank: int
    batch_idx: int
    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    logits: list[Tensor] = field(default_factory=list)  # of the first step, by microbatch
    norms: list[float] = field(default_factory=list)  # [step]
    grads: list[dict[str, Any]] = field(default_factory=list)  # [step], local, marked
    params: dict[str, Any] = field(default_factory=dict)  # local, marked, after the last step
    state: dict[str, Any] = field(default_factory=dict)  # whole, before the first step
    split_share: float = 1.0  # local bytes of split parameters in their whole bytes
    num_split: int = 0


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    # With the default epsilon a gradient near zero turns rounding into a whole step.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def init_split(run: SplitRun) -> None:
    """``smp.init`` with the layout of a run."""
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": run.pp,
            "tensor_parallel_degree": run.tp,
            "microbatches": run.microbatches,
            "pipeline": run.schedule,
            "optimize": run.optimize,
            "prescaled_batch": run.prescaled,
            "ddp": True,
        }
    )


def train_split(rank: int, runs: Sequence[SplitRun]) -> list[SplitRecord]:
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


def _train(run: SplitRun) -> SplitRecord:
    import smp
    from smp.tensor_parallel import sharding

    init_split(run)
    model = smp.DistributedModel(build_marked(run))
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        output = model(**batch)
        model.backward(output["loss"])
        return output["loss"], output["logits"].detach()

    batch_idx = smp.rdp_rank() if run.prescaled else smp.dp_rank()
    record = SplitRecord(smp.pp_rank(), smp.tp_rank(), smp.rdp_rank(), batch_idx)
    for step in range(run.steps):
        losses, logits = train_step(make_split_batch(run.case, batch_idx, step))
        record.losses.append([loss.item() for loss in losses.outputs])
        if step == 0:
            record.logits = [part.detach().cpu().clone() for part in logits.outputs]
        record.norms.append(float(smp.clip_grad_norm_(model.parameters(), 1e9)))
        record.grads.append(marked_values(model, "grad"))
        optimizer.step()
        optimizer.zero_grad()
    record.params = marked_values(model, "data")
    split = [p for p in model.local_parameters() if sharding.interval_of(p) is not None]
    whole = sum(_numel(sharding.whole_shape(p)) for p in split)
    record.num_split = len(split)
    record.split_share = sum(p.numel() for p in split) / whole if whole else 1.0
    return record


def build_marked(run: SplitRun, seed: int = 1) -> Any:
    """The model of a run, to be split. One with a plan keeps its own code, which casts to float32:
    in fp64 that is lifted."""
    import smp

    is_lifted = run.case in PLANNED_FAMILIES and run.dtype == torch.float64
    with lifted_casts(is_lifted), smp.tensor_parallelism():
        plain = build_split_family(run.case, run.dtype, seed)
    if is_lifted:
        lift_forwards(plain)
    return plain


def _numel(shape: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


def marked_values(model: Any, what: str) -> dict[str, Any]:
    """Local gradients or values by name, with what says which slices they are."""
    from smp.tensor_parallel import partial

    named = list(model.local_named_parameters())
    values = {name: getattr(p, what) for name, p in named}
    present = {n: v.detach().cpu().clone() for n, v in values.items() if v is not None}
    return {**present, partial.PARTIAL_MARK: True, partial.SHARDS_MARK: partial.slices_of(named)}


# ---- judging ---------------------------------------------------------------


@dataclass
class Reference:
    """The same run in one process, with the model as its authors wrote it."""

    losses: list[list[list[float]]] = field(default_factory=list)  # [step][batch][microbatch]
    logits: list[list[Tensor]] = field(default_factory=list)  # [batch][microbatch], first step
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


@functools.cache
def reference_of(
    case: str, dtype: torch.dtype, num_batches: int, microbatches: int, steps: int, lifted: bool
) -> Reference:
    """Mean over batches and microbatches of the model's own loss; fp64 without float32 inside."""
    with lifted_casts(lifted and dtype == torch.float64):
        return _reference_of(case, dtype, num_batches, microbatches, steps)


def _reference_of(
    case: str, dtype: torch.dtype, num_batches: int, microbatches: int, steps: int
) -> Reference:
    model = build_split_family(case, dtype)
    optimizer = make_optimizer(model.parameters())
    reference = Reference()
    for step in range(steps):
        reference.losses.append([])
        for batch_idx in range(num_batches):
            batch = make_split_batch(case, batch_idx, step)
            pieces = {name: tensor.chunk(microbatches) for name, tensor in batch.items()}
            outputs = []
            for mb in range(microbatches):
                output = model(**{name: piece[mb] for name, piece in pieces.items()})
                (output["loss"] / (microbatches * num_batches)).backward()
                outputs.append(output)
            reference.losses[-1].append([output["loss"].item() for output in outputs])
            if step == 0:
                reference.logits.append([output["logits"].detach() for output in outputs])
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        reference.grads.append(grads)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        reference.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    reference.params = {n: p.detach().clone() for n, p in model.named_parameters()}
    return reference


def whole_of(case: str, parts: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors under the names of the Hugging Face model."""
    from smp.nn import huggingface
    from smp.tensor_parallel import partial

    if case in PLANNED_FAMILIES:
        return partial.merge(parts)
    family = getattr(huggingface, case)
    translate = getattr(family, f"translate_state_dict_to_hf_{case}")
    translated: dict[str, Tensor] = translate(partial.merge(parts))
    return translated


def check_runs(pool: Pool, runs: Sequence[SplitRun], timeout: float = 240.0) -> None:
    """Runs all of one world size in one visit to the pool and checks each."""
    (world_size,) = {run.world_size for run in runs}
    by_rank = pool.run(world_size, train_split, list(runs), timeout=timeout)
    for index, run in enumerate(runs):
        check_run(run, [records[index] for records in by_rank])


def check_run(run: SplitRun, records: Sequence[SplitRecord], lifted: bool = True) -> None:
    """Losses, logits, norms, every gradient and the parameters equal the one-process run.

    Args:
        run, records: what ran, and what its ranks saw.
        lifted: compare with a model that has no casts to float32; else with the model as it is.
    """
    assert run.case in SPLIT_FAMILIES | PLANNED_FAMILIES
    tolerance = TOLERANCES[run.dtype] if lifted else UNTOUCHED_TOLERANCE
    _check_was_split(run, records)
    expected = reference_of(
        run.case, run.dtype, run.num_batches, run.microbatches, run.steps, lifted
    )
    for record in records:
        where = f"{run}: pp {record.pp_rank} tp {record.tp_rank} rdp {record.rdp_rank}"
        for step in range(run.steps):
            losses = torch.tensor(record.losses[step], dtype=torch.float64)
            wanted = torch.tensor(expected.losses[step][record.batch_idx], dtype=torch.float64)
            difference = relative_difference(losses, wanted)
            assert difference <= tolerance, f"{where}: losses of step {step}: {difference:.1e}"
            norm = abs(record.norms[step] / expected.norms[step] - 1)
            assert norm <= _norm_tolerance(run, lifted), (
                f"{where}: norm of step {step} is {record.norms[step]}, not {expected.norms[step]}"
            )
        batch = make_split_batch(run.case, record.batch_idx, 0)
        kept = batch["attention_mask"].bool().chunk(run.microbatches)
        for mb, logits in enumerate(record.logits):
            wanted = expected.logits[record.batch_idx][mb]
            if run.case in WINDOWED:
                logits, wanted = logits[kept[mb]], wanted[kept[mb]]
            difference = relative_difference(logits, wanted)
            assert difference <= tolerance, f"{where}: logits of {mb}: {difference:.1e}"
    for rdp_rank in range(run.rdp):
        replica = [record for record in records if record.rdp_rank == rdp_rank]
        for step in range(run.steps):
            grads = whole_of(run.case, [record.grads[step] for record in replica])
            _check_norms(run, replica, step)
            what = f"{run}: gradients of step {step}"
            _compare(grads, expected.grads[step], run.dtype, tolerance, what)
        params = whole_of(run.case, [record.params for record in replica])
        what = f"{run}: parameters after {run.steps} steps"
        _compare(params, expected.params, run.dtype, tolerance, what)


def _norm_tolerance(run: SplitRun, lifted: bool) -> float:
    """Of the norm against one process; in fp32 rounding has gone into the parameters before."""
    if not lifted:
        return UNTOUCHED_TOLERANCE
    return 1e-6 if run.dtype == torch.float64 else 1e-5


def _check_norms(run: SplitRun, replica: Sequence[SplitRecord], step: int) -> None:
    """The norm on every rank is that of the gradients, each counted once."""
    from smp.tensor_parallel import partial

    whole = partial.merge([record.grads[step] for record in replica])
    norms = torch.stack([grad.double().norm() for grad in whole.values()])
    for record in replica:
        difference = abs(record.norms[step] / norms.norm().item() - 1)
        assert difference <= 1e-6, f"{run}: norm of step {step} differs by {difference:.1e}"


def _compare(
    actual: dict[str, Tensor],
    expected: dict[str, Tensor],
    dtype: torch.dtype,
    tolerance: float,
    what: str,
) -> None:
    missing = set(expected) - set(actual)
    assert not missing, f"{what}: none for {sorted(missing)}"
    assert max(tensor.abs().max().item() for tensor in expected.values()) > 1e-3
    known = {name: actual[name] for name in expected}
    assert_close(known, expected, dtype, what, tolerance)


def _check_was_split(run: SplitRun, records: Sequence[SplitRecord]) -> None:
    """Refuses a vacuous pass: layers are really split, and the slices are about 1 / tp."""
    assert len(records) == run.world_size
    for record in records:
        assert record.num_split >= 4, f"{run}: only {record.num_split} parameters are split"
        assert record.split_share < 1 / run.tp + 0.06, f"{run}: {record.split_share} of the bytes"
