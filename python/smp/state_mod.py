"""The module in which old scripts find the global state."""

from smp.world.state import State as State
from smp.world.state import state as state
