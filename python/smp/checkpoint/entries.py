"""Lists the state that a rank has of a job: tensors by global names, and its part of each.

All modes have one form: a parameter has values in the model's dtype and, in 16-bit training, a
master. This rank holds a part of each (see `storage.parts`); saving reads that memory, and loading
writes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from smp.model import DistributedModel, engine_of
from smp.model.parts import is_extra_state
from smp.modules import packed
from smp.modules.materialize import is_placeholder
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.precision.holdings import parameters_of
from smp.storage.parts import ModelState, Stored, parts
from smp.tensor_parallel.parts import Part
from smp.world.rank import Rank

OPTIMIZER = "optimizer/"


def model_state(model: DistributedModel, rank: Rank) -> ModelState:
    """Returns a partitioned model's state on this rank. Waits for parameters that are in transfer.

    Quantized weights are frozen, and the files that they were made of have them. The state has
    their checksums.

    Args:
        model: the model.
        rank: rank of this process.
    """
    own = engine_of(model).parts
    assert own is not None, "the model is not partitioned"
    own.storage.settle()
    state = own.root.state_dict(keep_vars=True)
    for key in packed.keys_in(own.root):
        state.pop(key, None)
    found = parts(own.storage, state, own.key_partitions(), is_extra_state, rank)
    found.quantized = {
        name: packed.digest(layer)
        for name, layer, weight in packed.layers_in(own.root)
        if not is_placeholder(weight)
    }
    return found


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
        state_part: part of the whole parameter of which this rank has the optimizer's state; None:
            other ranks have it.
        is_owned: whether an owner has that state, whatever ranks hold the parameter.
        state_shape: shape of state with a number per element.
    """

    index: int
    name: str | None
    tensor: Tensor
    held: Stored | None
    state_part: Part | None
    is_owned: bool
    state_shape: tuple[int, ...]


def updated_by(optimizer: DistributedOptimizer, state: ModelState) -> Iterator[Updated]:
    """Yields the parameters of an optimizer, in the order of its state dicts.

    Args:
        optimizer: optimizer, with masters in its groups.
        state: state of the model.
    """
    owned = optimizer.whole_tensors.owned
    for index, tensor in enumerate(parameters_of(optimizer.optimizer)):
        name = state.names.get(id(tensor))
        held = None if name is None else state.held.get(name)
        part = None if held is None else held.updated
        shape = tuple(tensor.shape)
        if held is not None and tensor in owned:
            part = Part.whole(held.shape) if owned[tensor] else None
            shape = held.shape
        yield Updated(index, name, tensor, held, part, tensor in owned, shape)


def suffix_of(part: Part, shape: tuple[int, ...]) -> str:
    """Returns the end of the names of state that has another shape than its parameter.

    Such a tensor (factored moments) has a name of its own for each part of the parameter, because
    the way to cut it is unknown. It is found again only where the state is cut in the same way.

    Args:
        part: part of the parameter of which a rank has the state.
        shape: shape of the whole parameter.
    """
    if part == Part.whole(shape):
        return ""
    return f"@{part.dim}:{part.begin}:{part.end}:{part.flat_begin}:{part.flat_numel}"


def own_state_keys(
    name: str, rests: Iterable[str], part: Part, shape: tuple[int, ...]
) -> dict[str, str]:
    """Finds stored entries that are state of a parameter as this rank cuts it.

    Args:
        name: name under which the parameter was saved.
        rests: rests of entries' names after ``optimizer/<name>/``.
        part, shape: see `suffix_of`.

    Returns:
        names of entries by key of the state.
    """
    suffix = suffix_of(part, shape)
    found = {}
    for rest in rests:
        key, at, cut = rest.partition("@")
        if at + cut in ("", suffix):
            found[key] = f"{OPTIMIZER}{name}/{rest}"
    return found
