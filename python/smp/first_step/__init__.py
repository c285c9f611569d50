"""In the first training step of a partitioned model: does the pipeline compute what one process does?"""

from smp.first_step.check import FirstStepCheck as FirstStepCheck
from smp.first_step.check import FirstStepDifference as FirstStepDifference
