"""Gets at the arguments of the model's call, which exist inside of the step function only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from smp.partition.costs import Trace
from smp.partition.trace import tracing
from smp.partition.trace_choice import TraceOptions, trace_for_partition

_log = logging.getLogger("smp")


class CallSeen(BaseException):
    """Leaves the step function once its call of the model has been seen.

    Not an `Exception`, so that the function's own handlers let it pass.
    """


class Capture:
    """Runs a step function up to its call of the model, and traces that call.

    The trace runs inside of the call, so that everything that is in force there (autocast, default
    dtype and device) is in force for it.

    Args:
        root: the user's model.
        options: of the trace.
    """

    def __init__(self, root: nn.Module, options: TraceOptions) -> None:
        self._root = root
        self._options = options
        self._seen = False
        self._trace: Trace | None = None

    def on_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        """In place of the model's forward.

        Raises:
            CallSeen: always.
        """
        if not self._seen:
            self._seen = True
            self._trace = trace_for_partition(self._root, args, kwargs, self._options)
        raise CallSeen

    def on_backward(self) -> NoReturn:
        """In place of the model's backward, in a function that did not call the model before.

        Raises:
            CallSeen: always.
        """
        raise CallSeen

    def run(self, body: Callable[[], object]) -> Trace | None:
        """The trace of the first call that ``body`` makes; None if there is none.

        Raises:
            Exception: what ``body`` raises before it calls the model.
        """
        with tracing():
            try:
                body()
            except CallSeen:
                pass
            except Exception:
                # After the call an error only says that the function did not expect to be left.
                if not self._seen:
                    raise
        if not self._seen:
            _log.warning(
                "smp: the first call of a step function does not call the model, so the partition "
                "goes by parameter sizes alone"
            )
        return self._trace
