"""Records partitions, first steps and lost ranks for orchestrators; see `smp.world.run_record`."""

from __future__ import annotations

from typing import Any

from smp.partition import partition_file
from smp.world import events, runtime
from smp.world.observers import StepObserver


class RunEvents(StepObserver):
    """Records where models are, and that ranks go on after a failure.

    Args:
        current: the runtime.
    """

    @classmethod
    def maker(cls, current: runtime.Runtime) -> StepObserver:
        """Returns an observer if something is to be recorded, else an observer without methods."""
        return cls(current) if current.record.is_wanted else StepObserver()

    def __init__(self, current: runtime.Runtime) -> None:
        self._current = current
        current.on_resize.append(self._resized)

    def model_partitioned(self, model: Any) -> None:
        decision = model._decision
        places = {} if decision is None else dict(partition_file.top_most(decision))
        self._current.record.partitioned(model._idx, places)

    def _resized(self, resized: Any) -> None:
        self._current.record.resized(
            resized.lost, resized.newcomers, resized.seconds, resized.reason
        )
        waiting = self._current.observers.of_kind(FirstStepEvent)
        if waiting is not None:  # one more rank was lost in the step that is run again
            self._current.observers.remove(waiting)
        self._current.observers.add(FirstStepEvent(self._current, events.Resized.NAME))


class FirstStepEvent(StepObserver):
    """Records the end of the next training step, and is removed then.

    Args:
        current: the runtime.
        after: event whose first step this is.
    """

    @classmethod
    def maker(cls, current: runtime.Runtime) -> StepObserver:
        """Returns an observer if something is to be recorded, else an observer without methods."""
        is_wanted = current.record.has_events
        return cls(current, events.Started.NAME) if is_wanted else StepObserver()

    def __init__(self, current: runtime.Runtime, after: str) -> None:
        self._current, self._after = current, after

    def step_returned(self, duration_s: float, *, trains: bool, num_samples: int) -> None:
        if trains:
            has_come = self._current.has_taken_place  # this process was not there at the start
            after = events.Resized.NAME if has_come else self._after
            self._current.record.write(events.FirstStep(after, round(duration_s, 4)))
            self._current.observers.remove(self)
