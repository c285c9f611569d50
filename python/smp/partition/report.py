"""The partition of a running model: explained, and kept as a file."""

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
    """Why the model is split as it is, in figures; ``print`` shows a table.

    Collective over all ranks: only the first one has traced the model and knows its costs, and all
    get what it says.

    Args:
        module: qualified name, as in ``named_modules()`` of the unwrapped model; the answer then
            says why it is where it is and what moving it to each other rank would cost.
        model: the `DistributedModel` that is meant; needed if there are several.

    Returns:
        per rank parameters, activations, peak memory, share of compute, transfers and load; bytes
        over each pair of ranks; without a trace parameters only.

    Raises:
        RuntimeError: the model is not partitioned yet, or none is named and there are several.
        ValueError: on every rank, if there is no such module.
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

    Collective over all ranks: the first one writes, and when the call returns the file is there.
    It may be edited; see ``docs/design/partition.md`` for its form.

    Args:
        path: of the file, on the host of the first rank.
        model: the `DistributedModel` that is meant; needed if there are several.

    Raises:
        RuntimeError: the model is not partitioned yet, or none is named and there are several.
        OSError: on every rank, if the file cannot be written.
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
        model = wrapped.model  # with several this raises and lists them
    decision: Decision | None = None if model is None else model._decision
    if decision is None:
        raise RuntimeError(
            f"{_C.rank_prefix()}{what}: no model is partitioned yet; wrap one in "
            "smp.DistributedModel and call a step function first, or use "
            "register_post_partition_hook"
        )
    return decision
