"""Sharded data parallelism: each rank keeps a part of every parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.data_parallel.reduction import broadcast_from_first, shards_of_gradients
from smp.modules import packed
from smp.modules.training_dtypes import TrainingDtypes
from smp.precision.holdings import Holding, attach, holding_of, load_value, reload_masters
from smp.precision.script_writes import OwnPiece, disown, own
from smp.precision.shown_gradients import miss_gradients
from smp.storage import gathering
from smp.storage.half import cast_with_master, plan_castable
from smp.storage.protocol import MakeReal, Storage, refuse_thawed
from smp.storage.shards import Cutter, Shard, forget, hide_values, shard_of
from smp.storage.units import plan_units
from smp.storage.whole import WholeParameters
from smp.tensor_parallel.sharding import interval_of
from smp.world.rank import Rank


class ShardedParameters:
    """The parameters of this rank in shards, with a store that makes them whole.

    Rank r of the ``q`` ranks of its shard group keeps elements ``[r * c, (r + 1) * c)`` of each
    flattened parameter, with ``c = ceil(numel / q)``; this holds for frozen ones, too. Outside of
    forwards and backwards a parameter shows NaN in its true shape, unless it is small enough to
    stay. A parameter is cut as soon as it has its values, so with delayed initialisation a rank
    never has more than one whole module.

    Args:
        rank: rank of this process.
        root: the user's model.
        runs_here: returns whether this rank runs the forward of a module.

    Attributes:
        plan: units that are gathered together.
        store: store that gathers the units.
    """

    shows_values = False
    has_steps = True
    gather_kinds: tuple[str, ...] = ("shard",)

    def __init__(self, rank: Rank, root: nn.Module, runs_here: Callable[[nn.Module], bool]) -> None:
        self._rank = rank
        self._root = root
        self._runs_here = runs_here
        self.mixes_dtypes = False
        self.holdings: dict[nn.Parameter, Holding] = {}
        self.shards: dict[nn.Parameter, Shard] = {}
        self._named: list[tuple[str, nn.Parameter]] = []
        self._versions: list[int] = []
        self._undo: list[Callable[[], None]] = []

    def place(
        self,
        local: Sequence[tuple[str, nn.Parameter]],
        make_real: MakeReal,
        load_kept: Callable[[], None],
    ) -> None:
        rank = self._rank
        half = rank.config.half_dtype
        dtypes = plan_castable(self._root, half)
        # Parameters without elements cannot be cut, and quantized weights have several tensors.
        uncut = [(name, p) for name, p in local if p.numel() == 0 or packed.is_packed(p)]
        kept = {p for _, p in uncut}
        local = [(name, p) for name, p in local if p not in kept]
        ranks = list(rank.groups["shard"])
        cutter = Cutter(
            local,
            ranks.index(rank.global_rank),
            len(ranks),
            half,
            rank.device,
            has_masters=rank.config.has_masters,
        )
        self.shards, self._named = cutter.shards, local
        self.holdings = {
            shard.parameter: _holding(name, shard)
            for (name, _), shard in zip(local, self.shards.values(), strict=True)
            if shard.master is not None
        }
        self.plan = plan_units(self._root, lambda p: p in self.shards, self._runs_here)
        self._order = [p for unit in self.plan.units for p in unit.parameters]
        make_real(lambda parameter: _take(rank, parameter, cutter))
        broadcast_from_first(rank, list(self._root.buffers()))
        cutter.check_all_cut()
        miss_gradients(self.holdings.values())
        for (name, parameter), shard in zip(local, self.shards.values(), strict=True):
            has_copy = shard.master is not None and shard.master.dtype != shard.piece.dtype
            master = shard.master if has_copy else None
            own(parameter, OwnPiece(name, shard.begin, shard.piece, master, self.after_load))
        if dtypes is not None:
            self._cast_rest(uncut, dtypes)
        self._install()
        load_kept()

    def _install(self) -> None:
        self.store = self._make_store()
        self._undo = gathering.install(self.store, self.plan, self._root)

    def join_groups(self) -> None:
        # The store of the failed step keeps its memory, as threads of the former groups may still
        # write there.
        self.close()
        for name, parameter in self._named:
            hide_values(name, parameter)
        self._install()

    def _cast_rest(self, uncut: Sequence[tuple[str, nn.Parameter]], dtypes: TrainingDtypes) -> None:
        """Casts tensors without shards: parameters, those of other ranks, buffers."""
        for name, parameter in uncut:
            if parameter.requires_grad and parameter.is_floating_point():
                self.holdings[parameter] = cast_with_master(
                    name, parameter, dtypes.of(parameter), self._rank.config.has_masters
                )
        dtypes.cast(self._root)
        self.mixes_dtypes = dtypes.mixes

    def _make_store(self) -> _C.ParameterStore:
        rank = self._rank
        config = rank.config
        positions = {parameter: i for i, parameter in enumerate(self._order)}
        return _C.ParameterStore(
            self._order,
            [self.shards[p].tensor for p in self._order],
            [[positions[p] for p in unit.parameters] for unit in self.plan.units],
            [unit.name for unit in self.plan.units],
            rank.comms.shard,
            across=rank.comms.shard_across,
            within=rank.comms.shard_within,
            control=rank.comms.shard_host,
            max_live_elements=config.sdp_max_live_parameters,
            persistence_threshold=config.sdp_param_persistence_threshold,
            faults=rank.board,
            ranks=list(rank.groups["shard"]),
            timeout_s=rank.timeout_s,
        )

    def thaw(self, name: str) -> None:
        refuse_thawed(name, "sharded_data_parallel_degree")

    # ---- gradients

    def bucket_bytes(self, cap_bytes: int) -> int:
        """Returns half the size, since two buckets are whole at a time.

        ``sdp_reduce_bucket_size`` can lower it. That key never raises it, because scripts pass its
        default, 2 GB a bucket, without intent.
        """
        own = self._rank.config.sdp_reduce_bucket_size * torch.float32.itemsize
        return min(cap_bytes // 2, own)

    def sharding(self, kind: str) -> _C.Sharding | None:
        return shards_of_gradients(
            self._rank,
            kind,
            _C.ShardLayout.PER_PARAMETER,
            # Ranks of a pipeline end their microbatches at different times.
            every_microbatch=self._rank.sizes["pp"] == 1,
        )

    # ---- steps

    def begin_step(self, num_microbatches: int, trains: bool) -> None:
        self._versions = [parameter._version for _, parameter in self._named]
        self.store.begin_pass(2 * num_microbatches + trains)

    def end_step(self) -> None:
        """
        Raises:
            ValueError: code of the step wrote into a parameter.
        """
        if self._rank.sizes["pp"] > 1:
            self.store.meet()
        self.store.end_pass()
        for (name, parameter), version in zip(self._named, self._versions, strict=True):
            if parameter._version != version:
                raise ValueError(
                    f"{_C.rank_prefix()}code of the step wrote into parameter '{name}' "
                    "(nn.Embedding with max_norm does, clamp_ and the like); with "
                    "sharded_data_parallel_degree that is a copy, and what was written is lost. "
                    "Write between steps into the parameters of optimizer.param_groups, or shard "
                    "the state of the optimizer only (shard_optimizer_state)"
                )

    def abandon_step(self) -> None:
        self.store.abandon_pass()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Gathers each parameter that is read in the block, and keeps it until the end.

        Collective: all ranks of the group read in one order.

        Raises:
            ValueError: some ranks run modules that others do not.
        """
        scope = self.store.enter([], is_forward=False)
        try:
            yield
        finally:
            scope.leave()
        if self._rank.sizes["pp"] == 1:  # else contexts of other microbatches are open
            self.store.meet()

    @contextlib.contextmanager
    def whole(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        wanted = set(parameters)
        units = [i for i, unit in enumerate(self.plan.units) if wanted & set(unit.parameters)]
        scope = self.store.enter(units, is_forward=False)
        try:
            yield
        finally:
            scope.leave()

    def after_update(self) -> None:
        self.store.mark_stale()

    # ---- values

    def settle(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def write(self, target: Tensor, value: Tensor) -> None:
        shard = shard_of(target)
        if shard is None:
            load_value(target, value)
            return
        shard.write(value)
        holding = holding_of(target)
        if holding is not None and value.dtype.itemsize < 4:
            reload_masters([holding])

    def after_load(self) -> None:
        self.store.mark_stale()

    def gathers(self, tensor: Tensor) -> bool:
        return tensor in self.shards

    def gathered(self, tensor: Tensor) -> Tensor:
        if tensor not in self.shards:
            return tensor.detach()
        index = next(i for i, p in enumerate(self._order) if p is tensor)
        return self.store.gather_one(index)

    def state(self, keep: bool = True) -> dict[str, Any]:
        whole: dict[nn.Parameter, Tensor] = {}
        result: dict[str, Any] = {}
        for key, value in self._root.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter) and value in self.shards:
                tensor = whole.get(value)
                if tensor is None:
                    tensor = self.gathered(value)
                    whole[value] = tensor if keep else tensor.new_empty(0)
                value = tensor
            elif isinstance(value, Tensor):
                value = packed.detached(value)
            if keep:
                result[key] = value
        return result

    # ---- end

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()

    def make_real(self) -> Storage:
        self.close()
        for parameter in self._order:
            disown(parameter)
            parameter.data = self.gathered(parameter)
            forget(parameter)
        self.shards.clear()
        self._named, self._versions = [], []
        whole = WholeParameters(self._rank, self._root)
        whole.holdings = self.holdings
        return whole


def _take(rank: Rank, parameter: nn.Parameter, cutter: Cutter) -> None:
    """Keeps a part of a parameter of this rank, and frees the rest.

    Collective over the replicas, with the values of the first one.

    Args:
        parameter: real parameter, on the device of this process.
    """
    kind = "dp_cp" if interval_of(parameter) is None else "rdp_cp"
    broadcast_from_first(rank, [parameter], kind)
    if parameter in cutter:  # parameters without elements and packed ones are not
        cutter.cut(parameter)


def _holding(name: str, shard: Shard) -> Holding:
    assert shard.master is not None
    holding = Holding(
        name, shard.parameter, shard.begin, shard.numel, piece=shard.piece, master=shard.master
    )
    attach(holding)
    return holding
