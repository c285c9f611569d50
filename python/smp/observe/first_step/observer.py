"""The observer that compares the first training step of each model with one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from smp.observe.first_step.check import FirstStepCheck
from smp.world import runtime
from smp.world.observers import StepObserver


class FirstStepObserver(StepObserver):
    """Adds a `FirstStepCheck` for each model when its parameters are about to move.

    Attributes:
        checks: check of each model by its engine; those that are over stay for their outcome.
    """

    def __init__(self, current: runtime.Runtime) -> None:
        self._current = current
        self.checks: WeakKeyDictionary[Any, FirstStepCheck] = WeakKeyDictionary()

    def model_placing(self, engine: Any, trace: Any, local: Sequence[tuple[str, Any]]) -> None:
        label = f"model {engine.idx} ({type(engine.root).__name__})"
        check = self.checks[engine] = FirstStepCheck(self._current, engine.root, label)
        self._current.observers.add(check)
        check.before_placing(trace, local, engine.storage.shows_values)


def outcome_of(model: Any) -> str | None:
    """Returns the outcome of the check of a `DistributedModel` in words; None: it is not over."""
    observer: FirstStepObserver = model._runtime.observers.of_kind(FirstStepObserver)
    return observer.checks[model._engine].outcome
