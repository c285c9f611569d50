"""Explains the partition of a running model, and saves it as a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import smp._C as _C
from smp.partition import partition_file
from smp.partition.explain import Explanation, explain
from smp.world import comm, runtime

if TYPE_CHECKING:
    from smp.partition.decision import Decision
    from smp.world.wrapped import Wrapped, WrappedModel


def explain_partition(module: str | None = None, model: WrappedModel | None = None) -> Explanation:
    """Returns why the model is split as it is, in figures; ``print`` shows a table.

    Collective over all ranks. Only the first rank has traced the model and measured its costs; all
    ranks receive its explanation.

    Args:
        module: qualified name, as in ``named_modules()`` of the unwrapped model; the explanation
            then has the reason for its place and the cost of moving it to each other rank.
        model: the `DistributedModel` that is meant; needed if there are several.

    Returns:
        parameters, activations, peak memory, share of compute, transfers and load per rank, and
        bytes over each pair of ranks; without a trace only parameters.

    Raises:
        RuntimeError: the model is not partitioned yet, or none is named and there are several.
        ValueError: there is no such module; every rank raises it.
    """
    current = runtime.current()
    decision = _decision("smp.explain_partition", current.wrapped, model)
    result: Explanation | str | None = None
    if current.rank.global_rank == 0:
        try:
            result = explain(decision, module)
        except ValueError as error:
            result = str(error).removeprefix(_C.rank_prefix())
    result = comm.allgather(result, comm.WORLD)[0]
    if isinstance(result, Explanation):
        return result
    raise ValueError(f"{_C.rank_prefix()}{result}")


def save_partition(path: str | Path, model: WrappedModel | None = None) -> None:
    """Writes the partition to a text file that the configuration key ``partition_file`` takes.

    Collective over all ranks: the first one writes, and the file exists when the call returns. It
    may be edited; see ``docs/design/partition.md`` for its form.

    Args:
        path: path of the file, on the host of the first rank.
        model: the `DistributedModel` that is meant; needed if there are several.

    Raises:
        RuntimeError: the model is not partitioned yet, or none is named and there are several.
        OSError: the file cannot be written; every rank raises it.
    """
    current = runtime.current()
    decision = _decision("smp.save_partition", current.wrapped, model)
    error: str | None = None
    if current.rank.global_rank == 0:
        try:
            partition_file.write(decision, path)
        except OSError as refused:
            error = str(refused)
    error = comm.allgather(error, comm.WORLD)[0]
    if error is not None:
        raise OSError(f"{_C.rank_prefix()}smp.save_partition: {error}")


def _decision(what: str, wrapped: Wrapped, model: WrappedModel | None) -> Decision:
    if model is None:
        model = wrapped.model  # with several models this raises and lists them
    decision: Decision | None = None if model is None else model._decision
    if decision is None:
        raise RuntimeError(
            f"{_C.rank_prefix()}{what}: no model is partitioned yet; wrap one in "
            "smp.DistributedModel and call a step function first, or use "
            "register_post_partition_hook"
        )
    return decision
