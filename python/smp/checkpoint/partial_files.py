"""Plans the files that a rank writes into a partial checkpoint, and their content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
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
from smp.storage.names import place_in_names
from smp.storage.shards import FlatGroup, lay_out
from smp.tensor_parallel import partial
from smp.world.rank import Rank

#: Kinds of files, in the order in which replicas get them to write.
MODEL, OPTIMIZER, FP16_STATES = "model", "optimizer", "fp16_states"
MODEL_SHARDS = "model_shards"


@dataclass(frozen=True)
class Place:
    """The place of an entry: elements from ``offset`` on of the tensor at ``path``."""

    entry: Entry
    path: tuple[Any, ...]
    offset: int = 0


@dataclass
class PlannedFile:
    """A file: its content, and the entries in it.

    Attributes:
        updated: keys of content that only an update of the optimizer changes.
    """

    name: str
    content: dict[str, Any]
    places: list[Place] = field(default_factory=list)
    updated: frozenset[str] = frozenset()

    def staged(self, staging: Staging) -> PlannedFile:
        """Returns a copy with all tensors in host memory.

        `updated` content gets its memory now; its values are copied later.
        """
        copies: dict[int, Tensor] = {}
        # Tensors in both kinds of content are copied now.
        in_order = sorted(self.content, key=lambda key: key in self.updated)
        made = {
            key: staging.copy(self.content[key], copies, later=key in self.updated)
            for key in in_order
        }
        content = {key: made[key] for key in self.content}
        return PlannedFile(self.name, content, self.places, self.updated)


@dataclass
class RankState:
    """The files and values that a rank writes.

    Attributes:
        files: files of this rank.
        values: values for the manifest.
        flat_groups: flat groups of sharded parameters, by group of the optimizer.
    """

    files: list[PlannedFile] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    flat_groups: list[FlatGroup] = field(default_factory=list)


def plan_files(
    state: ModelState, optimizer: DistributedOptimizer | None, with_model: bool, rank: Rank
) -> RankState:
    """Plans all files and values that this rank writes.

    Args:
        state: state of the model.
        optimizer: optimizer to save; None: none.
        with_model: whether the model's own tensors are saved.
        rank: rank of this process.
    """
    plan = _Plan(state, optimizer, rank)
    if optimizer is not None:
        plan.add_optimizer(optimizer)
    plan.add_masters()
    if with_model:
        plan.add_model()
    return plan.result


class _Plan:
    """Chooses the rank that writes a file, among those that have the same state.

    A file of a kind is written by one replica, each kind by another one if there are several. The
    first tensor-parallel rank writes tensors that all of them have alike.

    Args:
        state, optimizer, rank: see `plan_files`.

    Attributes:
        result: files and values that this rank writes.
    """

    def __init__(
        self, state: ModelState, optimizer: DistributedOptimizer | None, rank: Rank
    ) -> None:
        self.result = RankState()
        self._state, self._optimizer, self._rank = state, optimizer, rank
        self._covered: set[str] = set()  # entries in the optimizer's file
        # Tensors that tensor-parallel ranks have alike count on the first rank only.
        self._first = {
            name: held
            for name, held in state.held.items()
            if rank.ranks["tp"] == 0 or held.stored.slice_ is not None
        }
        self._num_replicas = rank.sizes["rdp"] // rank.sizes["shard"]
        self._replica = rank.ranks["rdp"] // rank.sizes["shard"]

    def _writes(self, kind: str) -> bool:
        turn = {MODEL: 0, MODEL_SHARDS: 0, OPTIMIZER: 1, FP16_STATES: 2}[kind]
        return turn % self._num_replicas == self._replica

    @property
    def _writes_model(self) -> bool:
        return self._writes(MODEL) and self._rank.ranks["shard"] == 0

    def _file(
        self, kind: str, content: dict[str, Any], updated: frozenset[str] = frozenset()
    ) -> PlannedFile:
        """Returns a file of this rank, with its documented name, still without places."""
        place = place_in_names(self._rank, is_model=kind == MODEL)
        return PlannedFile(f"{kind}_{place}.pt", content, updated=updated)

    # ---- model

    def add_model(self) -> None:
        """Adds the model's own tensors, and the extra state of its modules."""
        state = self._state
        own = {name: held for name, held in self._first.items() if held.is_owner}
        if state.shows_values:
            self._add_shown(own)
        else:
            self._add_placeholders(own)
            self._add_rest(own)
        others = {key: encode(value, f"'{key}'") for key, value in state.others.items()}
        if self._writes_model and others:
            self.result.values["extra_state"] = others

    def _add_shown(self, own: Mapping[str, Held]) -> None:
        """Adds whole parameters, or tensor-parallel slices, of one pipeline rank."""
        if not self._writes_model:
            return
        content: dict[str, Any] = {name: held.stored.values for name, held in own.items()}
        file = self._file(MODEL, content)
        file.places = [Place(held.values, (name,)) for name, held in own.items()]
        content |= {alias: content[n] for alias, n in self._state.aliases.items() if n in own}
        slices = partial.slice_marks((name, held.stored.slice_) for name, held in own.items())
        content |= partial.marks_of(slices, None)
        self.result.files.append(file)

    def _add_placeholders(self, own: Mapping[str, Held]) -> None:
        """Adds buffers, with placeholders for sharded parameters."""
        if not self._writes_model:
            return
        module: dict[str, Any] = {}
        file = self._file(MODEL, {"module": module})
        for name, held in own.items():
            values = held.stored.values
            module[name] = values if held.stored.is_shown else values.new_empty(0, device="cpu")
            if held.stored.is_shown:
                file.places.append(Place(held.values, ("module", name)))
        self.result.files.append(file)

    def _add_rest(self, own: Mapping[str, Held]) -> None:
        """Adds parts of sharded parameters that no other file has."""
        rest = {
            name: held
            for name, held in own.items()
            if not held.stored.is_shown
            and held.values.name not in self._covered
            and held.stored.master is None
        }
        if rest and self._writes(MODEL_SHARDS):
            file = self._file(
                MODEL_SHARDS, {"module": {name: held.stored.values for name, held in rest.items()}}
            )
            file.places = [Place(held.values, ("module", name)) for name, held in rest.items()]
            self.result.files.append(file)

    def add_masters(self) -> None:
        """Adds masters that no other file has, and the loss scale."""
        if not self._writes(FP16_STATES):
            return
        masters = {
            name: held.master
            for name, held in self._first.items()
            if held.master is not None and held.master.name not in self._covered
        }
        content: dict[str, Any] = {}
        file = self._file(FP16_STATES, content)
        if masters:
            content["masters"] = {name: entry.tensor for name, entry in masters.items()}
            file.places = [Place(entry, ("masters", name)) for name, entry in masters.items()]
        if self._optimizer is not None and self._rank.config.fp16:
            content["loss_scaler"] = self._optimizer.loss_scaler.state_dict()
            self.result.values["loss_scaler"] = content["loss_scaler"]
        if content:
            self.result.files.append(file)

    # ---- optimizer

    def add_optimizer(self, optimizer: DistributedOptimizer) -> None:
        """Adds the optimizer's state, its groups, and with sharded parameters the masters."""
        everything = list(updated_by(optimizer.optimizer, self._state))
        _check_named(everything)
        if self._rank.global_rank == 0:
            self.result.values["groups"] = encode_groups(optimizer, self._state)
        content: dict[str, Any] = {}
        file = self._file(OPTIMIZER, content, frozenset({"state"}))
        if not self._state.shows_values:
            content["partition_count"] = self._rank.sizes["shard"]
            content["fp32_flat_groups"] = self._flat_groups(optimizer, file)
        content["state"], numbers = self._entries(optimizer, everything, file)
        indices = {id(updated.tensor): updated.index for updated in everything}
        content["param_groups"] = [
            {**group, "params": [indices[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        if self._writes(OPTIMIZER):
            self.result.values["state"] = numbers
            content |= self._marks(everything)
            self.result.files.append(file)

    def _entries(
        self, optimizer: DistributedOptimizer, everything: Iterable[Updated], file: PlannedFile
    ) -> tuple[dict[int, dict[str, Any]], dict[str, dict[str, Any]]]:
        """Returns the optimizer's state of parameters updated on this rank.

        The first result has entries by index, the second one numbers by name.
        """
        entries: dict[int, dict[str, Any]] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for updated in everything:
            held = self._first.get(str(updated.name))
            if held is None or updated.tensor not in optimizer.state:
                continue
            entry = entries.setdefault(updated.index, {})
            for key, value in optimizer.state[updated.tensor].items():
                entry[key] = value
                is_like = is_elementwise(key, value, updated.tensor.shape)
                if is_like or not is_number(value):
                    if value.numel() or not updated.tensor.numel():
                        stored = state_entry(key, value, held, is_like)
                        file.places.append(Place(stored, ("state", updated.index, key)))
                elif updated.tensor.numel() or 0 in held.stored.shape:
                    # A rank without elements may have begun to count later.
                    where = f"'{key}' of the optimizer's state of '{held.name}'"
                    numbers.setdefault(held.name, {})[key] = encode(value, where)
        return entries, numbers

    def _flat_groups(self, optimizer: DistributedOptimizer, file: PlannedFile) -> list[Tensor]:
        """Returns the masters of each group in one flat tensor, as scripts read them."""
        state, flats = self._state, []
        groups = [
            [state.tensors[state.names[id(p)]] for p in group["params"]]
            for group in optimizer.param_groups
        ]
        self.result.flat_groups = lay_out(groups)
        for idx, group in enumerate(self.result.flat_groups):
            flats.append(torch.zeros(0) if group.flat is None else group.flat.detach())
            for place in group.places if group.flat is not None else ():
                held = state.held[state.names[id(place.parameter)]]
                entry = held.master or held.values
                if place.is_trained:
                    self._covered.add(entry.name)
                    if held.name in self._first:
                        file.places.append(Place(entry, ("fp32_flat_groups", idx), place.offset))
        return flats

    def _marks(self, everything: Iterable[Updated]) -> dict[str, Any]:
        """Returns the marks of this rank's parts, as `OptimizerState.marks` does."""
        flat, slices = {}, []
        for updated in everything:
            if updated.held is not None:
                part, tensor = updated.held.stored.updated, updated.held.tensor
                slices.append((updated.index, updated.held.stored.slice_))
                if updated.tensor is not tensor:  # a master
                    flat[updated.index] = (part.flat_begin, part.flat_numel, tuple(tensor.shape))
        is_sharded = self._rank.sizes["shard"] > 1
        return partial.marks_of(partial.slice_marks(slices), flat if is_sharded else None)


def _check_named(everything: Iterable[Updated]) -> None:
    strange = [updated for updated in everything if updated.name is None]
    if strange:
        raise ValueError(
            f"{_C.rank_prefix()}the optimizer has {len(strange)} parameters, one of sizes "
            f"{list(strange[0].tensor.shape)}, that are not in the model; save it together with "
            "the model whose parameters it updates"
        )


def sharded_names(state: ModelState, groups: Iterable[FlatGroup]) -> dict[str, Any]:
    """Returns the names and shapes by which scripts assemble parameters from all flat masters.

    ``buffer_names``: buffers in ``model_0.pt``; ``param_shapes``: by group, names and shapes in the
    order of the parameters in the flat masters.
    """
    shapes = [
        {state.names[id(p.parameter)]: torch.Size(p.parameter.shape) for p in group.places}
        for group in groups
    ]
    buffers = [n for n, held in state.held.items() if not isinstance(held.tensor, nn.Parameter)]
    return {"buffer_names": buffers, "param_shapes": shapes}


def encode_groups(optimizer: DistributedOptimizer, state: ModelState) -> list[dict[str, Any]]:
    """Returns the hyperparameters of the groups, and the names of their parameters."""
    result = []
    for idx, group in enumerate(optimizer.param_groups):
        options = {
            key: encode(value, f"'{key}' of parameter group {idx}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        names = [state.names[id(p)] for p in group["params"]]
        result.append({"options": options, "names": names})
    return result
