"""Plans the files that a rank writes into a partial checkpoint, and their content."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.checkpoint.entries import OPTIMIZER as OPTIMIZER_ENTRY
from smp.checkpoint.entries import Updated, suffix_of, updated_by
from smp.checkpoint.staging import Staging
from smp.checkpoint.values import encode
from smp.optim.adam import FusedAdam, exported_entry
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.storage.names import place_in_names
from smp.storage.parts import Entry, ModelState, Stored
from smp.storage.shards import FlatGroup, lay_out
from smp.tensor_parallel import partial
from smp.tensor_parallel.parts import Part
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
    content: dict[str, Any] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)
    updated: frozenset[str] = frozenset()

    def table(self, key: str) -> dict[Any, Any]:
        """Returns the dict ``key`` of the content."""
        found: dict[Any, Any] = self.content.setdefault(key, {})
        return found

    def add(self, entry: Entry, *path: str) -> None:
        """Adds an entry as tensor at ``path``: its name, or the name of a table and its own."""
        (self.content if len(path) == 1 else self.table(path[0]))[path[-1]] = entry.tensor
        self.places.append(Place(entry, path))

    def staged(self, staging: Staging) -> PlannedFile:
        """Returns a copy with all tensors in host memory.

        `updated` content gets its memory now; its values are copied later.
        """
        copies: dict[int, Tensor] = {}
        content = dict(self.content)
        # Tensors in both kinds of content are copied now.
        for key in sorted(content, key=self.updated.__contains__):
            content[key] = staging.copy(content[key], copies, later=key in self.updated)
        return replace(self, content=content)


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
    plan = _Plan(state, rank)
    if optimizer is not None:
        plan.add_optimizer(optimizer)
    plan.add_model(with_model, optimizer)
    plan.result.files = [file for file in plan.result.files if file.content]
    return plan.result


class _Plan:
    """Chooses the rank that writes a file, among those that have the same state.

    A file of a kind is written by one replica, each kind by another one if there are several. The
    first tensor-parallel rank writes tensors that all of them have alike.

    Args:
        state, rank: see `plan_files`.

    Attributes:
        result: files and values that this rank writes.
    """

    def __init__(self, state: ModelState, rank: Rank) -> None:
        self.result = RankState()
        self._state, self._rank = state, rank
        self._covered: set[str] = set()  # entries in the optimizer's file
        self._num_replicas = rank.sizes["rdp_cp"] // rank.sizes["shard"]
        self._replica = rank.ranks["rdp_cp"] // rank.sizes["shard"]

    def _writes(self, kind: str) -> bool:
        turn = {MODEL: 0, MODEL_SHARDS: 0, OPTIMIZER: 1, FP16_STATES: 2}[kind]
        is_alike = kind == MODEL  # on the ranks of a shard group
        return turn % self._num_replicas == self._replica and not (
            is_alike and self._rank.ranks["shard"] > 0
        )

    def _file(self, kind: str) -> PlannedFile:
        """Returns an empty file with its documented name, which is written if this rank does so."""
        place = place_in_names(self._rank, is_model=kind == MODEL)
        file = PlannedFile(f"{kind}_{place}.pt")
        if self._writes(kind):
            self.result.files.append(file)
        return file

    # ---- model

    def add_model(self, with_model: bool, optimizer: DistributedOptimizer | None) -> None:
        """Adds masters that no other file has, the loss scale, and the model's own tensors.

        The model's file has placeholders for sharded parameters. Parts of these that no other file
        has are in a file of their own.
        """
        state = self._state
        masters, model, shards = map(self._file, (FP16_STATES, MODEL, MODEL_SHARDS))
        table = () if state.storage.shows_values else ("module",)
        for name, held in state.held.items():
            if not held.is_first:
                continue
            if held.master is not None and held.master.name not in self._covered:
                masters.add(held.master, "masters", name)
            if not with_model or not held.is_owner:
                continue
            if held.is_shown:
                model.add(held.values, *table, name)
                continue
            model.table("module")[name] = held.values.tensor.new_empty(0, device="cpu")
            if held.master is None and held.values.name not in self._covered:
                shards.add(held.values, "module", name)
        if optimizer is not None and self._rank.config.fp16 and self._writes(FP16_STATES):
            masters.content["loss_scaler"] = optimizer.loss_scaler.state_dict()
            self.result.values["loss_scaler"] = masters.content["loss_scaler"]
        if not with_model or not self._writes(MODEL):
            return
        if state.storage.shows_values:
            own = {place.path[0]: place.entry.tensor for place in model.places}
            model.content |= {a: own[name] for a, name in state.aliases.items() if name in own}
            slices = partial.slice_marks((name, state.held[name].slice_) for name in own)
            model.content |= partial.marks_of(slices, None)
        else:
            model.table("module")
        if state.others:
            others = {key: encode(value, f"'{key}'") for key, value in state.others.items()}
            self.result.values["extra_state"] = others
        if state.quantized:
            self.result.values["quantized"] = state.quantized

    # ---- optimizer

    def add_optimizer(self, optimizer: DistributedOptimizer) -> None:
        """Adds the optimizer's state, its groups, and with sharded parameters the masters."""
        everything = list(updated_by(optimizer, self._state))
        strange = [updated.tensor for updated in everything if updated.name is None]
        if strange:
            raise ValueError(
                f"{_C.rank_prefix()}the optimizer has {len(strange)} parameters, one of sizes "
                f"{list(strange[0].shape)}, that are not in the model; save it together with the "
                "model whose parameters it updates"
            )
        if self._rank.global_rank == 0:
            self.result.values["groups"] = encode_groups(optimizer, self._state)
        file = self._file(OPTIMIZER)
        file.updated = frozenset({"state"})
        if not self._state.storage.shows_values:
            file.content["partition_count"] = self._rank.sizes["shard"]
            file.content["fp32_flat_groups"] = self._flat_groups(optimizer, file)
        if not self._writes(OPTIMIZER):
            return
        marks = self._add_state(optimizer, everything, file)
        indices = {id(updated.tensor): updated.index for updated in everything}
        file.content["param_groups"] = [
            {**group, "params": [indices[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        file.content |= marks

    def _add_state(
        self, optimizer: DistributedOptimizer, everything: Iterable[Updated], file: PlannedFile
    ) -> dict[str, Any]:
        """Adds the state of parameters that are updated here; numbers to the manifest, too.

        Returns:
            marks of this rank's parts, as `OptimizerState.marks` does.
        """
        states = file.table("state")
        numbers: dict[str, dict[str, Any]] = self.result.values.setdefault("state", {})
        flat, slices, owned = {}, [], {}
        for updated in everything:
            held, tensor, part = updated.held, updated.tensor, updated.state_part
            if held is None:
                continue
            if updated.is_owned:
                owned[updated.index] = part is not None
            else:
                slices.append((updated.index, held.slice_))
            if tensor is not held.tensor and not updated.is_owned:  # a master
                cut = held.updated
                flat[updated.index] = cut.flat_begin, cut.flat_numel, tuple(held.tensor.shape)
            if not held.is_first or tensor not in optimizer.state or part is None:
                continue
            may_be_compact = isinstance(optimizer.optimizer, FusedAdam)
            states[updated.index] = dict(
                exported_entry(optimizer.optimizer, tensor)
                if may_be_compact
                else optimizer.state[tensor]
            )
            for key, value in states[updated.index].items():
                is_like = (
                    isinstance(value, Tensor)
                    and key != "step"
                    and value.shape == updated.state_shape
                )
                if is_like or (isinstance(value, Tensor) and value.dim() and value.numel()):
                    if value.numel() or not part.flat_numel:
                        entry = _state_entry(key, value.detach(), held, part, is_like)
                        file.places.append(Place(entry, ("state", updated.index, key)))
                elif part.flat_numel or 0 in held.shape:
                    # A rank without elements may have begun to count later.
                    where = f"'{key}' of the optimizer's state of '{held.name}'"
                    numbers.setdefault(held.name, {})[key] = encode(value, where)
        is_sharded = self._rank.sizes["shard"] > 1
        return partial.marks_of(partial.slice_marks(slices), flat if is_sharded else None, owned)

    def _flat_groups(self, optimizer: DistributedOptimizer, file: PlannedFile) -> list[Tensor]:
        """Returns the masters of each group in one flat tensor, as scripts read them."""
        state, flats = self._state, []
        groups = [
            [state.tensors[state.names[id(p)]].tensor for p in group["params"]]
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
                    if held.is_first:
                        file.places.append(Place(entry, ("fp32_flat_groups", idx), place.offset))
        return flats


def _state_entry(key: str, value: Tensor, held: Stored, part: Part, is_like: bool) -> Entry:
    """Returns the entry of a value that is like the parameter, or has a shape of its own.

    Args:
        key: key of the state.
        value: value on this rank.
        held: parameter.
        part: part of the parameter of which this rank has the state.
        is_like: whether the value has a number per element of that part.
    """
    name = f"{OPTIMIZER_ENTRY}{held.name}/{key}"
    if is_like:
        return Entry(name, held.shape, part, value)
    shape = tuple(value.shape)
    return Entry(name + suffix_of(part, held.shape), shape, Part.whole(shape), value)


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
