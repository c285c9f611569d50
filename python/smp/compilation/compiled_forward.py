"""Runs the forward of one module compiled, or in eager mode if it cannot be compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from smp._torch_releases import is_recompile_limit
from smp.compilation.backend import (
    LateFailure,
    compile_forward,
    max_variants,
    noted_failures,
    stage_request,
)
from smp.compilation.units import Unit, has_global_hooks, has_hooks, is_liftable
from smp.modules.flat import is_cache
from smp.modules.forwards import Forward, LiftableWrappers
from smp.modules.tables import TABLES, table_of
from smp.modules.tracing import is_tracing
from smp.pipeline import RemoteTensor, localize
from smp.pipeline.callee import ValueWatch


class Owner(Protocol):
    """The owner of compiled forwards, as they use it."""

    def is_settled(self) -> bool: ...

    def choose_anew(self) -> None: ...

    def leave(self, unit: Unit, reason: str) -> None: ...

    def cannot_compile(self, unit: Unit, reason: str, parts_too: bool) -> None: ...


class CompiledForward:
    """Replaces the forward of a module.

    Args:
        unit: the module.
        forward: forward of the module.
        owner: owner of all compiled forwards of the model.
    """

    def __init__(self, unit: Unit, forward: Forward, owner: Owner) -> None:
        self._unit = unit
        self._forward = forward
        self._owner = owner
        self._inside = [part for part in unit.module.modules() if part is not unit.module]
        self._request = unit.request or stage_request()
        # Units inside a user's compiled module, and the library's, are one graph, or else split.
        self._is_strict = not unit.is_whole or self._request.fullgraph
        self._compiled = compile_forward(forward, self._request, fullgraph=True)
        self._several: Callable[..., Any] | None = None  # code of several graphs
        self._bare = _Bare(unit.module, self._inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_to_be_eager(args, kwargs):
            return self._forward(*args, **kwargs)
        if _holds(RemoteTensor, args, kwargs):
            args, kwargs = pytree.tree_map_only(RemoteTensor, localize, (args, kwargs))
        if self._several is not None:
            return self._run_several(args, kwargs)
        if torch._C._len_torch_dispatch_stack() == 0:
            ran, result = self._run(args, kwargs)
        else:
            # A single graph reads no values, so the mode that looks for reads is not needed.
            with _disable_current_modes():
                ran, result = self._run(args, kwargs)
        return result if ran else self._run_eager(result, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
        """Returns (True, the result), or (False, the error)."""
        try:
            with self._bare:
                return True, self._compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            is_late = isinstance(error, LateFailure)
            if isinstance(error.__cause__, torch.OutOfMemoryError) and is_late:
                raise error.__cause__ from None
            if not is_late and self._unit.is_whole and self._request.fullgraph:
                raise
            if not is_late:
                error.__traceback__ = None  # frames would keep tensors alive
            return False, error

    def _run_eager(self, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs eagerly after a failure, so that the user sees the module's own errors first."""
        is_at_limit = is_recompile_limit(error)
        is_unsupported = isinstance(error, torch._dynamo.exc.Unsupported) and not is_at_limit
        if is_unsupported and not self._is_strict:
            # PyTorch's own way: several graphs, and Python in between.
            self._several = compile_forward(self._forward, self._request, fullgraph=False)
            return self(*args, **kwargs)
        result = self._forward(*args, **kwargs)
        if isinstance(error, LateFailure):
            # The compiled code may already have written to buffers and drawn numbers.
            assert error.__cause__ is not None
            raise error.__cause__
        # The compiled code had not run.
        self._owner.cannot_compile(
            self._unit,
            f"it was compiled for {max_variants()} kinds of arguments, which is the limit"
            if is_at_limit
            else describe(error),
            parts_too=not is_at_limit,
        )
        return result

    def _run_several(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._several is not None
        failures: list[Exception] = []
        try:
            with self._bare, noted_failures() as failures:
                return self._several(*args, **kwargs)
        finally:
            for error in failures:
                self._owner.leave(self._unit, f"in a part of it; {describe(error)}")

    def _is_watched(self) -> bool:
        """Returns whether a mode watches operators, other than for values that they read."""
        num_modes = torch._C._len_torch_dispatch_stack()
        if num_modes == 0:
            return False
        is_value_watch = isinstance(_get_current_dispatch_mode(), ValueWatch)
        return num_modes > 1 or not is_value_watch or self._several is not None

    def _has_to_be_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if (
            is_tracing()
            or self._is_watched()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return True
        if not self._owner.is_settled() or any(map(has_hooks, self._inside)):
            self._owner.choose_anew()
            return True
        if has_global_hooks():
            self._owner.leave(self._unit, "hooks are registered for all modules")
            return True
        if any(map(is_cache, args)) or any(map(is_cache, kwargs.values())):
            self._owner.leave(
                self._unit,
                "it is called with an attention cache, which is another one for each layer; set "
                "use_cache=False in the model's configuration",
            )
            return True
        return False


class _Bare:
    """Gives modules plain dictionaries of parameters and buffers, without waiting wrappers.

    Nothing has to be waited for inside the block: the parameters are there.
    """

    def __init__(self, module: nn.Module, inside: list[nn.Module]) -> None:
        found = ((part, key, table_of(part, key)) for part in (module, *inside) for key in TABLES)
        self._tables = [(part, key, table) for part, key, table in found if table is not None]
        self._lifted = LiftableWrappers(part for part in inside if is_liftable(part))
        self._plain: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        self._plain = [table.read_all() for _, _, table in self._tables]
        for (part, key, _), plain in zip(self._tables, self._plain, strict=True):
            part.__dict__[key] = plain
        self._lifted.lift()

    def __exit__(self, *_: object) -> None:
        self._lifted.put_back()
        for (part, key, table), plain in zip(self._tables, self._plain, strict=True):
            part.__dict__[key] = table
            table.take_over(plain)
        self._plain = []


def _holds(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, kind) for leaf in leaves)


_WHERE = re.compile(r'File "([^"]+)", line (\d+)')
_EXPLANATION = re.compile(r"^\s*Explanation: (.+)$", re.MULTILINE)


def describe(error: BaseException) -> str:
    """Returns a compiler's error in one line: the obstacle, the reason, and the place."""
    error = getattr(error, "inner_exception", error)  # the error of a backend
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [lines[0]] if lines else []
    explanation = _EXPLANATION.search(text)
    if explanation is not None:
        said.append(explanation[1].strip())
    places = _WHERE.findall(text.partition("from user code")[2])
    if places:
        said.append(f"({places[-1][0]}:{places[-1][1]})")
    return f"torch.compile: {type(error).__name__}: {' '.join(said)}"
