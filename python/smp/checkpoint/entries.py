"""What this rank has of a job's state: tensors by global names, and which part of each it is.

All modes come down to the same: a parameter has values in the model's dtype and, in 16-bit
training, a master; of each this rank holds a part (see `parts.Part`), and that memory is what
is saved and what is read into.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smp.model import DistributedModel, engine_of
from smp.model.parts import is_extra_state
from smp.precision.holdings import parameters_of
from smp.storage.protocol import Storage, Stored
from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import whole_shape

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
        stored: what lies here of it.
        values: in the model's dtype.
        master: in 16-bit training, of what is trained.
        is_owner: this pipeline rank has the true value; buffers are on all of them.
    """

    name: str
    tensor: Tensor
    stored: Stored
    values: Entry
    master: Entry | None
    is_owner: bool


@dataclass
class ModelState:
    """The tensors of a partitioned model.

    Attributes:
        shapes: of all whole tensors of the model by canonical name, those of other ranks too.
        aliases: further names of tied parameters, and the canonical one.
        held: what is here, by canonical name.
        others: what modules of this rank say of themselves besides (``get_extra_state``).
        names: canonical names by ``id`` of the parameter, for all ranks' parameters, and of what
            an optimizer updates here in its place.
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


def model_state(model: DistributedModel, pp_rank: int) -> ModelState:
    """What a partitioned model has on this rank. Waits for parameters that are on their way.

    Args:
        pp_rank: of this process.
    """
    parts = engine_of(model).parts
    assert parts is not None, "the model is not partitioned"
    parts.storage.settle()
    state = ModelState(shows_values=parts.storage.shows_values)
    canonical: dict[int, str] = {}
    partitions = parts.key_partitions()
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
        state.tensors[key] = value
        state.owners[key] = partitions.get(key, 0)
        if isinstance(value, nn.Parameter):
            state.names[id(value)] = key
        if owns or not isinstance(value, nn.Parameter):
            stored = parts.storage.stored(value)
            state.shapes[key] = stored.shape
            values, master = Entry(MODEL + key, stored.shape, stored.part, stored.values), None
            if stored.master is not None:
                master = Entry(MASTER + key, stored.shape, stored.updated, stored.master)
            state.held[key] = Held(key, value, stored, values, master, owns)
        else:
            state.shapes[key] = tuple(whole_shape(value))
    for parameter, holding in parts.storage.holdings.items():
        if id(parameter) in state.names:
            state.names[id(holding.master)] = state.names[id(parameter)]
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


# ---- optimizer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Updated:
    """A parameter of an optimizer.

    Attributes:
        index: in the optimizer's state dicts.
        name: canonical, of the model's parameter; None: it belongs to another model.
        tensor: what the optimizer has in its groups, a master or the parameter.
        held: what this rank has of it; None: it is on another rank.
    """

    index: int
    name: str | None
    tensor: Tensor
    held: Held | None


def updated_by(optimizer: torch.optim.Optimizer, state: ModelState) -> Iterator[Updated]:
    """The parameters of an optimizer, by the index that they have in its state dicts.

    Args:
        optimizer: of torch, with masters in its groups.
        state: of the model.
    """
    for index, tensor in enumerate(parameters_of(optimizer)):
        name = state.names.get(id(tensor))
        yield Updated(index, name, tensor, None if name is None else state.held.get(name))


def is_elementwise(key: str, value: object, shape: Sequence[int]) -> bool:
    """Is this value of an optimizer's state one number per element of a parameter?

    Args:
        shape: of what the optimizer updates.
    """
    return isinstance(value, Tensor) and key != "step" and value.shape == shape


def state_entry(key: str, value: Tensor, held: Held, is_elementwise: bool) -> Entry:
    """The entry of a tensor in an optimizer's state.

    One that has another shape than the parameter (factored moments) has a name of its own for each
    part of the parameter, because nobody knows how to cut it: it is found again where the parameter
    is cut as it was.
    """
    name, stored = f"{OPTIMIZER}{held.name}/{key}", held.stored
    if is_elementwise:
        return Entry(name, stored.shape, stored.updated, value.detach())
    shape = tuple(value.shape)
    return Entry(name + _suffix(stored), shape, Part.whole(shape), value.detach())


def _suffix(stored: Stored) -> str:
    part = stored.updated
    if part == Part.whole(stored.shape):
        return ""
    return f"@{part.dim}:{part.begin}:{part.end}:{part.flat_begin}:{part.flat_numel}"


def own_state_keys(name: str, rests: Iterable[str], stored: Stored) -> dict[str, str]:
    """Which stored entries are state of a parameter as it is cut here.

    Args:
        name: under which the parameter was saved.
        rests: what follows ``optimizer/<name>/`` in names of entries.
        stored: what this rank has of the parameter.

    Returns:
        names of entries by key of the state.
    """
    suffix = _suffix(stored)
    found = {}
    for rest in rests:
        key, at, cut = rest.partition("@")
        if at + cut in ("", suffix):
            found[key] = f"{OPTIMIZER}{name}/{rest}"
    return found


def is_number(value: object) -> bool:
    """Is a value of an optimizer's state kept with the numbers, not as an entry?"""
    return not isinstance(value, Tensor) or value.dim() == 0 or math.prod(value.shape) == 0
