"""The borders of blocks where the ranks of a group hold different samples outside of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

import smp._C as _C
from smp.nn.layout import Layout
from smp.nn.planned.calls import Call
from smp.nn.planned.late import LateSum
from smp.tensor_parallel import regions

#: arguments that are the same for all samples, and on all ranks
_OF_ALL_SAMPLES = frozenset({"cache_position"})
#: number of dims with which arguments have samples along dim 1: positions in time, height and width
#: of models of images and text
_BEHIND = {"position_ids": 3, "position_embeddings": 4}
_GATHERED = "_smp_gathered"  # attribute of a tensor: its version, samples and gathered form


def enter(
    layout: Layout, where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Call
) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """Gathers the arguments of a block from all ranks.

    Args:
        layout: layout of the model.
        where: name of the block.
        args, kwargs: arguments from the code around the block.
        call: call of the block, which records gathered tensors and their origins.

    Returns:
        The same with gathered tensors, and the number of samples of this rank.

    Raises:
        ValueError: an argument has no samples along dim 0.
    """
    named = [(str(idx), value) for idx, value in enumerate(args)]
    named += kwargs.items()
    first = next((v for name, v in named if name == "hidden_states" and _is_data(v)), None)
    if first is None:
        first = next((value for _, value in named if _is_data(value)), None)
    if first is None:
        raise ValueError(
            f"{_C.rank_prefix()}{where}: is split by a plan and was called without a tensor of "
            "activations, so its samples cannot be told; use prescaled_batch, or leave it out"
        )
    gather = _Gather(layout, where, first, call)
    given = [gather(name, value) for name, value in named]
    num_args = len(args)
    return tuple(given[:num_args]), dict(zip(kwargs, given[num_args:], strict=True)), first.shape[0]


def _is_data(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


class _Gather:
    """A function that gathers the samples of arguments."""

    def __init__(self, layout: Layout, where: str, first: Tensor, call: Call) -> None:
        self._layout, self._where, self._call = layout, where, call
        self._num_samples, self._first = first.shape[0], first

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(name, value)
        if type(value) in (tuple, list):
            return type(value)(self(name, item) for item in value)
        if type(value) is dict:
            return {key: self(f"{name}['{key}']", item) for key, item in value.items()}
        return value

    def _tensor(self, name: str, x: Tensor) -> Tensor:
        if x.dim() == 0 or name in _OF_ALL_SAMPLES:
            return x
        if x.dim() == _BEHIND.get(name):
            return self._tensor("", x.transpose(0, 1)).transpose(0, 1)
        if x.shape[0] != self._num_samples and not (x.shape[0] == 1 and x.dim() > 1):
            raise ValueError(
                f"{_C.rank_prefix()}{self._where}: the argument '{name}' has shape "
                f"{list(x.shape)}; expected {self._num_samples} samples along dim 0, as in the "
                f"activations {list(self._first.shape)}, or 1 for all of them: a part that a plan "
                "splits needs the samples of all ranks. With prescaled_batch all ranks have them"
            )
        is_plain = type(x) is Tensor and not x.is_meta and not x.requires_grad
        may_keep = is_plain and not regions.is_alone()
        kept = getattr(x, _GATHERED, None) if may_keep else None
        if kept is not None and kept[:2] == (x._version, self._num_samples):
            gathered: Tensor = kept[2]
            return gathered
        gathered = self._layout.expand_to_all(x, self._num_samples)
        if may_keep:  # layers read the same masks and angles one after the other
            setattr(x, _GATHERED, (x._version, self._num_samples, gathered))
        elif x.requires_grad and x.shape[0] == self._num_samples and type(gathered) is Tensor:
            self._call.note(gathered, x)
        return gathered


def leave(layout: Layout, where: str, output: Any, num_samples: int) -> Any:
    """Returns this rank's samples of a block's output.

    Args:
        layout, where: the same as in :func:`enter`.
        output: output for the samples of all ranks.
        num_samples: number of samples of this rank.

    Raises:
        RuntimeError: a tensor has no samples along dim 0.
    """
    known: dict[int, Tensor] = {}  # a tensor that is returned twice is one tensor outside, too

    def own(x: Any) -> Any:
        if isinstance(x, Tensor):
            if id(x) not in known:
                known[id(x)] = _own_samples(layout, where, x, num_samples)
            return known[id(x)]
        if type(x) in (tuple, list):
            return type(x)(map(own, x))
        if type(x) is dict:
            return {key: own(item) for key, item in x.items()}
        return x

    return own(output)


def _own_samples(layout: Layout, where: str, x: Tensor, num_samples: int) -> Tensor:
    if x.dim() == 0 or x.shape[0] != num_samples * layout.num_ranks:
        raise RuntimeError(
            f"{_C.rank_prefix()}{where}: gives a tensor of shape {list(x.shape)}; expected "
            f"{num_samples * layout.num_ranks} samples of all ranks along dim 0. What a plan "
            "splits has to keep samples there; use prescaled_batch, or leave it out"
        )
    if isinstance(x, LateSum):
        own = x.own_samples()
        if own is not None:  # a view made by an autograd node cannot be written in place
            return own.clone() if own._is_view() else own
        x = x.read()
    # A copy can be written in place by the code around, and keeps no samples of other ranks.
    return regions.scatter(x, 0).clone()
