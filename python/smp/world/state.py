"""Global state that user code reads as `smp.state`."""

from __future__ import annotations

from smp.config.schema import Config
from smp.world import runtime
from smp.world.wrapped import module_manager


class State:
    """Global state that user code reads as `smp.state`."""

    def __init__(self) -> None:
        self.module_manager = module_manager

    @property
    def cfg(self) -> Config | None:
        """Effective configuration, one attribute per key; None before `init`."""
        current = _run()
        return None if current is None else current.rank.config

    @property
    def param_name_to_index_tp_group(self) -> list[dict[str, int]]:
        """Indices, for each tp_rank, of the optimizer's parameters by their names in the model.

        The ranks of a tensor-parallel group have the same names. Empty before an optimizer is
        wrapped; of several optimizers the last one counts.
        """
        current = _run()
        if current is None or current.wrapped.optimizer is None:
            return []
        indices = current.wrapped.optimizer.param_name_to_index()
        return [dict(indices) for _ in range(current.rank.sizes["tp"])]

    @property
    def param_index_to_name_tp_group(self) -> list[dict[int, str]]:
        """The first name, for each tp_rank, of each of the optimizer's parameters, by index."""
        return [
            {index: name for name, index in reversed(indices.items())}
            for indices in self.param_name_to_index_tp_group
        ]


def _run() -> runtime.Runtime | None:
    return runtime.current() if runtime.is_initialized() else None


state = State()
