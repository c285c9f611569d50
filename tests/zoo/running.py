"""Runs one model of the zoo on its ranks, and in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smp.nn.planned.experts import PlannedTerm
from smp.nn.planned.linear import PlannedPart
from tests.dist.steps import marked_values
from tests.reference.lifted_casts import lift_forwards, lifted_casts
from tests.zoo.building import Plan, build, seed_everything, skeleton
from tests.zoo.modes import MICROBATCHES, STEPS, Mode
from tests.zoo.patterns import LOSSES
from tests.zoo.source import Inputs

Tensors = dict[str, Tensor | None]


@dataclass(frozen=True)
class Job:
    """A model in one mode.

    Attributes:
        plan: the model.
        mode: the layout.
        batches: inputs by replica, step and microbatch.
        lifted: whether the model's casts to float32 become casts to float64.
    """

    plan: Plan
    mode: Mode
    batches: list[list[list[Inputs]]]
    lifted: bool = False


@dataclass
class Record:
    """A record of one rank, or of the one process; names as in the plain model."""

    pp_rank: int = 0
    replica: int = 0
    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    grads: list[Tensors] = field(default_factory=list)  # [step]
    params: Tensors = field(default_factory=dict)  # after the last step
    buffers: Tensors = field(default_factory=dict)  # after the last step
    seconds: list[float] = field(default_factory=list)  # [step]
    parts: dict[str, Any] = field(default_factory=dict)  # split gradients of the first step, marked
    remote_calls: int = 0
    num_planned: int = 0  # parts that a plan has split
    num_blocks: int = 0  # that may compute parts of sequences
    num_cut: int = 0  # that did
    problems: list[str] = field(default_factory=list)  # of blocks with whole sequences
    elements: int = 0  # of the parameters that this rank holds


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    # Where a gradient is zero but for rounding, a tiny epsilon makes full steps of it.
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)


def _model(job: Job) -> nn.Module:
    model = build(job.plan, job.mode.outputs)
    if job.lifted:
        given = dict(model.named_parameters())
        with lifted_casts():  # tables that are computed when a model is made
            model = build(job.plan, job.mode.outputs)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(given[name])
        lift_forwards(model)
    return model.to(torch.bfloat16) if job.mode.half else model


def _loss(job: Job, model: Callable[..., Any], plain: nn.Module, inputs: Inputs) -> Any:
    """The loss of one microbatch.

    Args:
        job: says which.
        model: callable that gives the outputs.
        plain: the module that the user wrote; some leave the loss on it.
        inputs: inputs of the microbatch.
    """
    if job.mode.half:
        inputs = {name: _to_half(value) for name, value in inputs.items()}
    output = model(**inputs)
    found = LOSSES.get(job.plan.entry.name)
    if found is not None:
        return found(output, plain)
    loss: Tensor = job.plan.recipe.loss(output, job.mode.outputs)
    return loss


def _to_half(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16)
    if isinstance(value, list):
        return [_to_half(item) for item in value]
    if isinstance(value, dict):
        return {name: _to_half(item) for name, item in value.items()}
    return value


def make_batches(plan: Plan, replicas: int) -> list[list[list[Inputs]]]:
    """Makes inputs by replica, step and microbatch, from a model that is never trained."""
    model = skeleton(plan)
    return [
        [
            [
                plan.recipe.inputs(model, plan.dtype, plan.seed + 7919 * (8 * replica + step) + mb)
                for mb in range(MICROBATCHES)
            ]
            for step in range(STEPS)
        ]
        for replica in range(replicas)
    ]


# ---- one process -----------------------------------------------------------


def train_alone(job: Job, jitter: float = 0.0) -> list[Record]:
    """Plain PyTorch over the same microbatches; one record for each replica's losses.

    What a model keeps from one forward to the next, each replica keeps for itself; a step begins
    with the first replica's buffers, as `torch.nn.parallel.DistributedDataParallel` has it.

    Args:
        job: the model and its batches.
        jitter: distance by which parameters are moved before, relative to their size.
    """
    models = [_alone(job, jitter) for _ in range(job.mode.replicas)]
    model = models[0]
    optimizer = make_optimizer(model.parameters())
    records = [Record(replica=replica) for replica in range(job.mode.replicas)]
    seed_everything(3)
    for step in range(STEPS):
        start = time.perf_counter()
        for replica in models[1:]:
            _copy_into(replica.buffers(), model.buffers())
        total: dict[str, Tensor] = {}
        for record, replica in zip(records, models, strict=True):
            losses = []
            for inputs in job.batches[record.replica][step]:
                loss = _loss(job, replica, replica, inputs)
                # Hooks on tensors see the gradient of the loss that the step is for.
                (loss / (MICROBATCHES * len(records))).backward()
                losses.append(loss.item())
            record.losses.append(losses)
            for name, parameter in replica.named_parameters():
                if parameter.grad is not None:
                    before = total.get(name)
                    grad = parameter.grad
                    total[name] = grad if before is None else before + grad
                    parameter.grad = None
        for name, parameter in model.named_parameters():
            if name in total:
                parameter.grad = total[name]
        records[0].grads.append(_grads(model.named_parameters()))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for replica in models[1:]:
            _copy_into(_trained(replica), _trained(model))
        records[0].seconds.append(time.perf_counter() - start)
    records[0].elements = sum(p.numel() for p in model.parameters())
    records[0].params = _copies(model.named_parameters())
    records[0].buffers = _copies(model.named_buffers())
    return records


def _alone(job: Job, jitter: float) -> nn.Module:
    model = _model(job)
    if jitter:
        _move(model, jitter)
    if job.mode.checkpointed and hasattr(model, "gradient_checkpointing_disable"):
        model.gradient_checkpointing_disable()
    return model


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def _copy_into(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def _move(model: nn.Module, jitter: float) -> None:
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            with torch.no_grad():
                parameter.copy_(parameter.double() * (1 + jitter * noise))


def _grads(named: Any) -> Tensors:
    return {_plain(n): None if p.grad is None else _copy(p.grad) for n, p in named}


def _copies(named: Any) -> Tensors:
    return {_plain(name): _copy(tensor) for name, tensor in named}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().cpu()


def _plain(name: str) -> str:
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


# ---- several ranks ---------------------------------------------------------


def train_together(rank: int, job: Job) -> Record:
    """The same with smp; `tests.dist.pool` shuts it down."""
    import smp

    torch.set_num_threads(1)
    model = _model(job)
    smp.init({"microbatches": MICROBATCHES, **job.mode.config})
    if job.mode.split:
        smp.set_tensor_parallelism(model, True)
    wrapped = smp.DistributedModel(model)
    if job.mode.checkpointed:
        _checkpoint_layers(wrapped)
    optimizer = smp.DistributedOptimizer(make_optimizer(wrapped.parameters()))
    own_rank = smp.dp_rank() if job.mode.has_own_batches else smp.rdp_rank()
    replica = own_rank if job.mode.replicas > 1 else 0
    record = Record(smp.pp_rank(), replica)

    @smp.step
    def train_step(index: Tensor) -> Tensor:
        loss = _loss(job, wrapped, model, batch[int(index)])
        wrapped.backward(loss)
        return loss

    seed_everything(3)
    for step in range(STEPS):
        batch = job.batches[replica][step]
        start = time.perf_counter()
        output = train_step(torch.arange(MICROBATCHES))
        if output is not None:  # a loss that is left on the module is the driver's alone
            record.losses.append([float(loss.detach()) for loss in output.outputs])
        if job.mode.gradients:
            record.grads.append(_grads(wrapped.local_named_parameters()))
        elif job.mode.split and step == 0:
            record.parts = marked_values(wrapped, "grad")
        optimizer.step()
        optimizer.zero_grad()
        record.seconds.append(time.perf_counter() - start)
    if job.mode.gradients:
        record.params = _copies(wrapped.local_named_parameters())
        if hasattr(wrapped, "local_named_buffers"):
            record.buffers = _copies(wrapped.local_named_buffers())
    else:
        record.params = _copies(wrapped.state_dict().items())
    record.elements = sum(p.numel() for p in wrapped.local_parameters())
    record.num_planned = sum(
        isinstance(module, PlannedPart | PlannedTerm) for module in wrapped.modules()
    )
    blocks = wrapped._engine.sequences.blocks
    record.num_blocks = sum(block.num_cut + block.num_whole > 0 for block in blocks)
    record.num_cut = sum(block.num_cut > 0 for block in blocks)
    record.problems = [f"{b.name}: {problem}" for b in blocks for problem in b.problems]
    record.remote_calls = smp.metrics.server_stats()["remote_calls"]
    return record


def _checkpoint_layers(model: nn.Module) -> None:
    """Marks every layer of the lists of layers."""
    import smp

    for module in model.get_module().modules():  # type: ignore[operator]
        if isinstance(module, nn.ModuleList) and len(module) > 1:
            kinds = {type(child) for child in module}
            is_layer = isinstance(module[0], nn.Module)  # some lists hold None
            if is_layer and len(kinds) == 1 and any(True for _ in module[0].children()):
                for child in module:
                    smp.set_activation_checkpointing(child)
