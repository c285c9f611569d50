"""The module in which old scripts find the global state."""

from smp.runtime import State as State
from smp.runtime import state as state
