"""The module in which old scripts find the global state."""

from smp.world.runtime import State as State
from smp.world.runtime import state as state
