"""A re-export of `smp.v1.replicas` and nothing else."""

from smp.v1.replicas import DistributedDataParallel as DistributedDataParallel
