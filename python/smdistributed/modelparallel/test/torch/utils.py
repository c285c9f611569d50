"""A re-export of `smp.model_dump` and nothing else."""

from smp.model_dump import dump_model as dump_model
from smp.model_dump import verify as verify
