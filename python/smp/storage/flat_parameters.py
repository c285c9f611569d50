"""Sharded optimizer state: parameters in flat memory, of which each rank updates a part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.data_parallel.reduction import by_kind, records_of, shards_of_gradients
from smp.modules.forwards import Forward, WrapperKind, may_be_lifted, wrap_forward
from smp.modules.materialize import cast
from smp.precision.holdings import Holding, attach
from smp.precision.shown_gradients import miss_gradients
from smp.storage.protocol import refuse_thawed
from smp.storage.watched import watch_parameters
from smp.storage.whole import WholeParameters
from smp.world.rank import Rank

_log = logging.getLogger("smp")
# The others have begun the last gathers before they left, so these only take time.
_FINISH_TIMEOUT_S = 60.0


class FlatParameters(WholeParameters):
    """Storage of trainable parameters as views of flat buckets.

    The buckets are those of the reducer, each cut into equal parts: rank r of the shard group gets
    the gradients of part r and updates these elements. After an update all parts are gathered,
    bucket by bucket in the order of the model, while other work goes on: a module waits for its
    buckets when its forward begins, other code when it reads a parameter from a module. Only code
    that has kept a reference to a parameter over an update does not wait.

    Args:
        rank: rank of this process.
        root: the user's model; parameters of other pipeline ranks are placeholders.
        bucket_cap_bytes: size of a gradient bucket.
        overlap: False: an update waits until all parts have arrived.

    Source: ZeRO stage 1 and 2 (arXiv:1910.02054); parts of flat buckets as in Megatron-LM's
    distributed optimizer.
    """

    def __init__(
        self,
        rank: Rank,
        root: nn.Module,
        *,
        bucket_cap_bytes: int,
        overlap: bool,
    ) -> None:
        super().__init__(rank, root)
        self._bucket_cap_bytes = bucket_cap_bytes
        # With copies of states no rank waits in an update for others, which may be lost.
        self._overlap = overlap or bool(rank.keepers)
        self._is_written = False
        self._is_behind = False  # parts that other ranks have updated are not here yet
        self._flats: list[Tensor] = []
        self._undo: list[Callable[[], None]] = []

    def _lay_out(self, local: Sequence[tuple[str, nn.Parameter]]) -> None:
        rank = self._rank
        flats = []  # position of the first parameter, memory and parameters of each bucket
        positions = {parameter: i for i, (_, parameter) in enumerate(local)}
        for own in by_kind(rank, [item for item in local if item[1].requires_grad]).values():
            for bucket in _C.plan_shards(
                records_of(rank, own),
                self._bucket_cap_bytes,
                rank.sizes["shard"],
                _C.ShardLayout.EQUAL_CUT,
            ):
                flat = self._lay_out_bucket(own, bucket, rank.ranks["shard"])
                inside = [own[held.record_idx][1] for held in bucket.holdings[0]]
                flats.append((min(positions[p] for p in inside), flat, inside))
        miss_gradients(self.holdings.values())
        flats.sort(key=lambda item: item[0])
        self._flats = [flat for _, flat, _ in flats]
        self._gathers = self._make_gathers()
        if self._overlap:
            bucket_of = {p: i for i, (_, _, inside) in enumerate(flats) for p in inside}
            self._install(self._root, bucket_of)

    def _make_gathers(self) -> _C.FlatGathers:
        rank = self._rank
        assert rank.comms.shard is not None
        return _C.FlatGathers(
            self._flats,
            rank.comms.shard,
            faults=rank.board,
            ranks=list(rank.groups["shard"]),
            timeout_s=rank.timeout_s,
        )

    def join_groups(self) -> None:
        # A gather of the last update may have failed, and a newcomer has taken part in none.
        if self._rank.gathers_later and self._gathers.pending:
            self._is_behind = True
        self._gathers, self._is_written = self._make_gathers(), True

    def _lay_out_bucket(
        self, own: Sequence[tuple[str, nn.Parameter]], bucket: _C.ShardedBucket, shard_rank: int
    ) -> Tensor:
        """Moves the parameters of a bucket into flat memory, one after the other."""
        first = own[bucket.holdings[0][0].record_idx][1]
        numel = bucket.shard_numel
        flat = torch.zeros(bucket.num_shards * numel, dtype=bucket.dtype, device=first.device)
        shard = flat.narrow(0, shard_rank * numel, numel)
        masters = shard
        if bucket.accumulation_dtype != bucket.dtype and self._rank.config.has_masters:
            masters = torch.zeros(numel, dtype=bucket.accumulation_dtype, device=first.device)
        places = {segment.record_idx: segment for segment in bucket.segments}
        for held in bucket.holdings[shard_rank]:
            name, parameter = own[held.record_idx]
            segment = places.get(held.record_idx)  # None: without elements
            offset = 0 if segment is None else segment.flat_offset
            values = parameter.detach()
            place = flat.narrow(0, offset, values.numel()).view(values.shape)
            place.copy_(values)
            part = values.reshape(-1).narrow(0, held.begin, held.numel)
            master, piece = (
                memory_.narrow(0, held.offset, held.numel) for memory_ in (masters, shard)
            )
            master.copy_(part)  # the values before the cast; or those after it once more
            if held.numel == values.numel():
                master, piece = master.view(values.shape), piece.view(values.shape)
            cast(parameter, bucket.dtype)
            parameter.data = place
            # `.data` gives it its own version counter, which gathers do not change.
            master_ = nn.Parameter(master.data)
            holding = Holding(name, parameter, held.begin, held.numel, piece, master_)
            attach(holding)
            self.holdings[parameter] = holding
        return flat

    def thaw(self, name: str) -> None:
        refuse_thawed(name, "shard_optimizer_state")

    def _written(self) -> None:
        self._is_written = True

    def begin_step(self, num_microbatches: int, trains: bool) -> None:
        super().begin_step(num_microbatches, trains)
        # By the script, on all ranks, whose masters may be rounded; or some were replaced.
        if self._is_written:
            self.after_update()

    # ---- gradients

    def sharding(self, kind: str) -> _C.Sharding | None:
        return shards_of_gradients(self._rank, kind, _C.ShardLayout.EQUAL_CUT)

    # ---- updates

    @property
    def num_gathers(self) -> int:
        """Number of buckets gathered so far."""
        return self._gathers.num_gathers

    @property
    def num_overlapped(self) -> int:
        """Number of gathers that were waited for only when their values were needed."""
        return self._gathers.num_overlapped

    def after_update(self) -> None:
        if self._rank.gathers_later:
            self._miss_others()
            return
        self._is_written = self._is_behind = False
        self._gathers.launch()
        if not self._overlap:
            self._gathers.wait_all()

    def _miss_others(self) -> None:
        """Notes that other ranks have updated parts that come with the next step only.

        Code that has kept a reference to a parameter sees NaN there.
        """
        self._is_written = self._is_behind = True
        for flat in self._flats:
            numel, position = flat.numel() // self._rank.sizes["shard"], self._rank.ranks["shard"]
            flat[: position * numel].fill_(torch.nan)
            flat[(position + 1) * numel :].fill_(torch.nan)

    def _refuse_reads(self) -> None:
        """Raises a RuntimeError, as the parts of others do not come before the next step."""
        raise RuntimeError(
            f"{self._rank.prefix}reading parameters after an update (shard_optimizer_state; code "
            "that lists them, as model.zero_grad(), does so) between two steps where a rank was "
            "lost, or in a process that takes the place of a lost one: parts that other ranks have "
            "updated come with the next step; read parameters after it, and use "
            "optimizer.zero_grad()"
        )

    def settle(self) -> None:
        self._gathers.wait_all()

    def finish(self) -> None:
        connections = self._rank.connections
        if not self._gathers.pending or connections is None or not connections.is_healthy:
            return
        try:
            self._gathers.finish(_FINISH_TIMEOUT_S)
        except RuntimeError as error:
            _log.warning(
                "%sparts of the parameters that other ranks have updated last did not come: %s",
                _C.rank_prefix(),
                error,
            )

    def _install(self, root: nn.Module, bucket_of: dict[nn.Parameter, int]) -> None:
        for module in root.modules():
            own = {
                name: bucket_of[parameter]
                for name, parameter in module._parameters.items()
                if parameter is not None and parameter in bucket_of
            }
            if own:
                needed = sorted(set(own.values()))
                self._undo.append(
                    wrap_forward(module, WrapperKind.PARAMETERS, self._waiting(needed))
                )
                self._undo.append(watch_parameters(module, own, self._wait_for))

    def _wait_for(self, flat_idx: int) -> None:
        if self._is_behind:
            self._refuse_reads()
        if self._gathers.pending:
            self._gathers.wait([flat_idx])

    def _waiting(self, needed: list[int]) -> Callable[[Forward], Forward]:
        def wrapper(forward: Forward) -> Forward:
            def run(*args: Any, **kwargs: Any) -> Any:
                if self._is_behind:
                    self._refuse_reads()
                if self._gathers.pending:
                    self._gathers.wait(needed)
                return forward(*args, **kwargs)

            return run

        return may_be_lifted(wrapper)

    def close(self) -> None:
        # While parts are being gathered, all users of the modules have to wait for them.
        while self._undo and not self._gathers.pending:
            self._undo.pop()()
