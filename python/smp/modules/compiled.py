"""What users have asked of ``torch.compile`` for modules: found, taken off, and put anew.

A module that was compiled is another module around it (``torch.compile(module)``, with
``_orig_mod`` in the names of its parameters), or has a compiled call (``module.compile()``) or a
compiled ``forward``. All of these would stand outside of what the library puts around a forward,
and would trace it. So they are taken off, and what they ask for is kept.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

_MAX_FRAMES = 16  # from a module to the compiled one around it


@dataclass(frozen=True)
class CompileRequest:
    """How a module is to be compiled.

    Attributes:
        backend: gets a graph and example inputs.
        fullgraph: what cannot be one graph is an error.
        dynamic: as for `torch.compile`.
    """

    backend: Callable[..., Any]
    fullgraph: bool
    dynamic: bool | None


def request_of(*args: Any, **kwargs: Any) -> CompileRequest | None:
    """What arguments of `torch.compile` behind the module ask for; None with ``disable=True``."""
    import torch

    wrapper: Any = torch.compile(nn.Identity(), *args, **kwargs)
    return _of_wrapper(wrapper)


def optimized_module_class() -> type[nn.Module] | None:
    """What `torch.compile` makes of a module; None while nobody has imported the compiler."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(eval_frame, "OptimizedModule", None)


def plain(module: Any) -> Any:
    """The module that was compiled, for what `torch.compile` has made of it; else the same."""
    wrapper = optimized_module_class()
    while wrapper is not None and isinstance(module, wrapper):
        module = module._orig_mod
    return module


def take_compiled(
    root: nn.Module, requests: MutableMapping[nn.Module, CompileRequest]
) -> nn.Module:
    """Takes from a model what `torch.compile` has put around its modules.

    Args:
        root: a model; it may be compiled itself.
        requests: gets what was found, by the plain module.

    Returns:
        the plain model.

    Raises:
        RuntimeError: a compiled call does not tell how it was made.
    """
    root = _taken(root, requests)
    for module in list(root.modules()):
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _taken(child, requests)
    take_calls(root.modules(), requests)
    return root


def take_calls(
    modules: Iterable[nn.Module], requests: MutableMapping[nn.Module, CompileRequest]
) -> None:
    """As `take_compiled`, for compiled calls only: nothing takes another place in the model."""
    for module in modules:
        attributes = module.__dict__
        call = attributes.get("_compiled_call_impl")
        if call is not None:
            _note(requests, module, _of_context(_context_behind(call)))
            del attributes["_compiled_call_impl"]
        forward: Any = attributes.get("forward")
        if getattr(forward, "_torchdynamo_orig_callable", None) is not None:
            context = _context_behind(forward)
            if context is None or not _is_own(module, forward._torchdynamo_orig_callable):
                continue  # of another object, or in the place of the library
            _note(requests, module, _of_context(context))
            del attributes["forward"]


def compiled_around(module: nn.Module) -> nn.Module | None:
    """What `torch.compile` has made of this module, if the running call of it comes from there."""
    wrapper = optimized_module_class()
    frame = sys._getframe(1) if wrapper is not None else None
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name in ("__call__", "_call_impl", "_wrapped_call_impl"):
            caller = frame.f_locals.get("self")
            if wrapper is not None and isinstance(caller, wrapper) and plain(caller) is module:
                return caller
        frame = frame.f_back
    return None


def request_behind(compiled: nn.Module) -> CompileRequest | None:
    """What was asked for with a module that `torch.compile` has made."""
    return _of_wrapper(compiled)


def _taken(module: nn.Module, requests: MutableMapping[nn.Module, CompileRequest]) -> nn.Module:
    inner: nn.Module = plain(module)
    if inner is not module:
        _note(requests, inner, _of_wrapper(module))
    return inner


def _note(
    requests: MutableMapping[nn.Module, CompileRequest],
    module: nn.Module,
    request: CompileRequest | None,
) -> None:
    if request is not None:
        requests[module] = request


def _of_wrapper(module: nn.Module) -> CompileRequest | None:
    if plain(module) is module:
        return None
    return _of_context(module.dynamo_ctx)


def _of_context(context: Any) -> CompileRequest | None:
    if context is None:
        raise RuntimeError(
            "a module has a compiled call that does not tell its options in this release of "
            "PyTorch; wrap the plain module, and compile with DistributedModel.compile()"
        )
    callback = context.callback
    if not callable(callback):  # the compiler was switched off there
        return None
    backend: Any = callback
    fullgraph = getattr(context, "fullgraph", False)
    for name in ("_torchdynamo_orig_backend", "_torchdynamo_orig_callable"):  # by release
        while hasattr(backend, name):
            # Where the context does not tell, one of the objects on the way to the backend does.
            fullgraph = fullgraph or getattr(backend, "_one_graph", False)
            backend = getattr(backend, name)
    return CompileRequest(backend, bool(fullgraph), getattr(context, "_dynamic", None))


def _context_behind(function: Any) -> Any:
    """The object of PyTorch that a compiled function was made by."""
    function = getattr(function, "__func__", function)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars if code is not None else (), cells, strict=False):
        with contextlib.suppress(ValueError):  # not assigned yet
            if name == "self" and hasattr(cell.cell_contents, "callback"):
                return cell.cell_contents
    return None


def _is_own(module: nn.Module, function: Any) -> bool:
    """Is this the forward that the class of a module gives it?"""
    return (
        getattr(function, "__self__", None) is module
        and getattr(function, "__func__", None) is type(module).forward
    )
