"""Explains failures of derivatives that a step function takes of a model in a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import smp._C as _C
from smp.world.runtime import Runtime

# Errors of PyTorch on a rank that did not run the model, and ours if the graph leaves a rank.
_NOT_HERE = "appears to not have been used in the graph"
_NO_GRAPH = "create_graph=True is not supported through a module on another rank"


@contextmanager
def explaining_derivatives(current: Runtime) -> Iterator[None]:
    """Explains in a pipeline that ``torch.autograd.grad`` of a model needs its whole graph.

    Raises:
        RuntimeError: instead of errors that only show where the graph ends.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        is_cut = _NOT_HERE in str(error) or _NO_GRAPH in str(error)
        if current.rank.sizes["pp"] == 1 or not is_cut:
            raise
        raise RuntimeError(
            f"{_C.rank_prefix()}step '{current.steps.running}' takes a derivative of the output of "
            f"a model ({current.wrapped.candidates}) by torch.autograd.grad. In a pipeline the "
            "graph of a model begins on the first rank, and gradients on other ranks have no graph "
            "of their own (create_graph), so penalties of gradients (WGAN-GP) and forces cannot "
            f"be trained there: set pipeline_parallel_degree to 1. The error was: {error}"
        ) from error
