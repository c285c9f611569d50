"""Sets up compilers such that a compiled module computes as in eager mode."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from smp._torch_releases import keep_device_guard, known
from smp.compilation.trial import is_local, try_out
from smp.modules.compiled import CompileRequest, request_of

_here = threading.local()


class LateFailure(Exception):
    """An error in a graph that has begun to run; its cause is the error itself."""


class SteadyBackend:
    """A backend that runs another one under settings for compiling, and tries out its results.

    Random numbers are drawn as in eager mode, since a checkpointed module may be computed in one
    way first and in the other way in its second run. Backward is compiled with its forward: it
    fails before anything has run, and modules are compiled in the thread whose turn it is. Graphs
    may be kept for another backward. Compiled code is tried before it runs.

    Args:
        inner: backend that compiles a graph with example inputs.
        is_strict: whether failures raise; else PyTorch's operators execute a graph that fails, and
            the failure is noted for `noted_failures`.
    """

    def __init__(self, inner: Callable[..., Any], is_strict: bool) -> None:
        self._inner = inner
        self._is_strict = is_strict

    def __call__(self, graph: Any, inputs: Any) -> Any:
        try:
            return self._steady(graph, self._compiled(graph, inputs))
        except (torch._dynamo.exc.SkipFrame, torch._dynamo.exc.RestartAnalysis):
            raise  # no failures
        except Exception as error:
            if self._is_strict:
                raise
            _note(error)
            return graph.forward

    def _compiled(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        from torch._functorch import config as functorch
        from torch._inductor import config as inductor

        options: dict[str, Any] = {
            "donated_buffer": False,
            "force_non_lazy_backward_lowering": True,
        }
        with functorch.patch(known(options, functorch)), inductor.patch(fallback_random=True):
            compiled: Callable[..., Any] = self._inner(graph, inputs)
            return compiled

    def _steady(self, graph: Any, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Returns compiled code that is tried before its first call."""
        is_tried = False

        def run(*inputs: Any) -> Any:
            nonlocal is_tried, compiled
            if not is_tried:
                try:
                    _try_out(graph, compiled, inputs)
                except Exception as error:
                    if self._is_strict:
                        raise
                    _note(error)
                    compiled = graph.forward
                is_tried = True
            if not self._is_strict:
                return compiled(*inputs)
            try:
                return compiled(*inputs)
            except Exception as error:
                raise LateFailure from error

        return run

    def __eq__(self, other: object) -> bool:
        """Compares backends: modules of one class share compiled code if these are equal."""
        return (
            isinstance(other, SteadyBackend)
            and self._is_strict == other._is_strict
            and bool(self._inner == other._inner)
        )

    def __hash__(self) -> int:
        return hash(SteadyBackend)


def _try_out(graph: Any, compiled: Callable[..., Any], inputs: Any) -> None:
    # A schedule may run a backward in two parts, which keeps the graph in the first one.
    if not (is_local(graph) and try_out(compiled, inputs)):
        from torch._functorch import config as functorch

        functorch.donated_buffer = False  # for the whole process, since this code has no note


@contextlib.contextmanager
def noted_failures() -> Iterator[list[Exception]]:
    """Runs parts of functions that cannot be compiled in eager mode, on this thread.

    Yields:
        a list that gets the errors of the compiler.
    """
    failures: list[Exception] = []
    before = getattr(_here, "failures", None)
    _here.failures = failures
    log = logging.getLogger("torch._dynamo.convert_frame")
    log.addFilter(_take_failure)
    try:
        with torch._dynamo.config.patch(suppress_errors=True):
            yield failures
    finally:
        _here.failures = before
        if before is None:
            log.removeFilter(_take_failure)


def _note(error: Exception) -> None:
    failures = getattr(_here, "failures", None)
    if failures is not None:
        failures.append(error)


def _take_failure(record: logging.LogRecord) -> bool:
    """Takes the compiler's log of a function in eager mode, since the library logs it itself."""
    error = record.exc_info[1] if record.exc_info else None
    if getattr(_here, "failures", None) is None or not isinstance(error, Exception):
        return True
    if record.levelno < logging.WARNING:  # several graphs, which is no failure
        return True
    _note(error)
    return False


def stage_request() -> CompileRequest:
    """Returns the library's own request: one graph per module, for the shapes that it gets."""
    request = request_of(fullgraph=True, dynamic=False)
    assert request is not None
    return request


def compile_forward(
    forward: Callable[..., Any], request: CompileRequest, fullgraph: bool
) -> Callable[..., Any]:
    """Compiles the forward of a module.

    Args:
        forward: forward of one module.
        request: backend and shapes.
        fullgraph: raise instead of making several graphs.
    """
    compiled: Callable[..., Any] = torch.compile(
        forward,
        backend=SteadyBackend(request.backend, is_strict=fullgraph),
        fullgraph=fullgraph,
        dynamic=request.dynamic,
    )
    return compiled


def max_variants() -> int:
    """Returns the number of kinds of arguments for which PyTorch compiles a code."""
    config = torch._dynamo.config
    # Older releases have another name for the limit.
    return int(getattr(config, "recompile_limit", 0) or config.cache_size_limit)


def prepare_threads() -> None:
    """Lets several threads compile, one after the other; called in the thread of the script.

    Without a CUDA device, the first thread that makes tensors without memory registers an object of
    its own as the device guard of the process. Contexts of a step compile in threads that end
    before the process, and the next one would use an object that is gone.
    """
    keep_device_guard()


def is_operator(module: nn.Module) -> bool:
    """Returns whether a module is one of torch.nn without children.

    Such a module is a single operator, which compiling does not change.
    """
    return type(module).__module__.startswith("torch.nn.") and not module._modules
