"""Connects parameters and the data-parallel group to the reducer of the C++ core."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.data_parallel.batch_weights import num_batches
from smp.data_parallel.comm_hook import CommHook, hooked
from smp.modules import packed
from smp.modules.training_dtypes import training_dtype
from smp.tensor_parallel.sharding import PackedInterval, interval_of, placement_of, whole_shape
from smp.world.rank import Rank


@dataclass(frozen=True)
class Reduction:
    """The way in which several ranks' gradients of a parameter are combined.

    Attributes:
        kind: group over which the gradient is summed, "dp_cp" or "rdp_cp".
        divisor: divisor of the sum, beside the number of batches that the replicas read.
    """

    kind: str
    divisor: float


def reduction_of(rank: Rank, parameter: Tensor) -> Reduction:
    """Returns how a parameter's gradient is averaged (docs/design/tensor_parallelism.md).

    Parameters of distributed modules see the samples of the whole tensor-parallel group. With own
    batches their gradients are sums over its ranks' losses; with a prescaled batch they belong to
    one loss that all its ranks share. Ranks that share the sequences of one batch have a loss each,
    and the batch's gradients are the mean of theirs.
    """
    sizes = rank.sizes
    placement = placement_of(parameter)
    if placement is None or sizes["tp"] == 1:
        return Reduction("dp_cp", sizes["dp_cp"] / num_batches(rank))
    return Reduction("dp_cp" if placement.partial else "rdp_cp", float(sizes["cp"]))


def by_kind(
    rank: Rank,
    parameters: Sequence[tuple[str, nn.Parameter]],
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Returns parameters with their names, by the kind of the group that sums their gradients.

    The result has every kind of this run, because all ranks of a group have to make a reducer.
    """
    kinds = ("dp_cp", "rdp_cp") if rank.sizes["tp"] > 1 else ("dp_cp",)
    return {
        kind: [item for item in parameters if reduction_of(rank, item[1]).kind == kind]
        for kind in kinds
    }


def make_records(
    parameters: Sequence[tuple[str, nn.Parameter]],
    reductions: Sequence[Reduction],
    ties: Mapping[str, Sequence[str]] | None = None,
    half: torch.dtype | None = None,
) -> list[_C.ParameterRecord]:
    """Returns records of parameters, in their order.

    Args:
        parameters: names in the whole model, each parameter once, in one order on all ranks of
            their group.
        reductions: reduction of each parameter, all over one group.
        ties: further names of the same parameter, by name.
        half: dtype of floating parameters in training, unless they are kept wider; their gradients
            are added up in float32 then. None: parameters keep their dtypes.
    """
    others = ties or {}
    records = []
    for index, ((name, parameter), reduction) in enumerate(
        zip(parameters, reductions, strict=True)
    ):
        interval = interval_of(parameter)
        if isinstance(interval, PackedInterval):
            interval = interval.counted()
        is_cast = half is not None and parameter.is_floating_point()
        records.append(
            _C.ParameterRecord(
                index,
                name,
                whole_shape(parameter),
                training_dtype(parameter, half)
                if half is not None and is_cast
                else parameter.dtype,
                divisor=reduction.divisor,
                interval=interval,
                ties=list(others.get(name, ())),
                group=_C.ReductionGroup.DP if reduction.kind == "dp_cp" else _C.ReductionGroup.RDP,
                accumulation_dtype=torch.float32 if is_cast else None,
            )
        )
    return records


def records_of(
    rank: Rank,
    parameters: Sequence[tuple[str, nn.Parameter]],
    ties: Mapping[str, Sequence[str]] | None = None,
) -> list[_C.ParameterRecord]:
    """Returns the records that the reducer of these parameters, all of one kind, has."""
    reductions = [reduction_of(rank, parameter) for _, parameter in parameters]
    return make_records(parameters, reductions, ties, rank.config.half_dtype)


def shards_of_gradients(
    rank: Rank,
    kind: str,
    layout: _C.ShardLayout,
    *,
    every_microbatch: bool = False,
) -> _C.Sharding:
    """Returns the way in which gradients of a kind are reduced into shards.

    Args:
        rank: rank of this process; some ranks hold one copy of a sharded state together.
        kind: "dp_cp" or "rdp_cp". The former includes the tp groups, over which gradients are
            summed last, when they have the size of a shard.
        layout: assignment of elements to ranks.
        every_microbatch: whether to reduce after each microbatch instead of after the last one.
    """
    comms = rank.comms
    if rank.sizes["tp"] > 1 and kind == "dp_cp":
        shard, further = comms.whole_shard_reduce, [comms.whole_replica, comms.whole_tp]
    else:
        shard, further = comms.shard_reduce, [comms.replica]
    assert shard is not None
    return _C.Sharding(
        layout,
        shard,
        further=[group for group in further if group is not None],
        every_microbatch=every_microbatch,
    )


def make_reducers(
    rank: Rank,
    parameters: Sequence[tuple[str, nn.Parameter]],
    *,
    target_of: Callable[[nn.Parameter], Tensor],
    sharding_of: Callable[[str], _C.Sharding | None],
    bucket_cap_bytes: int,
    overlap: bool,
    average: bool,
    passes_per_reduction: int,
    ties: Mapping[str, Sequence[str]] | None = None,
    hook: CommHook | None = None,
    apply: Callable[[str, int], None] | None = None,
) -> list[_C.Reducer]:
    """Makes the reducers of this rank's parameters, one per group; they take over the gradients.

    Collective over the data-parallel group.

    Args:
        rank: rank of this process.
        parameters: names in the whole model and parameters that require a gradient, in their
            final place.
        target_of: the tensor whose ``.grad`` gets the gradient of a parameter.
        sharding_of: returns how gradients of a kind, "dp_cp" or "rdp_cp", become shards; None: they
            stay whole.
        bucket_cap_bytes: size of a bucket in bytes.
        overlap: whether to reduce buckets while backward goes on.
        average: whether to divide by the number of microbatches.
        passes_per_reduction: steps whose gradients are accumulated per reduction.
        ties: further names of a parameter, by name.
        hook: sums and averages gradients in place of the reducers, if there are several replicas.
        apply: gets the kind and the index of each bucket as soon as it was summed, and uses up its
            gradients, which are dropped then; None: gradients stay until the next step.

    Raises:
        ValueError: on every rank, when the ranks have different parameters or options.
    """
    comms = rank.comms
    communicators = {"dp_cp": comms.dp_cp, "rdp_cp": comms.rdp_cp}
    hosts = {"dp_cp": comms.dp_cp_host, "rdp_cp": comms.rdp_cp_host}
    reducers = []
    for kind, own in by_kind(rank, parameters).items():
        group, records = communicators[kind], records_of(rank, own, ties)
        connect = None
        if hook is not None and group is not None:
            group, connect = hooked(group, hook)
            alone = [Reduction(kind, 1.0)] * len(own)
            records = make_records(own, alone, ties, rank.config.half_dtype)
        reducer = _C.Reducer(
            [parameter for _, parameter in own],
            records,
            group,
            targets=[target_of(parameter) for _, parameter in own],
            sharding=sharding_of(kind),
            apply=None if apply is None else functools.partial(apply, kind),
            control=hosts[kind],
            faults=rank.board,
            dp_ranks=list(rank.groups[kind]),
            bucket_cap_bytes=bucket_cap_bytes,
            overlap=overlap,
            average_over_microbatches=average and connect is None,
            num_batches=1 if connect is not None else num_batches(rank),
            passes_per_reduction=passes_per_reduction,
            expects_one_per_microbatch=rank.sizes["pp"] == 1,
            timeout_s=rank.timeout_s,
        )
        if connect is not None:
            connect(reducer, [parameter for _, parameter in own], bucket_cap_bytes)
        reducers.append(reducer)
    return reducers


def gather_numbers(
    rank: Rank, communicator: _C.Communicator, values: Sequence[float], what: str
) -> list[list[float]]:
    """Returns the numbers of each rank of the data-parallel group. Collective over it.

    Args:
        rank: rank of this process.
        communicator: communicator of the group for host tensors.
        values: values of this rank; every rank gives the same number of them.
        what: words for errors.
    """
    return _C.gather_host_numbers(
        list(values),
        communicator,
        what=what,
        faults=rank.board,
        ranks=list(rank.groups["dp_cp"]),
        timeout_s=rank.timeout_s,
    )


def broadcast_from_first(
    rank: Rank, tensors: Sequence[Tensor], kind: str = "dp_cp", first: int = 0
) -> None:
    """Overwrites ``tensors`` with those of the first rank of the group, or of another one.

    Collective over the group; the lists agree in order, shapes and dtypes. Used for parameters and
    buffers after partition, and for buffers before a step.

    Args:
        rank: rank of this process.
        tensors: tensors of any dtypes and strides.
        kind: "dp_cp", or "rdp_cp" for slices, which only these ranks share.
        first: position in the group of the rank whose values are sent.
    """
    if not tensors or rank.sizes[kind] == 1 or rank.is_alone:
        return
    is_of_slices = kind == "rdp_cp" and rank.sizes["tp"] > 1
    communicator = rank.comms.rdp_cp if is_of_slices else rank.comms.dp_cp
    assert communicator is not None
    _C.broadcast_coalesced(
        [part for tensor in tensors for part in packed.parts_of(tensor).values()],
        communicator,
        first,
        faults=rank.board,
        ranks=list(rank.groups[kind]),
        timeout_s=rank.timeout_s,
    )
