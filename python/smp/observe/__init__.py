"""Shows people what a run does. `OBSERVERS` are the tools that look at steps."""

from smp.observe.batch_check.check import BatchCheckObserver
from smp.observe.memory.out_of_memory import MemoryObserver
from smp.observe.nonfinite import NonFiniteObserver
from smp.observe.run_events import FirstStepEvent, RunEvents
from smp.observe.step_log import StepLog
from smp.observe.verification.first_step import FirstStepObserver
from smp.observe.verification.recording import VerificationObserver

#: makers of the observers of a runtime, in the order in which they are called
OBSERVERS = (
    NonFiniteObserver,
    VerificationObserver,
    FirstStepObserver,
    BatchCheckObserver,
    StepLog,
    MemoryObserver,
    RunEvents.maker,
    FirstStepEvent.maker,
)
