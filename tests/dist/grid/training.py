"""Training of a cell of the grid, and the records of its ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.grid.cells import LOSS_SCALE, Cell
from tests.harness import labelled_loss, train_step_of
from tests.reference.half_precision import make_optimizer
from tests.reference.mixed_precision import CASE
from tests.reference.split_families import build_split_family, make_split_batch

MICROBATCHES = 2
STEPS = 3
NO_CLIPPING = 1e9


@dataclass(frozen=True)
class Part:
    """Holds one rank's part of one parameter.

    Attributes:
        begin: first element in the flattened parameter of this rank's tensor-parallel slice.
        shape: shape of that slice.
        slice: ``(dim, begin, end, extent)`` of the slice in the whole parameter, or None if the
            slice is the whole parameter.
        values: the part's values, 1-D.
    """

    begin: int
    shape: tuple[int, ...]
    slice: tuple[int, int, int, int] | None
    values: Tensor


Parts = dict[str, Part]


@dataclass
class GridRecord:
    """Records what one rank saw."""

    pp_rank: int
    tp_rank: int
    rdp_rank: int
    batch_idx: int
    losses: list[list[float]] = field(default_factory=list)  # [step][microbatch]
    norms: list[float] = field(default_factory=list)  # [step], of all gradients
    grads: list[Parts] = field(default_factory=list)  # [step], of masters, not clipped
    masters: Parts = field(default_factory=dict)  # after the last step
    model: Parts = field(default_factory=dict)  # as the next forward would see it, where whole
    unchanged: list[list[str]] = field(default_factory=list)  # [step], masters and copies of them
    forwards: list[int] = field(default_factory=list)  # [step], of blocks on this rank
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def refusal_of(rank: int, cells: Sequence[Cell]) -> list[str]:
    """Returns the text with which ``smp.init`` refuses each of these cells."""
    import smp

    texts = []
    for cell in cells:
        try:
            smp.init(cell.config | {"microbatches": MICROBATCHES})
        except ValueError as error:
            texts.append(str(error))
        else:
            smp.shutdown()
            texts.append("no error")
    return texts


def train_cell(rank: int, cell: Cell) -> GridRecord:
    """Trains the small GPT-J."""
    import smp

    with _warnings() as warnings, _counted_forwards() as num_forwards:
        smp.init(cell.config | {"microbatches": MICROBATCHES})
        if cell.offload:
            _offload_small_tensors()
        # Replicas other than the first start with wrong weights: they have to receive its.
        with smp.tensor_parallelism():
            plain = build_split_family(CASE, torch.float32, seed=1 + smp.rdp_rank())
        model = smp.DistributedModel(plain)
        optimizer = smp.DistributedOptimizer(
            make_optimizer(model.parameters()), static_loss_scale=LOSS_SCALE
        )
        if cell.checkpointing != "none":
            smp.set_activation_checkpointing(
                _blocks(model), pack_args_as_tuple=True, strategy=cell.checkpointing
            )
        record = GridRecord(smp.pp_rank(), smp.tp_rank(), smp.rdp_rank(), smp.dp_rank())
        _train(cell, model, optimizer, record, num_forwards)
    record.warnings = warnings
    return record


def _train(
    cell: Cell, model: Any, optimizer: Any, record: GridRecord, num_forwards: Callable[[], int]
) -> None:
    import smp

    train_step = train_step_of(model, labelled_loss)
    for step in range(STEPS):
        before = num_forwards()
        losses = train_step(make_split_batch(CASE, record.batch_idx, step))
        record.forwards.append(num_forwards() - before)
        record.losses.append([loss.item() for loss in losses.outputs])
        if cell.precision == "fp16":
            record.facts.setdefault("overflows", []).append(bool(optimizer.overflow))
            record.norms.append(float(optimizer.clip_master_grads(NO_CLIPPING)))
        else:
            record.norms.append(float(smp.clip_grad_norm_(model.parameters(), NO_CLIPPING)))
        record.grads.append(_parts(model, lambda tensor: tensor.grad))
        earlier = _tensors(model)
        optimizer.step()
        optimizer.zero_grad()
        if cell.clipping is not None:  # the norm that it clipped by
            record.facts.setdefault("clipped_norms", []).append(float(optimizer._global_grad_norm))
        later = _tensors(model)
        record.unchanged.append([n for n in later if torch.equal(earlier[n], later[n])])
    record.masters = _parts(model, lambda tensor: tensor)
    record.model = _whole_parameters(cell, model)
    record.facts |= _facts(cell, model)


def _offload_small_tensors() -> None:
    """Lets activations of a few bytes leave as well, unless the next task needs them."""
    from smp import _C
    from smp.world import runtime

    current = runtime.current()
    device = str(current.rank.device)
    current._activation_store = _C.ActivationStore(device, horizon=1, min_bytes=0, group_bytes=4096)


def _blocks(model: nn.Module) -> nn.Module:
    """The sequence of transformer blocks."""
    (blocks,) = (m for name, m in model.named_modules() if name.endswith("seq_layers"))
    return blocks


def _held(model: Any) -> Iterator[tuple[str, nn.Parameter, int, Tensor, Tensor]]:
    """Yields name, parameter, first element, piece of the model and master of each updated part."""
    from smp.precision.holdings import holding_of

    for name, parameter in model.local_named_parameters():
        holding = holding_of(parameter)
        if holding is None:
            yield name, parameter, 0, parameter.detach(), parameter
        else:
            yield name, parameter, holding.begin, holding.piece, holding.master


def _parts(model: Any, value: Callable[[Tensor], Tensor | None]) -> Parts:
    """Copies of what each master, or its gradient, holds."""
    parts = {}
    for name, parameter, begin, _, master in _held(model):
        values = value(master)
        if values is not None:
            parts[name] = _part(parameter, begin, values)
        else:
            assert master.numel() == 0, f"{name} has no gradient"
    return parts


def _part(parameter: Tensor, begin: int, values: Tensor) -> Part:
    from smp.tensor_parallel.sharding import interval_of

    cut = interval_of(parameter)
    slice_ = None if cut is None else (cut.dim, cut.begin, cut.end, cut.extent)
    copy = values.detach().reshape(-1).cpu().clone()
    return Part(begin, tuple(parameter.shape), slice_, copy)


def _tensors(model: Any) -> dict[str, Tensor]:
    """Copies of masters, and of the rounded copies that the model computes with."""
    tensors = {}
    for name, _, _, piece, master in _held(model):
        if master.numel():
            tensors[name] = master.detach().clone()
        if piece.numel() and piece.dtype != master.dtype:
            tensors[f"{name} in {piece.dtype}"] = piece.detach().clone()
    return tensors


def _whole_parameters(cell: Cell, model: Any) -> Parts:
    """The model's own values; with sharded data parallelism it has no more than its pieces."""
    if cell.sharding == "sdp2":
        return {n: _part(p, begin, piece) for n, p, begin, piece, _ in _held(model)}
    return {name: _part(p, 0, p) for name, p in model.local_named_parameters()}


def _facts(cell: Cell, model: Any) -> dict[str, Any]:
    """Collects facts that show whether the cell's settings took effect."""
    import smp

    held = list(_held(model))
    facts: dict[str, Any] = {
        "model dtypes": {piece.dtype for _, _, _, piece, _ in held},
        "master dtypes": {master.dtype for *_, master in held},
        "held": sum(master.numel() for *_, master in held),
        "local": sum(parameter.numel() for _, parameter, *_ in held),
        "remote_calls": smp.metrics.server_stats()["remote_calls"],
        "split": sum(model.is_distributed_parameter(p) for _, p, *_ in held),
    }
    if cell.offload:
        facts["offload"] = smp.metrics.offload_stats()
    if cell.sharding == "sdp2":
        facts["shards"] = {
            name: (p.ds_tensor.ds_numel, p.ds_numel, tuple(p.ds_shape)) for name, p, *_ in held
        }
    return facts


@contextlib.contextmanager
def _counted_forwards() -> Iterator[Callable[[], int]]:
    """Counts the forwards of blocks on this rank, recomputed ones included."""
    from smp.nn.transformer_layer import DistributedTransformerLayer as Block

    original, count = Block.forward, [0]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return original(self, *args, **kwargs)

    Block.forward = forward  # type: ignore[method-assign]
    try:
        yield lambda: count[0]
    finally:
        Block.forward = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Collects the warnings that smp logs while the context is open."""
    texts: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger("smp").addHandler(listener)
    try:
        yield texts
    finally:
        logging.getLogger("smp").removeHandler(listener)
