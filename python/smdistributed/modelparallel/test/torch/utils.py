"""A re-export of `smp.v1.model_dump` and nothing else."""

from smp.v1.model_dump import dump_model as dump_model
from smp.v1.model_dump import verify as verify
