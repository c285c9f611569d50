"""Checks whether the first training step of a pipeline computes what one process computes."""

from smp.observe.first_step.check import FirstStepCheck as FirstStepCheck
from smp.observe.first_step.check import FirstStepDifference as FirstStepDifference
