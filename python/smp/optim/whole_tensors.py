"""Updates whole tensors on the ranks that own them, where each rank holds parts.

An optimizer that reads a whole matrix for the update of an element cannot work on parts. Its groups
have the parts of this rank between updates, as those of all optimizers. For an update the owner
gets the gradient of the whole tensor, the groups have the whole tensors that this rank owns, and
the optimizer runs as in one process. Then every rank takes its part of the new values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.model.torch_training.coupling import needs_whole_tensors
from smp.optim.owners import Candidate, choose_owners
from smp.optim.part_exchange import Holders, PartExchange, SpreadTensor
from smp.optim.written import digest_of
from smp.precision.holdings import holding_with_master, model_parameter_of, parameters_of
from smp.tensor_parallel.cutting import part_of
from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import interval_of, whole_shape
from smp.world.rank import Rank

_Axes = tuple[str, ...]


class WholeTensors:
    """The tensors of one optimizer that are updated whole, by owner.

    Args:
        rank: rank of this process.
        optimizer: optimizer of torch.

    Attributes:
        in_groups: whether the tensors of each group are updated whole where ranks hold parts.
        has_some: whether there are such tensors; `gather` and `show` come before an update then,
            `hide` and `spread` after it.

    Raises:
        ValueError: the optimizer needs more than one whole tensor, or whole tensors against the
            configuration.
    """

    def __init__(self, rank: Rank, optimizer: torch.optim.Optimizer) -> None:
        self._rank = rank
        self._optimizer = optimizer
        self.in_groups: list[bool] = []
        self.has_some = False
        self._exchanges: dict[_Axes, PartExchange] = {}
        self._by_part: dict[Tensor, SpreadTensor] = {}
        self._known: dict[_Axes, list[Any]] = {}  # digests of the parts after the last update
        self._active: dict[_Axes, list[SpreadTensor]] = {}  # tensors that have a gradient
        self._parts: list[list[Tensor]] | None = None  # groups while they have whole tensors
        self.look_at_groups()

    @property
    def bytes_sent(self) -> int:
        """Bytes of gradients and values that this rank has sent so far."""
        return sum(exchange.bytes_sent for exchange in self._exchanges.values())

    @property
    def owned(self) -> dict[Tensor, bool]:
        """Flags by tensor in the groups: whether this rank has the state of the whole tensor.

        Tensors that are updated in parts have no flag.
        """
        return {part: tensor.whole is not None for part, tensor in self._by_part.items()}

    def look_at_groups(self) -> None:
        """Finds out how the tensors of new groups are updated."""
        if len(self._optimizer.param_groups) != len(self.in_groups):
            self.in_groups = needs_whole_tensors(self._rank, self._optimizer)

    # ---- layout

    def lay_out(self, is_local: Callable[[Tensor], bool]) -> None:
        """Chooses the owners of tensors that have none yet.

        Collective over the ranks that hold parts of such tensors. Owners stay what they are.

        Args:
            is_local: returns whether a tensor of the groups is one of a partitioned model here.
        """
        for axes, found in self._find(is_local).items():
            exchange = self._exchanges.get(axes)
            if exchange is None or len(exchange.tensors) < len(found):
                self._exchanges[axes] = self._planned(axes, found)
                self._known.pop(axes, None)
        self._by_part = {t.part: t for e in self._exchanges.values() for t in e.tensors}
        self.has_some = bool(self._exchanges)
        for part, tensor in self._by_part.items():
            if tensor.whole is None:
                self._optimizer.state.pop(part, None)

    def _find(self, is_local: Callable[[Tensor], bool]) -> dict[_Axes, list[tuple[int, Tensor]]]:
        """Returns indices and tensors of the groups, by the axes over which they are spread."""
        groups = zip(self._optimizer.param_groups, self.in_groups, strict=True)
        wanted = {id(p) for group, is_whole in groups if is_whole for p in group["params"]}
        found: dict[_Axes, list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(parameters_of(self._optimizer)):
            if id(tensor) not in wanted or not is_local(tensor):
                continue
            axes = self._axes_of(tensor)
            if axes:
                found.setdefault(axes, []).append((index, tensor))
        return found

    def _axes_of(self, tensor: Tensor) -> _Axes:
        sizes, parameter = self._rank.sizes, model_parameter_of(tensor)
        is_trained = sizes["shard"] == 1 or holding_with_master(tensor) is not None
        if not is_trained or 0 in whole_shape(parameter):
            return ()
        axes = ["shard"] if sizes["shard"] > 1 else []
        if sizes["tp"] > 1 and interval_of(parameter) is not None:
            axes.append("tp")
        return tuple(axes)

    def _holders(self, axes: _Axes) -> Holders:
        rank = self._rank
        if axes == ("shard",):
            ranks = members = rank.groups["shard"]
            communicator = rank.comms.shard_reduce
        elif axes == ("tp",):
            ranks = members = rank.groups["tp"]
            communicator = rank.comms.tp
        else:
            members, communicator = rank.groups["dp_cp"], rank.comms.dp_cp
            copy = rank.ranks["rdp_cp"] // rank.sizes["shard"]
            ranks = tuple(
                each
                for each in members
                if rank.grid.group_rank("rdp_cp", each) // rank.sizes["shard"] == copy
            )
        assert communicator is not None
        return Holders(tuple(ranks), communicator, tuple(members))

    def _planned(self, axes: _Axes, found: Sequence[tuple[int, Tensor]]) -> PartExchange:
        """Exchanges the parts of tensors, and chooses their owners. Collective."""
        holders = self._holders(axes)
        meeting = PartExchange(self._rank, holders, ())
        shapes = [tuple(whole_shape(model_parameter_of(tensor))) for _, tensor in found]
        own = [
            (index, shape, str(tensor.dtype), _part(tensor))
            for (index, tensor), shape in zip(found, shapes, strict=True)
        ]
        told: list[Any] = meeting.gather_objects(own, "optimizer: parts of whole tensors")
        for position, others in enumerate(told):
            if [each[:3] for each in others] != [each[:3] for each in own]:
                raise ValueError(
                    f"{_C.rank_prefix()}ranks that hold parts of the same parameters have other "
                    f"optimizers: global_rank {holders.ranks[position]} updates {len(others)} "
                    f"tensors in parts and this rank {len(own)}, or their sizes or dtypes differ; "
                    "create the optimizer with the same groups on all ranks"
                )
        position = holders.ranks.index(self._rank.global_rank)
        candidates = []
        for idx, (_, tensor) in enumerate(found):
            held = tuple(others[idx][3].flat_numel for others in told)
            known = self._by_part.get(tensor)
            owner = None if known is None else known.owner
            candidates.append(Candidate(shapes[idx], tensor.itemsize, held, owner))
        tensors = []
        for idx, owner in enumerate(choose_owners(candidates, len(holders.ranks))):
            index, tensor = found[idx]
            known, shape = self._by_part.get(tensor), shapes[idx]
            whole = None if known is None else known.whole
            if owner == position and whole is None:
                memory = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
                whole = nn.Parameter(memory)
            parts = tuple(others[idx][3] for others in told)
            tensors.append(SpreadTensor(index, tensor, shape, parts, owner, whole))
        return PartExchange(self._rank, holders, tensors)

    # ---- updates

    def show(self) -> None:
        """Puts whole tensors into the groups and state, in place of parts. Not collective."""
        if not self._by_part:
            return
        self._parts = []
        for group in self._optimizer.param_groups:
            parts = group["params"]
            self._parts.append(list(parts))
            shown = ((p, self._by_part.get(p)) for p in parts)
            parts[:] = [p if t is None else t.whole for p, t in shown if not _is_elsewhere(t)]
        for part, tensor in self._by_part.items():
            if part in self._optimizer.state and tensor.whole is not None:
                self._optimizer.state[tensor.whole] = self._optimizer.state.pop(part)

    def hide(self) -> None:
        """Puts parts back into the groups and state. Not collective."""
        if self._parts is None:
            return
        for group, parts in zip(self._optimizer.param_groups, self._parts, strict=True):
            group["params"][:] = parts
        self._parts = None
        for part, tensor in self._by_part.items():
            if tensor.whole is not None and tensor.whole in self._optimizer.state:
                self._optimizer.state[part] = self._optimizer.state.pop(tensor.whole)

    @torch.no_grad()
    def gather(self) -> None:
        """Gives owners the gradients of whole tensors, and values that were written elsewhere.

        Collective over the ranks that hold parts of the same tensors.
        """
        for axes, exchange in self._exchanges.items():
            known, now = self._known.get(axes), digest_of([t.part for t in exchange.tensors])
            own = (known != now, [t.part.grad is not None for t in exchange.tensors])
            told: list[Any] = exchange.gather_objects(own, "optimizer.step")
            if any(is_written for is_written, _ in told):
                for tensor, values in exchange.to_owners(exchange.tensors, _values):
                    assert tensor.whole is not None
                    tensor.whole.copy_(values)
            masks = zip(*(mask for _, mask in told), strict=True)
            active = [t for t, have in zip(exchange.tensors, masks, strict=True) if any(have)]
            self._active[axes] = active
            for tensor in exchange.tensors:
                if tensor.whole is not None:
                    tensor.whole.grad = None
            for tensor, gradient in exchange.to_owners(active, _gradient):
                assert tensor.whole is not None
                tensor.whole.grad = gradient

    @torch.no_grad()
    def spread(self) -> None:
        """Gives every rank its parts of the owners' values. Collective like `gather`."""
        for axes, exchange in self._exchanges.items():
            for tensors, values in exchange.to_holders(self._active.pop(axes, [])):
                parts = [tensor.part for tensor in tensors]
                shaped = [value.view_as(p) for value, p in zip(values, parts, strict=True)]
                if parts:
                    torch._foreach_copy_(parts, shaped)
            for tensor in exchange.tensors:
                if tensor.whole is not None:
                    tensor.whole.grad = None
            self._known[axes] = digest_of([t.part for t in exchange.tensors])


def _is_elsewhere(tensor: SpreadTensor | None) -> bool:
    return tensor is not None and tensor.whole is None


def _part(tensor: Tensor) -> Part:
    """Returns the elements of a whole parameter that a tensor of the groups has."""
    holding = holding_with_master(tensor)
    if holding is None:
        return part_of(tensor)
    return part_of(holding.parameter, holding.begin, holding.numel)


def _values(tensor: SpreadTensor) -> Tensor:
    return tensor.part.detach()


def _gradient(tensor: SpreadTensor) -> Tensor:
    gradient = tensor.part.grad
    return torch.zeros_like(tensor.part) if gradient is None else gradient.detach()
