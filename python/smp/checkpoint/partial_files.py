"""Which files a rank writes into a partial checkpoint, and what stands in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smp import _C
from smp.checkpoint.entries import (
    Entry,
    Held,
    ModelState,
    Updated,
    is_elementwise,
    is_number,
    state_entry,
    updated_by,
)
from smp.checkpoint.staging import Staging
from smp.checkpoint.values import encode
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.precision.holdings import model_parameter_of
from smp.storage.names import place_in_names
from smp.storage.shards import flat_places
from smp.tensor_parallel import partial
from smp.tensor_parallel.partial import PARTIAL_MARK, SHARDS_MARK
from smp.tensor_parallel.sharding import interval_of
from smp.world import runtime

#: Kinds of files, in the order in which they are given to replicas.
MODEL, OPTIMIZER, FP16_STATES = "model", "optimizer", "fp16_states"
MODEL_SHARDS = "model_shards"


@dataclass(frozen=True)
class Place:
    """Where an entry lies: elements from ``offset`` on of the tensor at ``path``."""

    entry: Entry
    path: tuple[Any, ...]
    offset: int = 0


@dataclass
class PlannedFile:
    """One file: its content, and which entries lie in it.

    Attributes:
        updated: keys of what nothing but an update of the optimizer changes.
    """

    name: str
    content: dict[str, Any]
    places: list[Place] = field(default_factory=list)
    updated: frozenset[str] = frozenset()

    def staged(self, staging: Staging) -> PlannedFile:
        """The same with copies of all tensors, in host memory.

        What is `updated` gets its place; its copies are made later.
        """
        copies: dict[int, Tensor] = {}
        # What is in both kinds of content is copied now.
        in_order = sorted(self.content, key=lambda key: key in self.updated)
        made = {
            key: staging.copy(self.content[key], copies, later=key in self.updated)
            for key in in_order
        }
        content = {key: made[key] for key in self.content}
        return PlannedFile(self.name, content, self.places, self.updated)


@dataclass
class RankState:
    """What a rank writes: files, and values for the manifest."""

    files: list[PlannedFile] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


class _Writers:
    """Which of the ranks that have the same state write it.

    A file of a kind is written by one replica, each kind by another one if there are several; of
    what tensor-parallel ranks have alike the first one's counts.
    """

    def __init__(self) -> None:
        current = runtime.current()
        self._num_replicas = current.rank.sizes["rdp"] // current.rank.sizes["shard"]
        self._replica = current.rank.ranks["rdp"] // current.rank.sizes["shard"]
        self._tp_rank = current.rank.ranks["tp"]
        self.is_first_of_shards = current.rank.ranks["shard"] == 0

    def writes(self, kind: str) -> bool:
        turn = {MODEL: 0, MODEL_SHARDS: 0, OPTIMIZER: 1, FP16_STATES: 2}[kind]
        return turn % self._num_replicas == self._replica

    def has_first(self, tensor: Tensor) -> bool:
        """Is this rank the first of its tensor-parallel group with these values?"""
        return self._tp_rank == 0 or interval_of(tensor) is not None


def file_name(kind: str) -> str:
    """The documented name of this rank's file of a kind."""
    current = runtime.current()
    return f"{kind}_{place_in_names(current.rank, is_model=kind == MODEL)}.pt"


def state_of_rank(
    state: ModelState, optimizer: DistributedOptimizer | None, with_model: bool
) -> RankState:
    """Everything that this rank writes.

    Args:
        state: of the model.
        optimizer: None: its state is not saved.
        with_model: False: the model's own tensors are not saved.
    """
    result, writers = RankState(), _Writers()
    covered: set[str] = set()
    if optimizer is not None:
        _add_optimizer(result, state, optimizer, writers, covered)
    _add_masters(result, state, optimizer, writers, covered)
    if with_model:
        if state.shows_values:
            _add_model(result, state, writers)
        else:
            _add_sharded_model(result, state, writers, covered)
        others = {key: encode(value, f"'{key}'") for key, value in state.others.items()}
        if writers.writes(MODEL) and writers.is_first_of_shards and others:
            result.values["extra_state"] = others
    return result


# ---- model ---------------------------------------------------------------------------


def _marks(tensors: Mapping[str, Held]) -> dict[str, Any]:
    slices = partial.slices_of((name, held.tensor) for name, held in tensors.items())
    return {PARTIAL_MARK: True, **({SHARDS_MARK: slices} if slices else {})}


def _add_model(result: RankState, state: ModelState, writers: _Writers) -> None:
    """Whole parameters, or tensor-parallel slices, of one pipeline rank."""
    if not writers.writes(MODEL) or not writers.is_first_of_shards:
        return
    own = {n: h for n, h in state.held.items() if h.is_owner and writers.has_first(h.tensor)}
    content: dict[str, Any] = {name: held.values.tensor for name, held in own.items()}
    file = PlannedFile(file_name(MODEL), content)
    file.places = [Place(held.values, (name,)) for name, held in own.items()]
    content |= {alias: content[n] for alias, n in state.aliases.items() if n in own}
    content |= _marks(own)
    result.files.append(file)


def _add_sharded_model(
    result: RankState, state: ModelState, writers: _Writers, covered: set[str]
) -> None:
    """Buffers, with placeholders for parameters; parts of these that no other file has."""
    own = {n: h for n, h in state.held.items() if h.is_owner and writers.has_first(h.tensor)}
    if writers.writes(MODEL) and writers.is_first_of_shards:
        module: dict[str, Any] = {}
        file = PlannedFile(file_name(MODEL), {"module": module})
        for name, held in own.items():
            if held.is_shown:
                module[name] = held.values.tensor
                file.places.append(Place(held.values, ("module", name)))
            else:
                module[name] = torch.empty(0, dtype=held.values.tensor.dtype)
        result.files.append(file)
    rest = {
        name: held
        for name, held in own.items()
        if not held.is_shown and held.values.name not in covered and held.master is None
    }
    if rest and writers.writes(MODEL_SHARDS):
        content = {"module": {name: held.values.tensor for name, held in rest.items()}}
        places = [Place(held.values, ("module", name)) for name, held in rest.items()]
        result.files.append(PlannedFile(file_name(MODEL_SHARDS), content, places))


def _add_masters(
    result: RankState,
    state: ModelState,
    optimizer: DistributedOptimizer | None,
    writers: _Writers,
    covered: set[str],
) -> None:
    """Masters that no other file has, and the loss scale."""
    if not writers.writes(FP16_STATES):
        return
    masters = {
        name: held.master
        for name, held in state.held.items()
        if held.master is not None
        and held.master.name not in covered
        and writers.has_first(held.tensor)
    }
    content: dict[str, Any] = {}
    file = PlannedFile(file_name(FP16_STATES), content)
    if masters:
        content["masters"] = {name: entry.tensor for name, entry in masters.items()}
        file.places = [Place(entry, ("masters", name)) for name, entry in masters.items()]
    if optimizer is not None and runtime.current().rank.config.fp16:
        content["loss_scaler"] = optimizer.loss_scaler.state_dict()
        result.values["loss_scaler"] = content["loss_scaler"]
    if content:
        result.files.append(file)


# ---- optimizer -----------------------------------------------------------------------


def _add_optimizer(
    result: RankState,
    state: ModelState,
    optimizer: DistributedOptimizer,
    writers: _Writers,
    covered: set[str],
) -> None:
    everything = list(updated_by(optimizer.optimizer, state.names, optimizer._locality()))
    _check_named(everything)
    own = [updated for updated in everything if updated.is_local]
    first = {u.index for u in own if writers.has_first(model_parameter_of(u.tensor))}
    if runtime.current().rank.global_rank == 0:
        result.values["groups"] = encode_groups(optimizer, everything)
    content: dict[str, Any] = {}
    file = PlannedFile(file_name(OPTIMIZER), content, updated=frozenset({"state"}))
    if not state.shows_values:
        content["partition_count"] = runtime.current().rank.sizes["shard"]
        content["fp32_flat_groups"] = _flat_groups(optimizer, state, writers, file, covered)
    entries: dict[int, dict[str, Any]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for updated in own:
        if updated.index not in first or updated.tensor not in optimizer.state:
            continue
        entry = entries.setdefault(updated.index, {})
        for key, value in optimizer.state[updated.tensor].items():
            entry[key] = value
            if is_elementwise(key, value, updated) or not is_number(value):
                if value.numel() or not updated.tensor.numel():
                    place = Place(state_entry(key, value, updated), ("state", updated.index, key))
                    file.places.append(place)
            elif updated.tensor.numel() or 0 in updated.shape:
                # Who has no elements may have begun to count later.
                where = f"'{key}' of the optimizer's state of '{updated.name}'"
                numbers.setdefault(str(updated.name), {})[key] = encode(value, where)
    content["state"] = entries
    indices = {id(updated.tensor): updated.index for updated in everything}
    content["param_groups"] = [
        {**group, "params": [indices[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    if not writers.writes(OPTIMIZER):
        return
    result.values["state"] = numbers
    content |= optimizer._state().marks()
    result.files.append(file)


def _flat_groups(
    optimizer: DistributedOptimizer,
    state: ModelState,
    writers: _Writers,
    file: PlannedFile,
    covered: set[str],
) -> list[Tensor]:
    """The masters of each group behind each other, as scripts read them."""
    flats: list[Tensor] = []
    groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.param_groups, strict=True)
    for idx, (flat, group) in enumerate(groups):
        flats.append(torch.zeros(0) if flat is None else flat.detach())
        parameters = map(model_parameter_of, group["params"] if flat is not None else ())
        for place in flat_places(parameters):
            held = state.held[state.names[id(place.parameter)]]
            entry = held.values if held.master is None else held.master
            if place.is_trained:
                covered.add(entry.name)
                if writers.has_first(place.parameter):
                    file.places.append(Place(entry, ("fp32_flat_groups", idx), place.offset))
    return flats


def _check_named(everything: Iterable[Updated]) -> None:
    strange = [updated for updated in everything if updated.name is None]
    if strange:
        raise ValueError(
            f"{_C.rank_prefix()}the optimizer has {len(strange)} parameters, one of sizes "
            f"{list(strange[0].shape)}, that are not in the model; save the model whose parameters "
            "it updates"
        )


def sharded_names(state: ModelState, optimizer: DistributedOptimizer) -> dict[str, Any]:
    """What scripts need besides the flat masters of all ranks to put parameters together.

    ``buffer_names``: of buffers in ``model_0.pt``; ``param_shapes``: by group, names and shapes in
    the order in which parameters follow each other in the flat masters.
    """
    shapes: list[dict[str, torch.Size]] = []
    for group in optimizer.param_groups:
        places = flat_places(map(model_parameter_of, group["params"]))
        shapes.append({state.names[id(p.parameter)]: torch.Size(p.parameter.shape) for p in places})
    buffers = [name for name, held in state.held.items() if not held.is_parameter]
    return {"buffer_names": buffers, "param_shapes": shapes}


def encode_groups(
    optimizer: DistributedOptimizer, everything: Iterable[Updated]
) -> list[dict[str, Any]]:
    """Hyperparameters of the groups, and the names of their parameters."""
    names = {id(updated.tensor): updated.name for updated in everything}
    result = []
    for idx, group in enumerate(optimizer.param_groups):
        options = {
            key: encode(value, f"'{key}' of parameter group {idx}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        result.append({"options": options, "names": [names[id(p)] for p in group["params"]]})
    return result
