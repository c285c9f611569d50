"""Gets at the arguments of the models' calls, which exist inside of the step function only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from smp.modules.tracing import tracing
from smp.partition.costs import Trace
from smp.partition.stand_in import real_result, stand_in
from smp.partition.trace_choice import TraceOptions, trace_for_partition
from smp.tensor_parallel import regions

_log = logging.getLogger("smp")


class CallSeen(BaseException):
    """Leaves the step function once its calls of the models have been seen.

    Not an `Exception`, so that the function's own handlers let it pass.
    """


@dataclass(frozen=True)
class Captured:
    """One model during the capture.

    Attributes:
        root: the user's model.
        options: of its trace.
        waits: it is not partitioned yet, and its calls are looked for.
    """

    root: nn.Module
    options: TraceOptions
    waits: bool = True


class Capture:
    """Runs a step function up to its first calls of the models that wait, and traces these calls.

    A trace runs inside of its call, so that everything that is in force there (autocast, default
    dtype and device) is in force for it. Between the calls of several models the function goes on
    with results of the right shapes that are all zero, and without backward.

    Args:
        models: all there are.
    """

    def __init__(self, models: Sequence[Captured]) -> None:
        self._models = {model.root: model for model in models}
        self._num_waiting = sum(model.waits for model in models)
        self._goes_on = len(models) > 1
        self._called = False
        self.traces: dict[nn.Module, Trace | None] = {}
        self.ended_early = False

    def on_call(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place of a model's forward.

        Raises:
            CallSeen: nothing is left to be seen.
        """
        self._called = True
        model = self._models[root]
        if model.waits and root not in self.traces:
            self.traces[root] = None  # whatever comes, this call counts
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
        """In place of a model's backward.

        Raises:
            CallSeen: there is one model, which the function has not called before.
        """
        if not self._goes_on:
            raise CallSeen

    def run(self, body: Callable[[], object]) -> dict[nn.Module, Trace | None]:
        """Traces of the first calls that ``body`` makes, by model; None where no trace works.

        Raises:
            Exception: what ``body`` raises before it calls a model.
        """
        # Only this rank traces, so layers that are split have nobody to talk to.
        with tracing(), regions.alone():
            try:
                body()
            except CallSeen:
                pass
            except Exception as error:
                # After a call an error only says that results were not what they seemed.
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
