"""The forward of one compiled module, and what it does where it cannot be compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from smp.compilation.backend import compile_forward, stage_request
from smp.compilation.units import Unit, has_hooks, is_waiting_only
from smp.modules.flat import is_cache
from smp.modules.forwards import Forward, Lifted
from smp.modules.tracing import is_tracing
from smp.pipeline import RemoteTensor, localize
from smp.pipeline.callee import ValueWatch
from smp.storage.watched import Watched, watched_parameters


class Owner(Protocol):
    """What a compiled forward tells."""

    def is_settled(self) -> bool: ...

    def choose_anew(self) -> None: ...

    def leave(self, unit: Unit, reason: str) -> None: ...

    def cannot_compile(self, unit: Unit, reason: str, parts_too: bool) -> None: ...


class CompiledForward:
    """Takes the place of the forward of a module.

    Args:
        unit: the module.
        forward: its own.
        owner: of all compiled modules of the model.
    """

    def __init__(self, unit: Unit, forward: Forward, owner: Owner) -> None:
        self._unit = unit
        self._forward = forward
        self._owner = owner
        self._inside = [part for part in unit.module.modules() if part is not unit.module]
        self._request = unit.request or stage_request()
        # Part of what the user has compiled, or chosen by the library: whole graphs, or the parts.
        self._is_strict = not unit.is_whole or self._request.fullgraph
        self._compiled = compile_forward(forward, self._request, fullgraph=True)
        self._several: Callable[..., Any] | None = None  # of several graphs
        self._bare = _Bare(unit.module, self._inside)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._has_to_be_eager(args, kwargs):
            return self._forward(*args, **kwargs)
        if _holds(RemoteTensor, args, kwargs):
            args, kwargs = pytree.tree_map_only(RemoteTensor, localize, (args, kwargs))
        if torch._C._len_torch_dispatch_stack() == 0:
            return self._run(args, kwargs)
        # One graph reads no values, which is what is looked for.
        with _disable_current_modes():
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._several is not None:
            with self._bare:
                return self._several(*args, **kwargs)
        failure: tuple[str, bool]
        try:
            with self._bare:
                return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            limit = torch._dynamo.config.recompile_limit
            failure = f"it was compiled for {limit} kinds of arguments, which is the limit", False
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._unit.is_whole and self._request.fullgraph:
                raise
            if isinstance(error, torch._dynamo.exc.Unsupported) and not self._is_strict:
                # As PyTorch does: several graphs, and Python in between.
                self._several = compile_forward(self._forward, self._request, fullgraph=False)
                return self(*args, **kwargs)
            failure = describe(error), True
        # Nothing has run yet. What the module raises by itself is the user's to see first.
        result = self._forward(*args, **kwargs)
        self._owner.cannot_compile(self._unit, *failure)
        return result

    def _is_watched(self) -> bool:
        """Does somebody look at operators, other than for values that they read?"""
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
        if nn.modules.module._has_any_global_hook():
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
    """Inside, modules have neither watched parameters nor somebody who waits for these; what they
    would wait for is there."""

    def __init__(self, module: nn.Module, inside: list[nn.Module]) -> None:
        found = ((part, watched_parameters(part)) for part in (module, *inside))
        self._watched = [(part, watched) for part, watched in found if watched is not None]
        self._lifted = Lifted(part for part in inside if is_waiting_only(part))
        self._plain: list[tuple[nn.Module, Watched, dict[str, Any]]] = []

    def __enter__(self) -> None:
        self._plain = [(part, watched, watched.read_all()) for part, watched in self._watched]
        for part, _, plain in self._plain:
            part.__dict__["_parameters"] = plain
        self._lifted.lift()

    def __exit__(self, *_: object) -> None:
        self._lifted.put_back()
        for part, watched, plain in self._plain:
            part.__dict__["_parameters"] = watched
            watched.take_over(plain)
        self._plain = []


def _holds(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    return any(isinstance(leaf, kind) for leaf in leaves)


_WHERE = re.compile(r'File "([^"]+)", line (\d+)')
_EXPLANATION = re.compile(r"^\s*Explanation: (.+)$", re.MULTILINE)


def describe(error: BaseException) -> str:
    """What the compiler says, in one line: what is in the way, why, and where."""
    error = getattr(error, "inner_exception", error)  # of a backend
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
