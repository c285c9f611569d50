"""Captures the arguments of the models' calls, which exist only inside of the step function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

import smp._C as _C
from smp.modules.tracing import tracing
from smp.partition.costs import Trace
from smp.partition.own_collectives import OwnCollective
from smp.partition.stand_in import real_result, stand_in
from smp.partition.trace_choice import TraceOptions, trace_for_partition
from smp.tensor_parallel import regions

_log = logging.getLogger("smp")


class CallSeen(BaseException):
    """An exception that leaves the step function once its calls of the models have been seen.

    It is not an `Exception`, so that the function's own handlers let it pass.
    """


@dataclass(frozen=True)
class Captured:
    """A model during the capture.

    Attributes:
        root: the user's model.
        options: options of its trace.
        waits: whether it is not partitioned yet, so that its call is to be traced.
    """

    root: nn.Module
    options: TraceOptions
    waits: bool = True


class Capture:
    """Runs a step function up to its first calls of the models that wait, and traces these calls.

    A trace runs inside of its call, so that everything that is in force there (autocast, default
    dtype and device) is in force for it. Between the calls of several models the function goes on
    with zero tensors of the right shapes, and without backward.

    Args:
        models: all models of the step.
    """

    def __init__(self, models: Sequence[Captured]) -> None:
        self._models = {model.root: model for model in models}
        self._num_waiting = sum(model.waits for model in models)
        self._goes_on = len(models) > 1
        self._called = False
        self.traces: dict[nn.Module, Trace | None] = {}
        self.ended_early = False

    def on_call(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces a model's forward.

        Raises:
            CallSeen: all waiting models were traced.
        """
        self._called = True
        model = self._models[root]
        if model.waits and root not in self.traces:
            self.traces[root] = None  # this call counts, even if its trace fails
            self.traces[root] = trace_for_partition(root, args, kwargs, model.options)
        if len(self.traces) == self._num_waiting:
            raise CallSeen
        try:
            return stand_in(root, args, kwargs, model.options.device)
        except Exception:
            if not model.waits or any(parameter.is_meta for parameter in root.parameters()):
                raise
            return real_result(root, args, kwargs, model.options.device)

    def on_backward(self) -> None:
        """Replaces a model's backward.

        Raises:
            CallSeen: there is only one model, and the function has not called it before.
        """
        if not self._goes_on:
            raise CallSeen

    def run(self, body: Callable[[], object]) -> dict[nn.Module, Trace | None]:
        """Returns traces of the first calls that ``body`` makes, by model; None for failed traces.

        Raises:
            Exception: ``body`` raised it before it called a model.
        """
        # Only this rank traces, so split layers cannot communicate with others.
        with tracing(), regions.alone():
            try:
                body()
            except CallSeen:
                pass
            except OwnCollective as error:
                raise RuntimeError(
                    f"{_C.rank_prefix()}a model's forward calls a collective of torch.distributed "
                    f"by itself ({error.operator} over global ranks {list(error.ranks)}). In a "
                    "pipeline only the ranks that hold the calling module run it, and the others "
                    "would be waited for forever: call it outside of the model, or over "
                    "smp.get_dp_process_group(), whose ranks run the same code"
                ) from error
            except Exception as error:
                # After a call, an error may only mean that results were zeros.
                if not self._called:
                    raise
                self.ended_early = True
                self._warn(error)
        return self.traces

    def _warn(self, error: Exception) -> None:
        text = str(error).strip().splitlines()
        _log.warning(
            "smp: the step function raised %s in its trace, after it had called %s of %s models: "
            "%s; the others are partitioned by parameter sizes alone",
            type(error).__name__,
            len(self.traces),
            self._num_waiting,
            text[0] if text else "",
        )
