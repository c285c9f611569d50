"""What this rank has of a job's state: tensors by global names, and which part of each it is.

All modes come down to the same: a parameter has values in the model's dtype and, in 16-bit
training, a master; of each this rank holds a part (see `manifest.Part`), and that memory is what
is saved and what is read into.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smp.checkpoint.manifest import Part
from smp.model import DistributedModel, engine_of
from smp.model.parts import is_extra_state
from smp.precision.holdings import (
    Holding,
    holding_of,
    holding_with_master,
    model_parameter_of,
    parameters_of,
)
from smp.storage.protocol import Storage
from smp.tensor_parallel.sharding import interval_of, whole_shape
from smp.world import runtime

MODEL = "model/"
MASTER = "master/"
OPTIMIZER = "optimizer/"


@dataclass(frozen=True)
class Entry:
    """A part of a tensor of the job, in the memory of this rank.

    Attributes:
        name: global, with its prefix.
        shape: of the whole tensor.
        part: which elements these are.
        tensor: as many, row-major; the memory itself, not a copy.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    tensor: Tensor


@dataclass(frozen=True)
class Held:
    """A parameter or buffer whose values this rank has, or takes when it loads.

    Attributes:
        name: canonical, without prefix.
        tensor: of the model.
        values: in the model's dtype.
        master: in 16-bit training, of what is trained.
        is_owner: this pipeline rank has the true value; buffers are on all of them.
        is_shown: ``tensor`` shows the values; otherwise it is a placeholder.
    """

    name: str
    tensor: Tensor
    values: Entry
    master: Entry | None
    is_owner: bool
    is_shown: bool

    @property
    def is_parameter(self) -> bool:
        return isinstance(self.tensor, nn.Parameter)


@dataclass
class ModelState:
    """The tensors of a partitioned model.

    Attributes:
        shapes: of all whole tensors of the model by canonical name, those of other ranks too.
        aliases: further names of tied parameters, and the canonical one.
        held: what is here, by canonical name.
        others: what modules of this rank say of themselves besides (``get_extra_state``).
        names: canonical names by ``id`` of the parameter, for all ranks' parameters.
        tensors: of the whole model by canonical name; those of other ranks have no values.
        owners: pipeline rank that has the true value, by canonical name.
        keys: of the state dict, in its order, tensors only.
        shows_values: see `Storage`.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    shows_values: bool = True


def part_of(tensor: Tensor, begin: int = 0, numel: int | None = None) -> Part:
    """Elements of what this tensor-parallel rank has of a parameter, as part of the whole.

    Args:
        tensor: parameter of the model, or a buffer.
        begin, numel: of the flattened slice; all of it if not given.
    """
    size = tensor.numel() if numel is None else numel
    interval = interval_of(tensor)
    shape = whole_shape(tensor)
    if interval is None or interval.size == interval.extent:
        return Part.flat(shape, begin, size)
    return Part(interval.dim, interval.begin, interval.end, interval.extent, begin, size)


def model_state(model: DistributedModel) -> ModelState:
    """What a partitioned model has on this rank. Waits for parameters that are on their way."""
    parts = engine_of(model).parts
    assert parts is not None, "the model is not partitioned"
    parts.storage.settle()
    state = ModelState(shows_values=parts.storage.shows_values)
    canonical: dict[int, str] = {}
    partitions = parts.key_partitions()
    pp_rank = runtime.current().rank.ranks["pp"]
    for key, value in parts.root.state_dict(keep_vars=True).items():
        owns = partitions.get(key, 0) == pp_rank
        if not isinstance(value, Tensor) or is_extra_state(key):
            if owns:
                state.others[key] = value
            continue
        state.keys.append(key)
        if id(value) in canonical:
            state.aliases[key] = canonical[id(value)]
            continue
        canonical[id(value)] = key
        state.shapes[key] = tuple(whole_shape(value))
        state.tensors[key] = value
        state.owners[key] = partitions.get(key, 0)
        if isinstance(value, nn.Parameter):
            state.names[id(value)] = key
        if owns or not isinstance(value, nn.Parameter):
            state.held[key] = _held(key, value, owns, parts.storage)
    return state


def storage_of(model: DistributedModel) -> Storage:
    """How the parameters of a partitioned model are stored."""
    parts = engine_of(model).parts
    assert parts is not None, "the model is not partitioned"
    return parts.storage


def canonical_names(root: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """Names of a model's parameters by ``id``, and of tied ones the canonical name by the others.

    As in :class:`ModelState`, for models that are not partitioned, too.
    """
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            aliases[name] = first
    return names, aliases


def names_of_tied(aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """The further names of each tied parameter, by its canonical one."""
    result: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        result.setdefault(name, []).append(alias)
    return result


def _held(name: str, tensor: Tensor, is_owner: bool, storage: Storage) -> Held:
    stored, holding = storage.stored(tensor), holding_of(tensor)
    part = part_of(tensor, stored.begin, stored.numel)
    shape = tuple(whole_shape(tensor))
    master = None
    if holding is not None and holding.has_copy:
        master = Entry(MASTER + name, shape, held_part(holding), holding.master.detach())
    return Held(
        name,
        tensor,
        Entry(MODEL + name, shape, part, stored.values),
        master,
        is_owner,
        stored.is_shown,
    )


def held_part(holding: Holding) -> Part:
    """The part of a parameter that this rank updates."""
    return part_of(holding.parameter, holding.begin, holding.numel)


# ---- optimizer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Updated:
    """A parameter of an optimizer, whose state may be on this rank.

    Attributes:
        index: in the optimizer's state dicts.
        name: canonical, of the model's parameter; None: it belongs to no model here.
        tensor: what the optimizer has in its groups, a master or the parameter.
        shape: of the whole parameter.
        part: which elements of it ``tensor`` has.
        is_local: this rank updates them.
    """

    index: int
    name: str | None
    tensor: Tensor
    shape: tuple[int, ...]
    part: Part
    is_local: bool


def updated_by(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    is_local: Callable[[Tensor], bool],
) -> Iterator[Updated]:
    """The parameters of an optimizer, by the index that they have in its state dicts.

    Args:
        optimizer: of torch, with masters in its groups.
        names: of the model's parameters by ``id``.
        is_local: whether one of the optimizer's parameters is updated here.
    """
    for index, tensor in enumerate(parameters_of(optimizer)):
        parameter = model_parameter_of(tensor)
        holding = holding_with_master(tensor)
        part = part_of(parameter) if holding is None else held_part(holding)
        shape = tuple(whole_shape(parameter))
        yield Updated(index, names.get(id(parameter)), tensor, shape, part, is_local(tensor))


def is_elementwise(key: str, value: object, updated: Updated) -> bool:
    """Is this value of an optimizer's state one number per element of the parameter?"""
    return isinstance(value, Tensor) and key != "step" and value.shape == updated.tensor.shape


def state_entry(key: str, value: Tensor, updated: Updated) -> Entry:
    """The entry of a tensor in an optimizer's state.

    One that has another shape than the parameter (factored moments) has a name of its own for each
    part of the parameter, because nobody knows how to cut it: it is found again where the parameter
    is cut as it was.
    """
    assert updated.name is not None
    if is_elementwise(key, value, updated):
        return Entry(
            f"{OPTIMIZER}{updated.name}/{key}", updated.shape, updated.part, value.detach()
        )
    shape = tuple(value.shape)
    name = f"{OPTIMIZER}{updated.name}/{key}{_suffix(updated)}"
    return Entry(name, shape, Part.whole(shape), value.detach())


def _suffix(updated: Updated) -> str:
    part = updated.part
    if part == Part.whole(updated.shape):
        return ""
    return f"@{part.dim}:{part.begin}:{part.end}:{part.flat_begin}:{part.flat_numel}"


def own_state_keys(stored: str, rests: Iterable[str], updated: Updated) -> dict[str, str]:
    """Which stored entries are state of a parameter as it is cut here.

    Args:
        stored: name under which the parameter was saved.
        rests: what follows ``optimizer/<stored>/`` in names of entries.
        updated: the parameter.

    Returns:
        names of entries by key of the state.
    """
    suffix = _suffix(updated)
    found = {}
    for rest in rests:
        key, at, cut = rest.partition("@")
        if at + cut in ("", suffix):
            found[key] = f"{OPTIMIZER}{stored}/{rest}"
    return found


def is_number(value: object) -> bool:
    """Is a value of an optimizer's state kept with the numbers, not as an entry?"""
    return not isinstance(value, Tensor) or value.dim() == 0 or math.prod(value.shape) == 0
