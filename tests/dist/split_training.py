"""Hugging Face families with split layers: their runs, judged by one process."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.steps import (
    TOLERANCES,
    Reference,
    Steps,
    check_numbers,
    compare,
    make_optimizer,
    marked_values,
    reference_steps,
    replicas_of,
    run_steps,
)
from tests.reference.lifted_casts import lift_forwards, lifted_casts
from tests.reference.split_families import (
    PLANNED_FAMILIES,
    SPLIT_FAMILIES,
    build_split_family,
    make_split_batch,
)
from tests.reference.tolerances import relative_difference

MODES = tuple((optimize, prescaled) for optimize in ("memory", "speed") for prescaled in (0, 1))
LAYOUTS = ((1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2))  # (pp, tp, rdp)
# With a window a query behind the padding may see no key at all. Its result is then undefined,
# and differs between the attention functions of transformers. No test compares it.
WINDOWED = ("gptneo", "mistral")
UNTOUCHED_TOLERANCE = 1e-5  # of fp64 against the model with its casts


@dataclass(frozen=True)
class SplitRun:
    """A training run of a family."""

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
    compile: str | None = None
    cp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.cp * self.rdp

    @property
    def num_batches(self) -> int:
        """Different batches that the ranks read."""
        return self.rdp if self.prescaled else self.tp * self.rdp

    def __str__(self) -> str:
        batch = "prescaled" if self.prescaled else "own batch"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.case} pp{self.pp} tp{self.tp} cp{self.cp} rdp{self.rdp} {self.optimize} "
            f"{batch} {dtype} mb{self.microbatches}"
        )


@dataclass(kw_only=True)
class SplitRecord(Steps):
    """Records what one rank saw."""

    pp_rank: int
    tp_rank: int
    params: dict[str, Any] = field(default_factory=dict)  # local, marked, after the last step
    split_share: float = 1.0  # local bytes of split parameters in their whole bytes
    num_split: int = 0


def init_split(run: SplitRun) -> None:
    """``smp.init`` with the layout of a run."""
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": run.pp,
            "tensor_parallel_degree": run.tp,
            "context_parallel_degree": run.cp,
            "microbatches": run.microbatches,
            "pipeline": run.schedule,
            "optimize": run.optimize,
            "prescaled_batch": run.prescaled,
            "ddp": True,
        }
    )


def train_split(rank: int, runs: Sequence[SplitRun]) -> list[SplitRecord]:
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


def _train(run: SplitRun) -> SplitRecord:
    import smp
    from smp.tensor_parallel import sharding

    init_split(run)
    model = smp.DistributedModel(build_marked(run), compile=run.compile)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))

    batch_idx = smp.rdp_rank() if run.prescaled else smp.dp_rank()
    record = SplitRecord(
        rdp_rank=smp.rdp_rank() * run.cp + smp.cp_rank(),
        batch_idx=batch_idx,
        pp_rank=smp.pp_rank(),
        tp_rank=smp.tp_rank(),
    )
    batch_of = functools.partial(make_split_batch, run.case, batch_idx)
    run_steps(record, model, optimizer, batch_of, run.steps)
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


# ---- judging ---------------------------------------------------------------


@functools.cache
def reference_of(
    case: str, dtype: torch.dtype, num_batches: int, microbatches: int, steps: int, lifted: bool
) -> Reference:
    """Mean over batches and microbatches of the model's own loss; fp64 without float32 inside."""
    with lifted_casts(lifted and dtype == torch.float64):
        model = build_split_family(case, dtype)
        batch_of = functools.partial(make_split_batch, case)
        return reference_steps(model, batch_of, num_batches, microbatches, steps)


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
        run, records: the run, and its ranks' records.
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
        check_numbers(where, record, expected, tolerance, _norm_tolerance(run, lifted))
        batch = make_split_batch(run.case, record.batch_idx, 0)
        kept = batch["attention_mask"].bool().chunk(run.microbatches)
        for mb, logits in enumerate(record.logits):
            wanted = expected.logits[record.batch_idx][mb]
            if run.case in WINDOWED:
                logits, wanted = logits[kept[mb]], wanted[kept[mb]]
            difference = relative_difference(logits, wanted)
            assert difference <= tolerance, f"{where}: logits of {mb}: {difference:.1e}"
    for replica in replicas_of(records):
        for step in range(run.steps):
            grads = whole_of(run.case, [record.grads[step] for record in replica])
            _check_norms(run, replica, step)
            what = f"{run}: gradients of step {step}"
            compare(grads, expected.grads[step], run.dtype, tolerance, what)
        params = whole_of(run.case, [record.params for record in replica])
        what = f"{run}: parameters after {run.steps} steps"
        compare(params, expected.params, run.dtype, tolerance, what)


def _norm_tolerance(run: SplitRun, lifted: bool) -> float:
    """Returns the relative tolerance of the norm.

    It is wider in float32, where rounding has changed the parameters in earlier steps.
    """
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


def _check_was_split(run: SplitRun, records: Sequence[SplitRecord]) -> None:
    """Refuses a vacuous pass: layers are really split, and the slices are about 1 / tp."""
    assert len(records) == run.world_size
    for record in records:
        assert record.num_split >= 4, f"{run}: only {record.num_split} parameters are split"
        assert record.split_share < 1 / run.tp + 0.06, f"{run}: {record.split_share} of the bytes"
