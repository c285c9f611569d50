"""Records results of modules by microbatch, and the modules that draw random numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from smp.modules.flat import is_cache
from smp.modules.forwards import Forward, WrapperKind, wrap_forward
from smp.observe.verification.rows import Row, row_of

#: microbatch, name of a module, and number of its call in the microbatch
Call = tuple[int, str, int]
#: results by call, in the order in which modules returned; None for values without numbers
Rows = dict[Call, list[Row | None]]
#: words for each rank, and results of modules that it ran
Runs = list[tuple[str, Rows]]


def leaves_of(value: Any) -> list[Any]:
    """Returns the leaves of an output; attention caches stay whole."""
    return pytree.tree_leaves(value, is_leaf=is_cache)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether the forward of a module is a function made by torch.compile."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


class ModuleRecorder:
    """The recorder of the results of some modules in one process.

    Args:
        microbatch: function that returns the microbatch of a call that begins now; None: the call
            does not count.
        notes_draws: record which modules draw random numbers; only where one thread runs at a time.

    Attributes:
        rows: results of modules.
        draws: modules that drew random numbers; inner ones first.
    """

    def __init__(self, microbatch: Callable[[], int | None], notes_draws: bool = False) -> None:
        self._microbatch = microbatch
        self._notes_draws = notes_draws
        self._num_calls: dict[tuple[int, str], int] = {}
        self.rows: Rows = {}
        self.draws: dict[str, None] = {}

    def watch(self, modules: Sequence[nn.Module], names: Sequence[str]) -> Callable[[], None]:
        """Records the results of modules, inside all other wrappers of their forwards.

        Returns:
            function that undoes it.
        """
        undo = [
            wrap_forward(module, WrapperKind.RECORD, functools.partial(self._around, name))
            for module, name in zip(modules, names, strict=True)
            if not isinstance(module, torch.jit.ScriptModule)
        ]

        def undo_all() -> None:
            for function in undo:
                function()

        return undo_all

    def _around(self, name: str, forward: Forward) -> Forward:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            # Calls that a checkpoint repeats in backward do not count.
            is_repeated = torch._C._current_graph_task_id() != -1
            mb = None if torch.compiler.is_compiling() or is_repeated else self._microbatch()
            if mb is None:
                return forward(*args, **kwargs)
            before = torch.get_rng_state() if self._notes_draws else None
            result = forward(*args, **kwargs)
            number = self._num_calls.get((mb, name), 0)
            self._num_calls[mb, name] = number + 1
            self.rows[mb, name, number] = [row_of(leaf) for leaf in leaves_of(result)]
            if before is not None and not torch.equal(before, torch.get_rng_state()):
                self.draws.setdefault(name)
            return result

        return functools.update_wrapper(recorded, forward)

    def take(self) -> Rows:
        """Returns the rows on the host, and clears them."""
        rows, self.rows = self.rows, {}
        self._num_calls.clear()
        return {
            call: [None if row is None else row.on_host() for row in own]
            for call, own in rows.items()
        }
