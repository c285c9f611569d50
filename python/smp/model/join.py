"""Uneven numbers of batches over replicas: replicas without a batch shadow the others.

Torch's Join does the same for DistributedDataParallel (torch/distributed/algorithms/join.py). Here
ranks also exchange which of them are active, so that unequal peers of tensor parallelism are an
error and no hang, and optimizer states are brought up to date, too.

With `shard_optimizer_state` replicas without a batch also make updates; see `join_shards`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

import smp._C as _C
from smp import data_parallel
from smp.model.engine import Engine
from smp.model.join_shards import JoinShards
from smp.precision.holdings import master_of, reload_masters
from smp.storage.choose import lockstep_of
from smp.world import comm, runtime

# Next action of a replica, in the order of the maxima of an exchange: nothing any more, a backward
# outside of step functions, a step, a step that begins with equal buffers, a call on shards.
_OUT, _BACKWARD, _STEP, _SYNCING_STEP, _CALL = range(5)


def _first(active: Sequence[int]) -> int:
    return next(position for position, state in enumerate(active) if state)


class _Uneven:
    """A `join` of a model; see `DistributedModel.join`.

    Args:
        current: the runtime.
        engine: engine of the model.
        divide_by_all: whether replicas without a batch count in the mean.
        throw: whether to raise when a replica has run out.
    """

    def __init__(
        self, current: runtime.Runtime, engine: Engine, divide_by_all: bool, throw: bool
    ) -> None:
        self._engine = engine
        self._current = current
        self._rank = current.rank
        self._divide_by_all = divide_by_all
        self._throw = throw
        self._ranks = list(self._current.rank.groups["dp_cp"])
        self._last_active = [True] * len(self._ranks)
        self._weight = 1.0
        self._handles: list[RemovableHandle] = []
        self._backward = -1  # the last announced backward outside of step functions
        self._shards = JoinShards(self) if current.rank.sizes["shard"] > 1 else None
        current.wrapped.uneven = self._shards

    # ---- communication

    @property
    def engine(self) -> Engine:
        """Engine of the model."""
        return self._engine

    @property
    def current(self) -> runtime.Runtime:
        """The runtime."""
        return self._current

    @property
    def has_shadows(self) -> bool:
        """True if some replica had no batch in the last exchange."""
        return not all(self._last_active)

    def exchange_call(self) -> None:
        """Announces a call of `JoinShards`. Collective over the replicas."""
        self._exchange(_CALL)

    def send_to_shadows(self, content: Any) -> None:
        """Sends an object from the first replica that has a batch to those that have none."""
        first, active = self._peers()
        if self._rank.ranks["rdp_cp"] == first:
            for position, is_active in enumerate(active):
                if not is_active:
                    comm.send(content, position, comm.RankType.RDP_CP_RANK)

    def receive(self) -> Any:
        """Receives the object of `send_to_shadows`, on a replica without a batch."""
        return comm.recv_from(self._peers()[0], comm.RankType.RDP_CP_RANK)

    def _peers(self) -> tuple[int, list[bool]]:
        """Returns the first rank of those with the same slices that has a batch, and all flags."""
        by_rank = dict(zip(self._ranks, self._last_active, strict=True))
        active = [by_rank[rank] for rank in self._rank.groups["rdp_cp"]]
        return active.index(True), active

    # ---- on a replica that has a batch

    def announce(self, syncs_buffers: bool) -> int:
        """Announces that a training step begins here. Collective over the replicas.

        Args:
            syncs_buffers: whether the step begins with equal buffers.

        Returns:
            position of the first replica that has a batch.
        """
        return self._announce(_SYNCING_STEP if syncs_buffers else _STEP)

    def _announce(self, state: int) -> int:
        if self._shards is not None:
            self._shards.before_step()
        active = self._exchange(state)
        self._weight = len(active) / sum(map(bool, active))
        self._weigh()
        return _first(active)

    def end_step(self) -> None:
        """Sees an announced step end: gradients are reduced."""
        if self._shards is not None:
            self._shards.after_step()

    def watch(self, output: Any) -> None:
        """Announces the backward from this output if no step function does."""
        if self._engine.in_step() or not torch.is_grad_enabled():
            return
        if self._shards is not None:
            self._shards.refuse("a backward outside of a step function")
        if self._current.rank.sizes["tp_cp"] > 1:
            raise RuntimeError(
                f"{_C.rank_prefix()}with tensor or context parallelism the replicas inside of "
                "join() need a step function; decorate the function that runs forward and backward "
                "with @smp.step"
            )
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, grad: Tensor) -> None:
        backward: int = torch._C._current_graph_task_id()
        if self._engine.uneven is self and backward != self._backward:
            self._backward = backward
            self._announce(_BACKWARD)

    def _weigh(self) -> None:
        """Multiplies gradients by the number of all replicas over those that have a batch."""
        parts = self._engine.parts
        if self._divide_by_all or self._handles or parts is None:
            return
        self._handles = [
            parameter.register_hook(lambda grad: grad * self._weight)
            for _, parameter in parts.named_parameters()
            if parameter.requires_grad
        ]

    def close(self) -> None:
        """Ends the context."""
        self._engine.uneven = self._current.wrapped.uneven = None
        for handle in self._handles:
            handle.remove()

    # ---- on a replica without a batch

    def shadow(self) -> None:
        """Takes part in the steps of the others until none has a batch. Collective."""
        engine = self._engine
        if self._shards is not None:
            self._shards.begin_shadow()
        while any(active := self._exchange(_OUT)):
            if not engine.partitioned:
                raise RuntimeError(
                    f"{_C.rank_prefix()}this replica has no batch, and the model is not "
                    "partitioned yet; with pipeline parallelism give every replica at least one "
                    "batch inside of join(), or run a step before join()"
                )
            if max(active) == _CALL:
                assert self._shards is not None
                self._shards.make(*self.receive())
                continue
            before = engine.gradients.num_reductions
            self._shadow_step(_first(active), max(active))
            if self._shards is not None:
                self._shards.after_shadow_step()
            elif engine.gradients.num_reductions != before:
                self.drop_gradients()
        self._catch_up()

    def _shadow_step(self, first: int, state: int) -> None:
        """Takes part in a training step of other replicas, with nothing to add to it.

        Args:
            first: position of the replica whose buffers count.
            state: kind of the step of the others.
        """
        parts = self._engine.parts
        assert parts is not None
        if state == _SYNCING_STEP:
            data_parallel.broadcast_from_first(self._rank, list(parts.root.buffers()), first=first)
        if state >= _STEP and self._rank.ranks["pp"] == 0:
            weights = data_parallel.BatchWeights.absent(self._rank)
            weights.begin_exchange()
            weights.finish_exchange()
        self._engine.gradients.shadow_step()

    def drop_gradients(self) -> None:
        """Drops gradients of others, which this rank does not use for an update any more."""
        assert self._engine.parts is not None
        for _, parameter in self._engine.parts.named_parameters():
            parameter.grad = None
            master_of(parameter).grad = None

    def _exchange(self, state: int) -> list[int]:
        """Returns the next action of each replica, by position. Collective."""
        current = self._current
        group = current.rank.comms.dp_cp_control
        assert group is not None
        own = current.rank.ranks["dp_cp"]
        active = _C.agree_on_maxima(
            [state if i == own else _OUT for i in range(len(self._ranks))],
            group,
            what="exchange of who has a batch, in join()",
            faults=current.rank.board,
            ranks=self._ranks,
            timeout_s=current.rank.settings.timeout_s,
        )
        if not any(active):
            return active
        self._check_peers(active)
        if self._throw and not all(active):
            out = [
                rank for rank, is_active in zip(self._ranks, active, strict=True) if not is_active
            ]
            raise RuntimeError(
                f"{_C.rank_prefix()}ranks {out} have run out of batches while others have not, and "
                "join() was called with throw_on_early_termination=True"
            )
        self._last_active = [bool(flag) for flag in active]
        return active

    def _check_peers(self, active: Sequence[int]) -> None:
        by_rank = {rank: bool(state) for rank, state in zip(self._ranks, active, strict=True)}
        for peers in self._current.rank.grid.groups("tp_cp"):
            if len({by_rank[rank] for rank in peers if rank in by_rank}) > 1:
                out = [rank for rank in peers if not by_rank[rank]]
                raise RuntimeError(
                    f"{_C.rank_prefix()}ranks {out} have run out of batches, but others of their "
                    f"group {list(peers)}, over which modules or sequences are split, have not; "
                    "join() compensates for whole replicas only: give all ranks of the group the "
                    "same number of batches"
                )

    # ---- at the end

    def _catch_up(self) -> None:
        """Brings replicas that ran out early to the state of those that did not."""
        if not self.has_shadows:
            return
        current, parts = self._current, self._engine.parts
        assert parts is not None
        first, active = self._peers()
        local = [buffer for _, buffer in parts.named_buffers()]
        if self._shards is None:
            local = [parameter for _, parameter in parts.named_parameters()] + local
        data_parallel.broadcast_from_first(self._rank, local, "rdp_cp", first)
        if self._shards is not None:
            self._shards.catch_up(active[current.rank.ranks["rdp_cp"]])
            return
        reload_masters(self._engine.holdings.values())
        for optimizer in current.wrapped.optimizers:
            self._send_state(optimizer, active, first)

    def _send_state(self, optimizer: Any, active: Sequence[bool], first: int) -> None:
        own = self._current.rank.ranks["rdp_cp"]
        if own == first:
            state = optimizer.local_state_dict(gather_if_shard=False)
            for position, is_active in enumerate(active):
                if not is_active:
                    comm.send(state, position, comm.RankType.RDP_CP_RANK)
        elif not active[own]:
            optimizer.load_state_dict(comm.recv_from(first, comm.RankType.RDP_CP_RANK))


def _check(current: runtime.Runtime, engine: Engine) -> None:
    config = current.rank.config
    reasons = {
        f"ddp={config.ddp}": (not config.ddp, "there are no replicas to join; use ddp=True"),
        "deterministic_server=True": (
            config.orders_replicas and current.rank.sizes["pp"] > 1,
            "replicas follow the order of the first one, so all need the same number of batches",
        ),
    }
    reasons["layout_independent_dropout=True"] = (
        config.layout_independent_dropout,
        "each step numbers its samples over all ranks, so all of them need the same number of "
        "batches",
    )
    reasons["update_in_backward=True"] = (
        config.update_in_backward,
        "a replica without a batch would update as well, but has no call of optimizer.step()",
    )
    reasons[f"on_failure={config.on_failure!r}"] = (
        config.goes_on,
        "after a failure all replicas run a step again, so all of them need the same number of "
        "batches",
    )
    lockstep = lockstep_of(current.rank)
    if lockstep is not None and lockstep.is_forward:
        reason = f"{lockstep.reason}, so all of them need the same number of batches"
        reasons[f"{lockstep.key}={lockstep.value}"] = (True, reason)
    for key, (is_so, reason) in reasons.items():
        if is_so:
            raise ValueError(f"{_C.rank_prefix()}smp config: {key}: {reason}; or leave join() out")
    if current.wrapped.num_wrapped > 1:
        raise ValueError(
            f"{_C.rank_prefix()}join() is for one model, and {current.wrapped.num_wrapped} were "
            f"wrapped ({current.wrapped.candidates}); put them into one module"
        )
    if engine.uneven is not None:
        raise RuntimeError(f"{_C.rank_prefix()}join() was called inside of a join()")


@contextlib.contextmanager
def uneven_batches(
    current: runtime.Runtime, engine: Engine, *, divide_by_all: bool, throw: bool
) -> Iterator[None]:
    """Runs `DistributedModel.join` on a model's engine.

    Args:
        current: the runtime.
        engine: engine of the model.
        divide_by_all: whether replicas without a batch count in the mean.
        throw: whether to raise on all ranks when a replica has run out.
    """
    _check(current, engine)
    if current.rank.sizes["dp_cp"] == 1:
        yield
        return
    uneven = _Uneven(current, engine, divide_by_all, throw)
    engine.uneven = uneven
    with current.rank.reporting("join()"):
        try:
            yield
            uneven.shadow()
        finally:
            uneven.close()
