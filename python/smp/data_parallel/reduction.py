"""Connects parameters and the data-parallel group to the reducer of the C++ core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from smp import _C, runtime


def make_records(
    parameters: Sequence[tuple[str, nn.Parameter]],
    divisor: float,
    ties: Mapping[str, Sequence[str]] | None = None,
) -> list[_C.ParameterRecord]:
    """Records of parameters that this rank holds whole.

    Args:
        parameters: names in the whole model, each parameter once, in one order on all
            data-parallel ranks.
        divisor: of the gradient summed over these ranks; their number for a mean.
        ties: further names of the same parameter, by name.
    """
    others = ties or {}
    return [
        _C.ParameterRecord(
            index,
            name,
            list(parameter.shape),
            parameter.dtype,
            divisor=divisor,
            ties=list(others.get(name, ())),
        )
        for index, (name, parameter) in enumerate(parameters)
    ]


def make_reducer(
    parameters: Sequence[tuple[str, nn.Parameter]],
    communicator: _C.Communicator | None,
    *,
    bucket_cap_bytes: int,
    overlap: bool,
    average: bool,
    passes_per_reduction: int,
    ties: Mapping[str, Sequence[str]] | None = None,
) -> _C.Reducer:
    """The reducer of this rank's parameters; takes over their gradients from here on.

    Collective over the data-parallel group.

    Args:
        parameters: names in the whole model and parameters that require a gradient, in their
            final place.
        communicator: of the data-parallel group; None for a group of one.
        bucket_cap_bytes: size of a bucket.
        overlap: reduce buckets while backward goes on.
        average: divide by the number of microbatches.
        passes_per_reduction: steps whose gradients are accumulated per reduction.
        ties: further names of a parameter, by name.

    Raises:
        ValueError: on every rank, when the ranks have different parameters or options.
    """
    current = runtime.current()
    num_ranks = 1 if communicator is None else communicator.size
    return _C.Reducer(
        [parameter for _, parameter in parameters],
        make_records(parameters, num_ranks, ties),
        communicator,
        faults=current.board,
        dp_ranks=list(current.groups["dp"]),
        bucket_cap_bytes=bucket_cap_bytes,
        overlap=overlap,
        average_over_microbatches=average,
        passes_per_reduction=passes_per_reduction,
        timeout_s=current.settings.timeout_s,
    )


def agree_on_maxima(communicator: _C.Communicator, values: Sequence[int], what: str) -> list[int]:
    """The largest of each value over the data-parallel group. Collective over it.

    Args:
        communicator: of the group.
        values: as many on each rank.
        what: words for errors.
    """
    current = runtime.current()
    return _C.agree_on_maxima(
        values,
        communicator,
        device=str(current.device),
        what=what,
        faults=current.board,
        ranks=list(current.groups["dp"]),
        timeout_s=current.settings.timeout_s,
    )


def broadcast_initial(communicator: _C.Communicator | None, tensors: Sequence[Tensor]) -> None:
    """Overwrites ``tensors`` with those of the first data-parallel rank.

    Collective over the data-parallel group; the lists agree in order, shapes and dtypes. Used for
    parameters and buffers after partition, and for buffers before a step.

    Args:
        communicator: of the group; None for a group of one.
        tensors: any dtypes and strides.
    """
    if communicator is None or not tensors:
        return
    current = runtime.current()
    _C.broadcast_coalesced(
        list(tensors),
        communicator,
        0,
        faults=current.board,
        ranks=list(current.groups["dp"]),
        timeout_s=current.settings.timeout_s,
    )
