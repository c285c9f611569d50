"""Marks of users: `smp.partition` marks modules as they are made, `set_partition` afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

import smp._C as _C
from smp.config.schema import config_error
from smp.modules.creation import CreationMarks
from smp.world import runtime


class _OfContext(int):
    """The index of a context, still recognised after it was copied to a replacing module."""


_marks: CreationMarks[int] = CreationMarks()  # wishes of the user


def wish_of(module: nn.Module) -> int | None:
    """Returns the partition that `set_partition` gave a module, also for `auto_partition`."""
    mark = _marks.get(module)
    return None if isinstance(mark, _OfContext) else mark


def mark_of(module: nn.Module) -> int | None:
    """Returns the partition that the user wants for a module, if any."""
    return _marks.get(module)


def check_index(source: str, index: object, pp_size: int | None) -> int:
    """Returns a usable partition index.

    Args:
        source: function that the user called, or module that is meant; for messages.
        index: value that the user gave.
        pp_size: number of partitions; None when it is not known yet.

    Raises:
        ValueError: `index` is not an integer in ``[0, pp_size)``.
    """
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise config_error(source, index, "is not an integer >= 0", "pass the index of a partition")
    if pp_size is not None and index >= pp_size:
        raise config_error(
            source,
            index,
            f"is outside [0, {pp_size}), the partitions of pipeline_parallel_degree={pp_size}",
            f"use 0 to {pp_size - 1} or raise pipeline_parallel_degree",
        )
    return index


def _run() -> runtime.Runtime | None:
    return runtime.current() if runtime.is_initialized() else None


def _known_pp_size() -> int | None:
    current = _run()
    return None if current is None else current.rank.sizes["pp"]


@contextmanager
def partition(index: int) -> Iterator[None]:
    """Places modules that are created inside the context; used with ``auto_partition: False``.

    The innermost context wins. Modules created outside of all contexts are placed on
    ``default_partition``; modules without parameters follow their parent; the root module is on
    partition 0. With ``auto_partition: True`` contexts are ignored.

    Args:
        index: partition, in ``[0, pp_size())``. Before `smp.init` the upper bound is not known and
            is checked when the model is partitioned.

    Raises:
        ValueError: ``index`` is out of range.
    """
    with _marks.marking(_OfContext(check_index("partition", index, _known_pp_size()))):
        yield


def set_partition(module: nn.Module, index: int) -> None:
    """Places an existing module and everything below it; a later call overrides an earlier one.

    The function is called before the first step. With ``auto_partition: True`` the rest of the
    model is balanced around such modules. Their order may then differ from that of execution, at
    the cost of further visits of a rank. The root module is on partition 0 in any case, and each
    partition must get a module with parameters.

    Args:
        module: part of the model, before or after it is wrapped.
        index: partition, in ``[0, pp_size())``.

    Raises:
        ValueError: ``index`` is out of range, or ``module`` is not a module.
        RuntimeError: the model that holds ``module`` is partitioned already.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"{_C.rank_prefix()}set_partition: expected an nn.Module, got "
            f"{type(module).__name__}; call it once for each module of a list"
        )
    index = check_index("set_partition", index, _known_pp_size())
    if _is_partitioned(module):
        raise RuntimeError(
            f"{_C.rank_prefix()}set_partition: the model is partitioned already; call it before "
            "the first step"
        )
    for part in module.modules():
        _marks[part] = index


def _is_partitioned(module: nn.Module) -> bool:
    current = _run()
    if current is None or current.rank.sizes["pp"] == 1:
        return False
    return any(
        isinstance(model, nn.Module)
        and bool(getattr(model, "partitioned", False))
        and any(part is module for part in model.modules())
        for model in current.wrapped.models
    )
