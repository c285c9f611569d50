"""``@smp.step``: a function that runs forward and backward, once per microbatch."""

from smp.step.decorator import step as step
from smp.step.microbatch import StepOutput as StepOutput
