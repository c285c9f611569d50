"""Lists the parts of a model's tensors that a rank stores: all that checkpoints save and fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from smp.storage.protocol import Storage
from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import Interval, interval_of, whole_shape
from smp.world.rank import Rank

MODEL = "model/"
MASTER = "master/"


@dataclass(frozen=True)
class Entry:
    """A part of a tensor of the job, in the memory of this rank.

    Attributes:
        name: global name: ``model/<name>``, ``master/<name>`` or ``optimizer/<name>/<key>``.
        shape: shape of the whole tensor.
        part: part of the whole tensor.
        tensor: elements of the part, row-major; the memory itself, not a copy.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    tensor: Tensor


@dataclass(frozen=True)
class Named:
    """A parameter or buffer of the whole model.

    Attributes:
        name: canonical name, without prefix.
        tensor: parameter or buffer; without values if another pipeline rank has them.
        owner: pipeline rank that has the true value; all ranks have the buffers.
        shape: shape of the whole tensor.
    """

    name: str
    tensor: Tensor
    owner: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored(Named):
    """A parameter or buffer whose values this rank has, or takes when it loads.

    Attributes:
        is_owner: whether this pipeline rank has the true value.
        is_first: whether this rank is the first of the tensor-parallel ranks that have this part.
        values: values in the model's dtype.
        master: master of a trained parameter in 16-bit training.
        updated: part of the whole tensor that the optimizer updates here, if it does.
        slice_: slice of this tensor-parallel rank; None: all ranks of its group have the same.
        is_shown: whether the model's own tensor shows the values, and not a placeholder.
    """

    is_owner: bool
    is_first: bool
    values: Entry
    master: Entry | None
    updated: Part
    slice_: Interval | None
    is_shown: bool


@dataclass
class ModelState:
    """The tensors of a partitioned model, and the parts of them on this rank.

    Attributes:
        storage: storage of the model's parameters.
        keys: canonical names by keys of the state dict that have tensors, in its order; tied
            parameters have one canonical name.
        tensors: all tensors of the model, other ranks' too, by canonical name.
        held: tensors with values on this rank.
        others: further state of this rank's modules (``get_extra_state``).
        names: canonical names by ``id`` of the parameter, for all ranks' parameters, and of the
            tensors that an optimizer updates on this rank in their place.
        quantized: checksums of this rank's quantized weights, by name of the layer; they are in no
            other field.
    """

    storage: Storage
    keys: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, Named] = field(default_factory=dict)
    held: dict[str, Stored] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    quantized: dict[str, str] = field(default_factory=dict)

    @property
    def aliases(self) -> dict[str, str]:
        """Returns the canonical names of tied parameters by their further names."""
        return {key: name for key, name in self.keys.items() if key != name}


def parts(
    storage: Storage,
    state: Mapping[str, Any],
    owners: Mapping[str, int],
    is_other: Callable[[str], bool],
    rank: Rank,
) -> ModelState:
    """Returns the state of a model on this rank.

    Args:
        storage: storage of the model's parameters, without any in transfer.
        state: state dict of the model, with its parameters and buffers themselves.
        owners: pipeline rank that has the true value, by key; the first one has others.
        is_other: returns whether a key has further state of a module, not a tensor.
        rank: rank of this process.
    """
    pp_rank, tp_rank = rank.ranks["pp"], rank.ranks["tp"]
    result = ModelState(storage)
    first: dict[int, str] = {}
    for name, tensor in state.items():
        owner = owners.get(name, 0)
        if not isinstance(tensor, Tensor) or is_other(name):
            if owner == pp_rank:
                result.others[name] = tensor
            continue
        result.keys[name] = first.setdefault(id(tensor), name)
        if result.keys[name] != name:
            continue
        slice_ = interval_of(tensor)
        shape = tuple(tensor.shape if slice_ is None else whole_shape(tensor))
        result.tensors[name] = Named(name, tensor, owner, shape)
        shard = holding = None
        if isinstance(tensor, nn.Parameter):
            result.names[id(tensor)] = name
            if owner != pp_rank:
                continue
            shard, holding = storage.shards.get(tensor), storage.holdings.get(tensor)
        begin, values = (0, tensor.detach()) if shard is None else (shard.begin, shard.piece)
        part = updated = Part.of_slice(tensor.shape, slice_, begin, values.numel())
        master = None
        if holding is not None:
            updated = replace(part, flat_begin=holding.begin, flat_numel=holding.numel)
            result.names[id(holding.master)] = name
            if holding.has_copy:
                master = Entry(MASTER + name, shape, updated, holding.master.detach())
        result.tensors[name] = result.held[name] = Stored(
            name, tensor, owner, shape, owner == pp_rank, tp_rank == 0 or slice_ is not None,
            Entry(MODEL + name, shape, part, values), master, updated, slice_, shard is None,
        )  # fmt: skip
    return result
