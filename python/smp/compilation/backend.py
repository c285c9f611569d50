"""The compiler behind a request, set so that a compiled module is the module in eager mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from smp.modules.compiled import CompileRequest, request_of


class SteadyBackend:
    """Another backend under settings that hold while it compiles, and for what it has compiled.

    Random numbers are drawn as in eager mode, since a checkpointed module may be computed in one
    way first and in the other one again. Backward is compiled with its forward: a failure there is
    one before anything has run, and modules are compiled in the thread whose turn it is.

    Args:
        inner: gets a graph and example inputs.
    """

    def __init__(self, inner: Callable[..., Any]) -> None:
        self._inner = inner

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor

        with contextlib.ExitStack() as stack:
            if hasattr(functorch, "force_non_lazy_backward_lowering"):
                stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
            stack.enter_context(inductor.patch(fallback_random=True))
            return self._inner(graph, inputs)

    def __eq__(self, other: object) -> bool:
        """Modules of one class share what is compiled where their backends are equal."""
        return isinstance(other, SteadyBackend) and bool(self._inner == other._inner)

    def __hash__(self) -> int:
        return hash(SteadyBackend)


def stage_request() -> CompileRequest:
    """How the library compiles by itself: one graph per module, for the shapes that it gets."""
    request = request_of(fullgraph=True, dynamic=False)
    assert request is not None
    return request


def compile_forward(
    forward: Callable[..., Any], request: CompileRequest, fullgraph: bool
) -> Callable[..., Any]:
    """The compiled form of the forward of a module.

    Args:
        forward: of one module.
        request: backend and shapes.
        fullgraph: raise instead of making several graphs.
    """
    from torch._functorch import config as functorch

    # A schedule may run a backward in two parts, which keeps the graph in the first one. PyTorch
    # asks for this where it compiles and where it runs, so it is set for the process.
    functorch.donated_buffer = False
    compiled: Callable[..., Any] = torch.compile(
        forward,
        backend=SteadyBackend(request.backend),
        fullgraph=fullgraph,
        dynamic=request.dynamic,
    )
    return compiled


def prepare_threads() -> None:
    """Lets several threads compile, one after the other; called in the thread of the script.

    Without a CUDA device, the first thread that makes tensors without memory registers an object of
    its own as the device guard of the process. Contexts of a step compile in threads that end
    before the process, and the next one would use what is gone.
    """
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet") and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def is_operator(module: nn.Module) -> bool:
    """A module of torch.nn without others inside: one operator, of which the compiler makes the
    same."""
    return type(module).__module__.startswith("torch.nn.") and not module._modules
