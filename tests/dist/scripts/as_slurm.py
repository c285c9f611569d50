"""Replaces torchrun's variables by those of ``srun`` and runs the given script."""

from __future__ import annotations

import os
import runpy
import sys

rank, size = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SMP_RENDEZVOUS"):
    os.environ.pop(name, None)
os.environ |= {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": rank,
    "SLURM_NTASKS": size,
    "SLURM_LOCALID": rank,
    "SLURM_NTASKS_PER_NODE": size,
    "SLURM_STEP_TASKS_PER_NODE": size,
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
}
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
