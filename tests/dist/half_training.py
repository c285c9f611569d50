"""Training in 16 bits: the ranks' part of a test, and the same training in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.training import strip
from tests.harness import train_step_of
from tests.reference import split_families
from tests.reference.data import compute_loss, make_batch
from tests.reference.half_precision import HalfRecord, make_optimizer, train_half
from tests.reference.models import build

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
STEPS = 3
_DATA = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
CLIPPED_NORM = 0.5
SHARDINGS: dict[str, dict[str, Any]] = {
    "": {},
    "optimizer": {"shard_optimizer_state": True},
    "data": {**_DATA, "sdp_gradient_clipping": 1e9},
    "clipped data": {**_DATA, "sdp_gradient_clipping": CLIPPED_NORM},
}


@dataclass(frozen=True)
class HalfRun:
    """A training run in 16 bits.

    Attributes:
        precision: "fp16" (with a static loss scale of 1024), "bf16" or "fp32".
        case: model of `tests.reference.models`, or with ``tp`` > 1 of
            `tests.reference.split_families`.
    """

    precision: str
    case: str = "chain"
    pp: int = 1
    tp: int = 1
    dp: int = 1
    microbatches: int = 2
    schedule: str = "interleaved"
    sharding: str = ""
    split: bool = False

    @property
    def is_split(self) -> bool:
        """Returns whether modules are split; `split` has them split on one rank as well."""
        return self.tp > 1 or self.split

    @property
    def config(self) -> dict[str, Any]:
        """Further keys of the configuration."""
        precision = {} if self.precision == "fp32" else {self.precision: True}
        return {**precision, **SHARDINGS[self.sharding]}

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def loss_scale(self) -> float:
        return 1024.0 if self.precision == "fp16" else 1.0

    @property
    def num_batches(self) -> int:
        return self.dp  # a tensor-parallel group reads one batch

    def __str__(self) -> str:
        return (
            f"{self.precision} {self.case} pp{self.pp} tp{self.tp} dp{self.dp} "
            f"mb{self.microbatches} {self.schedule}{' ' if self.sharding else ''}{self.sharding}"
        )


@dataclass
class RankRecord:
    """Records what one rank saw."""

    pp_rank: int
    tp_rank: int
    rdp_rank: int
    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    norms: list[float] = field(default_factory=list)  # [step]
    grads: list[dict[str, Any]] = field(default_factory=list)  # [step], of masters, marked
    masters: dict[str, Any] = field(default_factory=dict)  # marked
    params: dict[str, Any] = field(default_factory=dict)  # of the model, marked
    dtypes: set[torch.dtype] = field(default_factory=set)  # of parameters, outputs, losses


def init_half(run: HalfRun) -> None:
    """``smp.init`` with the layout and the precision of a run."""
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": run.pp,
            "tensor_parallel_degree": run.tp,
            "microbatches": run.microbatches,
            "pipeline": run.schedule,
            "prescaled_batch": run.tp > 1,
            "ddp": True,
            **run.config,
        }
    )


def plain_model(run: HalfRun, seed: int = 1) -> nn.Module:
    """The model in float32."""
    if run.is_split:
        return split_families.build_split_family(run.case, torch.float32, seed)
    return build(run.case, torch.float32, seed=seed)


def batch_of(run: HalfRun, replica: int, step: int) -> dict[str, Tensor]:
    if run.is_split:
        return split_families.make_split_batch(run.case, replica, step)
    return make_batch(run.case, torch.float32, replica, step)


def loss_of(run: HalfRun, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if run.is_split:
        loss: Tensor = model(**batch)["loss"]
        return loss
    return compute_loss(run.case, model, batch)


def make(
    run: HalfRun, seed: int = 1, kind: str = "", **optimizer_args: Any
) -> tuple[Any, Any, Any]:
    """Model, optimizer and step function."""
    import smp

    with smp.tensor_parallelism(run.is_split):
        plain = plain_model(run, seed)
    model = smp.DistributedModel(plain)
    make_inner = (
        functools.partial(getattr(smp.optimizers, kind), lr=1e-2, eps=1e-3)
        if kind
        else make_optimizer
    )
    optimizer = smp.DistributedOptimizer(
        make_inner(model.parameters()),
        **{"static_loss_scale": run.loss_scale, **optimizer_args},
    )
    train_step = train_step_of(model, lambda model, batch: loss_of(run, model, batch))
    return model, optimizer, train_step


def train(rank: int, run: HalfRun, kind: str = "") -> RankRecord:
    """Trains and records.

    Args:
        kind: the name of one of `smp.optimizers` in place of AdamW.
    """
    import smp

    init_half(run)
    # Replicas other than the first start with wrong weights: they get the first one's.
    model, optimizer, train_step = make(run, seed=1 + smp.rdp_rank(), kind=kind)
    record = RankRecord(smp.pp_rank(), smp.tp_rank(), smp.rdp_rank())
    for step in range(STEPS):
        output = train_step(batch_of(run, smp.rdp_rank(), step))
        record.losses.append([loss.item() for loss in output.outputs])
        record.norms.append(float(optimizer.clip_master_grads(1e9)))
        optimizer.update_master_grads()
        record.grads.append(marked(model, "grads"))
        optimizer.step()
        optimizer.zero_grad()
    record.masters, record.params = marked(model, "masters"), marked(model, "params")
    record.dtypes = {p.dtype for p in model.parameters()} | {output.outputs[0].dtype}
    return record


def poison_backward(model: Any, poison: Callable[[Tensor], Tensor]) -> None:
    """Changes terms of gradients on this rank alone, before replicas add them up."""
    import smp
    from smp.tensor_parallel.sharding import interval_of

    first, *others = model.local_parameters()
    cut = next((p for p in (first, *others) if interval_of(p) is not None), None)
    if smp.dp_size() == 1 or cut is not None:
        (first if cut is None else cut).register_hook(poison)
        return
    owner = next(
        module for module in model.modules() if first in set(module.parameters(recurse=False))
    )

    def change(_: nn.Module, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else poison(grad) for grad in grads)

    owner.register_full_backward_pre_hook(change)


def marked(model: Any, what: str) -> dict[str, Any]:
    """Local masters, their gradients or the model's own values, with the parts that they are."""
    import smp
    from smp.precision.holdings import holding_of, master_of
    from smp.tensor_parallel import partial

    named = [(strip(name), p) for name, p in model.local_named_parameters() if p.requires_grad]
    values: dict[str, Any] = {}
    flat: dict[str, Any] = {}
    is_sharded = (
        smp.state.cfg.shard_optimizer_state or smp.state.cfg.sharded_data_parallel_degree > 1
    )
    for name, parameter in named:
        holding, master = holding_of(parameter), master_of(parameter)
        if holding is not None and what == "grads":
            check_shown(parameter, None if is_sharded else master.grad, name)
        model = parameter if holding is None or not is_sharded else holding.piece
        value = {"masters": master, "grads": master.grad, "params": model}[what]
        if is_sharded:
            assert holding is not None
            flat[name] = (holding.begin, holding.numel, tuple(parameter.shape))
        if value is not None:
            values[name] = value.detach().clone().cpu()
    marks = {
        partial.PARTIAL_MARK: True,
        partial.SHARDS_MARK: partial.slices_of(named),
        **({partial.FLAT_MARK: flat} if is_sharded else {}),
    }
    return {**values, **marks}


def check_shown(parameter: Tensor, expected: Tensor | None, name: str) -> None:
    """Checks that a parameter's ``grad`` is its master's gradient, where that is whole."""
    shown = parameter.grad
    assert (shown is None) == (expected is None), name
    if shown is not None and expected is not None:
        assert shown.dtype == parameter.dtype, name
        assert torch.equal(shown, expected.to(parameter.dtype)), name


@functools.cache
def reference(run: HalfRun, precision: str) -> HalfRecord:
    """The run in one process, in its own or another precision."""
    batches = [[batch_of(run, r, step) for r in range(run.num_batches)] for step in range(STEPS)]
    return train_half(
        plain_model(run),
        DTYPES[precision],
        functools.partial(loss_of, run),
        batches,
        run.microbatches,
        run.loss_scale,
    )


def whole(run: HalfRun, parts: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Whole tensors under the names of the plain model."""
    from smp.nn import huggingface
    from smp.tensor_parallel import partial

    merged: dict[str, Tensor] = partial.merge(parts)
    family = getattr(huggingface, run.case, None)
    if run.is_split and family is not None:
        merged = getattr(family, f"translate_state_dict_to_hf_{run.case}")(merged)
        # Tensors of tied parameters are in there under all of their names.
        merged = {name: merged[name] for name in names_of(run)}
    return merged


def unsharded(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins the parts of one shard group's ranks; without sharding returns the first rank's."""
    from smp.tensor_parallel.partial import FLAT_MARK, merge

    if FLAT_MARK not in parts[0]:
        return dict(parts[0])
    flats = [part[FLAT_MARK] for part in parts]
    entries = [
        {**{name: part[name] for name in flat if name in part}, FLAT_MARK: flat}
        for part, flat in zip(parts, flats, strict=True)
    ]
    marks = {key: value for key, value in parts[0].items() if key not in flats[0]}
    marks.pop(FLAT_MARK)
    return {**merge(entries), **marks}


@functools.cache
def names_of(run: HalfRun) -> tuple[str, ...]:
    """Parameters of the plain model, each once."""
    return tuple(name for name, _ in plain_model(run).named_parameters())


def joined(records: list[RankRecord], run: HalfRun, part: Any) -> dict[str, Tensor]:
    """Whole tensors of the first replica; all others have the same bits."""
    q = {"": 1, "data": 2, "optimizer": run.dp}[run.sharding]
    places = sorted({(record.pp_rank, record.tp_rank) for record in records})
    replicas = []
    for first in range(0, run.dp, q):
        group = range(first, first + q)
        parts = [
            unsharded(
                [part(r) for r in records if (r.pp_rank, r.tp_rank) == at and r.rdp_rank in group]
            )
            for at in places
        ]
        replicas.append(whole(run, parts))
    for other in replicas[1:]:
        same(other, replicas[0], "replicas")
    return replicas[0]


def same(ours: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert ours.keys() == expected.keys(), what
    different = [name for name in ours if not torch.equal(ours[name], expected[name])]
    assert not different, f"{what}: {different}"
