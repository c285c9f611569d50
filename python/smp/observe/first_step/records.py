"""Records outputs of modules in the first microbatch, call by call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp.modules.flat import is_cache
from smp.modules.forwards import Forward, WrapperKind, wrap_forward
from smp.observe.first_step.sketch import is_plain, sketch

#: index of a module, and number of its call
Call = tuple[int, int]


def leaves_of(value: Any) -> list[Any]:
    """Returns the leaves of an output; attention caches stay whole."""
    return pytree.tree_leaves(value, is_leaf=is_cache)


def may_record(module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule)


def is_compiled(module: nn.Module) -> bool:
    """Returns whether the forward of a module is a function made by torch.compile."""
    return hasattr(module.forward, "_torchdynamo_orig_callable")


class Records:
    """Sketches of the outputs of modules, in the order in which they returned.

    Args:
        wanted: function that returns whether a call that begins now counts.
    """

    def __init__(self, wanted: Callable[[], bool] = lambda: True) -> None:
        self._wanted = wanted
        self._num_calls: dict[int, int] = {}
        self.sketches: dict[Call, list[Tensor | None]] = {}
        #: the first call that returned a tensor, by id; the tensor is kept so that the id stays
        self._makers: dict[int, tuple[Call, int, Tensor]] = {}
        self.keeps_makers = False

    def around(self, idx: int, forward: Forward) -> Forward:
        """Wraps the forward of a module to record its output."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(*args, **kwargs)
            # Calls that a checkpoint repeats in backward do not count.
            if torch._C._current_graph_task_id() != -1 or not self._wanted():
                return forward(*args, **kwargs)
            result = forward(*args, **kwargs)
            self._note(idx, result)
            return result

        return functools.update_wrapper(recorded, forward)

    def _note(self, idx: int, result: Any) -> None:
        number = self._num_calls.get(idx, 0)
        self._num_calls[idx] = number + 1
        leaves = leaves_of(result)
        self.sketches[idx, number] = [sketch(x) if is_plain(x) else None for x in leaves]
        if self.keeps_makers:
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor) and id(leaf) not in self._makers:
                    self._makers[id(leaf)] = ((idx, number), position, leaf)

    def maker(self, tensor: Tensor) -> tuple[Call, int] | None:
        """Returns the call and the position of the output that is this tensor, or None."""
        found = self._makers.get(id(tensor))
        return None if found is None else found[:2]

    def forget_makers(self) -> None:
        self._makers.clear()

    def on_host(self) -> dict[Call, list[Tensor | None]]:
        """Returns the sketches by call, copied to host memory."""
        return {
            call: [None if s is None else s.cpu() for s in rows]
            for call, rows in self.sketches.items()
        }


def watch_modules(modules: Sequence[nn.Module], records: Records) -> Callable[[], None]:
    """Records the outputs of modules, inside all other wrappers of their forwards.

    Returns:
        function that undoes it.
    """
    undo = [
        wrap_forward(module, WrapperKind.RECORD, functools.partial(records.around, idx))
        for idx, module in enumerate(modules)
        if may_record(module)
    ]

    def undo_all() -> None:
        for function in undo:
            function()

    return undo_all
