"""Optimizers whose update is one pass over the memory of each parameter, on CPU and CUDA."""

from smp.optim.adam import FusedAdam
from smp.optim.fused import FusedOptimizer, SumNorms
from smp.optim.lamb import FusedLAMB
from smp.optim.novograd import FusedNovoGrad

FusedLamb = FusedLAMB

__all__ = [
    "FusedAdam",
    "FusedLAMB",
    "FusedLamb",
    "FusedNovoGrad",
    "FusedOptimizer",
    "SumNorms",
]
