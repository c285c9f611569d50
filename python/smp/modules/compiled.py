"""Finds, removes and restores what users have compiled with ``torch.compile``.

A compiled module is another module around the plain one (``torch.compile(module)``, with
``_orig_mod`` in the names of its parameters), or has a compiled call (``module.compile()``) or a
compiled ``forward``. All of these would be outside the library's wrappers of a forward, and would
trace them. So they are removed, and the requests are kept.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

COMPILED_CALL = "_compiled_call_impl"  # attribute of a module with a compiled call
PLAIN_FORWARD = "_torchdynamo_orig_callable"  # attribute of a compiled forward
_MAX_FRAMES = 16  # frames from a module to the compiled one around it


@dataclass(frozen=True)
class CompileRequest:
    """A user's request to compile a module.

    Attributes:
        backend: function that compiles a graph with example inputs.
        fullgraph: whether code that does not fit one graph is an error.
        dynamic: argument of `torch.compile`.
    """

    backend: Callable[..., Any]
    fullgraph: bool
    dynamic: bool | None


def request_of(*args: Any, **kwargs: Any) -> CompileRequest | None:
    """Returns the request of arguments of `torch.compile`; None with ``disable=True``."""
    import torch

    wrapper: Any = torch.compile(nn.Identity(), *args, **kwargs)
    return _of_wrapper(wrapper)


def optimized_module_class() -> type[nn.Module] | None:
    """Returns the class of compiled modules, or None while the compiler is not imported."""
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    return getattr(eval_frame, "OptimizedModule", None)


def plain(module: Any) -> Any:
    """Returns the plain module of a compiled one, or the argument itself."""
    wrapper = optimized_module_class()
    while wrapper is not None and isinstance(module, wrapper):
        module = module._orig_mod
    return module


def take_compiled(
    root: nn.Module, requests: MutableMapping[nn.Module, CompileRequest]
) -> nn.Module:
    """Removes from a model what `torch.compile` has put around its modules.

    Args:
        root: a model; it may be compiled itself.
        requests: mapping that gets the requests that were found, by the plain module.

    Returns:
        the plain model.

    Raises:
        RuntimeError: the options of a compiled call cannot be read.
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
    """Removes compiled calls as `take_compiled` does, but replaces no modules."""
    for module in modules:
        attributes = module.__dict__
        call = attributes.get(COMPILED_CALL)
        if call is not None:
            _note(requests, module, _of_context(_context_behind(call)))
            del attributes[COMPILED_CALL]
        forward: Any = attributes.get("forward")
        if getattr(forward, PLAIN_FORWARD, None) is not None:
            context = _context_behind(forward)
            if context is None or not _is_own(module, getattr(forward, PLAIN_FORWARD)):
                continue  # a forward of another object, or a wrapper of the library
            _note(requests, module, _of_context(context))
            del attributes["forward"]


def compiled_around(module: nn.Module) -> nn.Module | None:
    """Returns the compiled module around this one, if the running call comes from it."""
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
    """Returns the request behind a compiled module."""
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
            # In some releases one of the objects on the way to the backend has the option.
            fullgraph = fullgraph or getattr(backend, "_one_graph", False)
            backend = getattr(backend, name)
    return CompileRequest(backend, bool(fullgraph), getattr(context, "_dynamic", None))


def _context_behind(function: Any) -> Any:
    """Returns the object of PyTorch that made a compiled function."""
    function = getattr(function, "__func__", function)
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars if code is not None else (), cells, strict=False):
        with contextlib.suppress(ValueError):  # not assigned yet
            if name == "self" and hasattr(cell.cell_contents, "callback"):
                return cell.cell_contents
    return None


def _is_own(module: nn.Module, function: Any) -> bool:
    """Returns whether a function is the forward that the class of a module gives it."""
    return (
        getattr(function, "__self__", None) is module
        and getattr(function, "__func__", None) is type(module).forward
    )
