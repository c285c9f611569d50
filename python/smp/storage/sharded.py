"""Sharded data parallelism: each rank keeps a part of every parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from smp import _C
from smp.data_parallel.reduction import broadcast_from_first
from smp.storage import gathering
from smp.storage.holdings import Holding, attach
from smp.storage.masters import cast_rest, cast_with_master, check_castable
from smp.storage.shards import Cutter, Shard, forget
from smp.storage.units import UnitPlan, plan_units
from smp.tensor_parallel.sharding import interval_of
from smp.world import runtime


class ShardedParameters:
    """The parameters of this rank in shards, and what makes them whole.

    Rank r of the ``q`` ranks of its shard group keeps elements ``[r * c, (r + 1) * c)`` of each
    flattened parameter, with ``c = ceil(numel / q)``, the frozen ones too. Outside of forwards and
    backwards a parameter shows NaN in its true shape, unless it is small enough to stay.

    They are made in three steps: the object, :meth:`take` for each parameter as soon as it has its
    values, in one order on all replicas, and :meth:`open`, which is collective over the shard
    group. So no rank ever has more than one module whole if initialisation is delayed.

    Args:
        root: the user's model.
        local: names in the whole model and parameters of this rank, in one order on all ranks of
            the group; they may be on the meta device.

    Attributes:
        holdings: of trainable parameters.
        plan: units that are gathered together.
        store: gathers them.

    Raises:
        ValueError: on every rank, for a parameter that has no 16-bit form where it is to have one.
    """

    def __init__(self, root: nn.Module, local: Sequence[tuple[str, nn.Parameter]]) -> None:
        current = runtime.current()
        half = current.config.half_dtype
        if half is not None:
            check_castable(root, half)
        ranks = list(current.groups["shard"])
        position = ranks.index(current.global_rank)
        # Nothing of what has no elements can be cut.
        self._empty = [(name, p) for name, p in local if p.numel() == 0]
        local = [(name, p) for name, p in local if p.numel() > 0]
        self._cutter = Cutter(local, position, len(ranks), half, current.device)
        self._shards = self._cutter.shards
        self._root = root
        self._undo: list[Callable[[], None]] = []
        self.holdings = {
            shard.parameter: _holding(name, shard)
            for (name, _), shard in zip(local, self._shards.values(), strict=True)
            if shard.master is not None
        }
        self.plan: UnitPlan = plan_units(root, lambda p: p in self._shards)
        self._order = [p for unit in self.plan.units for p in unit.parameters]

    def take(self, parameter: nn.Parameter) -> None:
        """Keeps a part of a parameter of this rank, and frees the rest.

        Collective over the replicas: the first one's values count.

        Args:
            parameter: real, on the device of this process.
        """
        if parameter not in self._cutter:
            return  # without elements
        broadcast_from_first([parameter], "dp" if interval_of(parameter) is None else "rdp")
        self._cutter.cut(parameter)

    def open(self) -> None:
        """From here on modules find their parameters whole. Collective over the shard group."""
        self._cutter.check_all_cut()
        self._cast_rest()
        self.store = self._make_store()
        self._undo = gathering.install(self.store, self.plan, self._root)

    def _cast_rest(self) -> None:
        """Gives 16 bits to what has no shard: empty parameters, those of other ranks, buffers."""
        half = runtime.current().config.half_dtype
        if half is None:
            return
        for name, parameter in self._empty:
            if parameter.requires_grad and parameter.is_floating_point():
                self.holdings[parameter] = cast_with_master(name, parameter, half)
        cast_rest(self._root, half)

    def _make_store(self) -> _C.ParameterStore:
        current = runtime.current()
        config = current.config
        positions = {parameter: i for i, parameter in enumerate(self._order)}
        return _C.ParameterStore(
            self._order,
            [self._shards[p].tensor for p in self._order],
            [[positions[p] for p in unit.parameters] for unit in self.plan.units],
            [unit.name for unit in self.plan.units],
            current.comms.shard,
            across=current.comms.shard_across,
            within=current.comms.shard_within,
            max_live_elements=config.sdp_max_live_parameters,
            persistence_threshold=config.sdp_param_persistence_threshold,
            faults=current.board,
            ranks=list(current.groups["shard"]),
            timeout_s=current.settings.timeout_s,
        )

    # ---- running

    def begin_step(self, num_microbatches: int, trains: bool) -> None:
        """A step that is alike if the arguments are."""
        self.store.begin_pass(2 * num_microbatches + trains)

    def end_step(self) -> None:
        self.store.end_pass()

    def abandon_step(self) -> None:
        self.store.abandon_pass()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Code that is no forward: each parameter that it reads is gathered and stays whole until
        its end. Collective: all ranks of the group read in one order."""
        scope = self.store.enter([], is_forward=False)
        try:
            yield
        finally:
            scope.leave()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """All parameters are whole inside. What is written to them is lost. Collective."""
        scope = self.store.enter(list(range(len(self.plan.units))), is_forward=False)
        try:
            yield
        finally:
            scope.leave()

    def after_update(self) -> None:
        """The shards have got other values."""
        self.store.mark_stale()

    # ---- values

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._shards

    def gathered(self, parameter: nn.Parameter) -> Tensor:
        """A whole copy. Collective over the shard group."""
        index = next(i for i, p in enumerate(self._order) if p is parameter)
        return self.store.gather_one(index)

    def filled(self, state: Mapping[str, Any], keep: bool = True) -> dict[str, Any]:
        """A state dict with whole tensors for sharded parameters, which are gathered one by one.

        Collective over the shard group.

        Args:
            state: made with ``keep_vars``.
            keep: False: takes part in the gathers, and returns nothing.
        """
        whole: dict[nn.Parameter, Tensor] = {}
        result: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, nn.Parameter) and value in self._shards:
                tensor = whole.get(value)
                if tensor is None:
                    tensor = self.gathered(value)
                    whole[value] = tensor if keep else tensor.new_empty(0)
                value = tensor
            elif isinstance(value, Tensor):
                value = value.detach()
            if keep:
                result[key] = value
        return result

    def write(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Takes this rank's part out of a whole value; call :meth:`after_update` at the end."""
        self._shards[parameter].write(value)

    # ---- ending

    def uncover(self) -> None:
        """Modules have their own forward and parameters again. May be called twice."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def make_real(self) -> None:
        """Gives all parameters memory of their own, with the whole values. Collective."""
        self.uncover()
        for parameter in self._order:
            parameter.data = self.gathered(parameter)
            forget(parameter)
        self._shards.clear()


def _holding(name: str, shard: Shard) -> Holding:
    assert shard.master is not None
    holding = Holding(
        name, shard.parameter, shard.begin, shard.numel, piece=shard.piece, master=shard.master
    )
    attach(holding)
    return holding
