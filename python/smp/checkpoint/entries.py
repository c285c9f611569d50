"""Lists the state that a rank has of a job: tensors by global names, and its part of each.

All modes have one form: a parameter has values in the model's dtype and, in 16-bit training, a
master. This rank holds a part of each (see `parts.Part`); saving reads that memory, and loading
writes to it.
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
        name: global name, with its prefix.
        shape: shape of the whole tensor.
        part: part of the whole tensor.
        tensor: elements of the part, row-major; the memory itself, not a copy.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    tensor: Tensor


@dataclass(frozen=True)
class Held:
    """A parameter or buffer whose values this rank has, or takes when it loads.

    Attributes:
        name: canonical name, without prefix.
        tensor: parameter or buffer of the model.
        stored: storage of the tensor on this rank.
        values: values in the model's dtype.
        master: master of a trained parameter in 16-bit training.
        is_owner: whether this pipeline rank has the true value; all of them have the buffers.
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
        shapes: shapes of all whole tensors of the model, other ranks' too, by canonical name.
        aliases: canonical names of tied parameters by their further names.
        held: parameters and buffers on this rank, by canonical name.
        others: further state of this rank's modules (``get_extra_state``).
        names: canonical names by ``id`` of the parameter, for all ranks' parameters, and of the
            tensors that an optimizer updates on this rank in their place.
        tensors: tensors of the whole model by canonical name; other ranks' ones have no values.
        owners: pipeline rank that has the true value, by canonical name.
        keys: keys of the state dict that have tensors, in its order.
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
    """Returns a partitioned model's state on this rank. Waits for parameters that are in transfer.

    Args:
        model: the model.
        pp_rank: pipeline rank of this process.
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
    """Returns the storage of a partitioned model's parameters."""
    parts = engine_of(model).parts
    assert parts is not None, "the model is not partitioned"
    return parts.storage


def canonical_names(root: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """Returns names of parameters by ``id``, and canonical names of tied ones by further names.

    They are those of :class:`ModelState`, also for models that are not partitioned.
    """
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(parameter), name)
        if first != name:
            aliases[name] = first
    return names, aliases


def names_of_tied(aliases: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the further names of each tied parameter, by its canonical name."""
    result: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        result.setdefault(name, []).append(alias)
    return result


# ---- optimizer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Updated:
    """A parameter of an optimizer.

    Attributes:
        index: index in the optimizer's state dicts.
        name: canonical name of the model's parameter; None: it belongs to another model.
        tensor: tensor in the optimizer's groups, a master or the parameter.
        held: values of the parameter on this rank; None: another rank has them.
    """

    index: int
    name: str | None
    tensor: Tensor
    held: Held | None


def updated_by(optimizer: torch.optim.Optimizer, state: ModelState) -> Iterator[Updated]:
    """Yields the parameters of an optimizer, in the order of its state dicts.

    Args:
        optimizer: optimizer of torch, with masters in its groups.
        state: state of the model.
    """
    for index, tensor in enumerate(parameters_of(optimizer)):
        name = state.names.get(id(tensor))
        yield Updated(index, name, tensor, None if name is None else state.held.get(name))


def is_elementwise(key: str, value: object, shape: Sequence[int]) -> bool:
    """Returns whether a value of an optimizer's state has one number per element of a parameter.

    Args:
        key: key of the value.
        value: the value.
        shape: shape of the tensor that the optimizer updates.
    """
    return isinstance(value, Tensor) and key != "step" and value.shape == shape


def state_entry(key: str, value: Tensor, held: Held, is_elementwise: bool) -> Entry:
    """Returns the entry of a tensor in an optimizer's state.

    A tensor of another shape than the parameter (factored moments) has a name of its own for each
    part of the parameter, because the way to cut it is unknown. It is found again only where the
    parameter is cut in the same way.
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
    """Finds stored entries that are state of a parameter as this rank cuts it.

    Args:
        name: name under which the parameter was saved.
        rests: rests of entries' names after ``optimizer/<name>/``.
        stored: storage of the parameter on this rank.

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
    """Returns whether a value of an optimizer's state is kept with the numbers, not as an entry."""
    return not isinstance(value, Tensor) or value.dim() == 0 or math.prod(value.shape) == 0
