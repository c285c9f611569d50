"""The observer that compares the first training step of each model with one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from smp.observe.first_step.check import FirstStepCheck
from smp.world import runtime
from smp.world.observers import Body, StepObserver


class FirstStepObserver(StepObserver):
    """Keeps a `FirstStepCheck` for each model of a runtime until its outcome is known.

    Attributes:
        checks: check of each model by its number; those that are over stay for their outcome.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        self._current = current
        self.checks: dict[int, FirstStepCheck] = {}

    def model_placing(self, engine: Any, trace: Any, local: Sequence[tuple[str, Any]]) -> None:
        label = f"model {engine.idx} ({type(engine.root).__name__})"
        check = self.checks[engine.idx] = FirstStepCheck(self._current, engine.root, label)
        check.before_placing(trace, local, engine.storage.shows_values)

    def model_placed(self, engine: Any) -> None:
        decision = engine.partitioning.decision
        self.checks[engine.idx].placed(decision.modules, decision.names)

    def begin_step(self, engines: Sequence[Any], trains: bool) -> None:
        for engine in engines:
            self.checks[engine.idx].begin_step(trains, len(engines))

    def around_body(self, body: Body) -> Body:
        for check in self._open():
            body = check.around_body(body)
        return body

    def call(self, engine: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        check = self.checks[engine.idx]
        return forward if check.outcome else lambda *args, **kwargs: check.call(args, kwargs)

    def backward(self, engine: Any, losses: Sequence[Tensor]) -> None:
        self.checks[engine.idx].on_backward(losses)

    def end_step(self) -> None:
        for check in self._open():
            check.end_step()

    def abandon_step(self) -> None:
        for check in self._open():
            check.abandon()

    def _open(self) -> list[FirstStepCheck]:
        return [check for check in self.checks.values() if not check.outcome]


def outcome_of(model: Any) -> str | None:
    """Returns what the check of a `DistributedModel` came to, in words; None: it is not over."""
    observer: FirstStepObserver = model._runtime.observers.of_kind(FirstStepObserver)
    return observer.checks[model._idx].outcome
