"""Does the first training step of a pipeline compute what one process computes?"""

from smp.observe.first_step.check import FirstStepCheck as FirstStepCheck
from smp.observe.first_step.check import FirstStepDifference as FirstStepDifference
