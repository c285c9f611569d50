"""Explains failures of derivatives that a step function takes of a model in a pipeline."""

from __future__ import annotations

import smp._C as _C
from smp.world.runtime import Runtime

# Errors of PyTorch on a rank that did not run the model, and ours if the graph leaves a rank.
_NOT_HERE = "appears to not have been used in the graph"
_NO_GRAPH = "create_graph=True is not supported through a module on another rank"


def explain_derivative(current: Runtime, error: Exception) -> None:
    """Explains in a pipeline that ``torch.autograd.grad`` of a model needs its whole graph.

    Args:
        current: the runtime.
        error: error of a step function.

    Raises:
        RuntimeError: the error only shows where the graph ends.
    """
    is_cut = _NOT_HERE in str(error) or _NO_GRAPH in str(error)
    if current.rank.sizes["pp"] > 1 and is_cut:
        raise RuntimeError(
            f"{_C.rank_prefix()}step '{current.steps.running}' takes a derivative of the output of "
            f"a model ({current.wrapped.candidates}) by torch.autograd.grad. In a pipeline the "
            "graph of a model begins on the first rank, and gradients on other ranks have no graph "
            "of their own (create_graph), so penalties of gradients (WGAN-GP) and forces cannot "
            f"be trained there: set pipeline_parallel_degree to 1. The error was: {error}"
        ) from error
