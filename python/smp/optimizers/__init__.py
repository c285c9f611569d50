"""Optimizers whose update is one pass over the memory of each parameter, on CPU and CUDA.

They take the arguments of the optimizers of the same names in NVIDIA apex, update float32 masters
and their 16-bit copies at once, and know loss scales: see :class:`smp.optimizers.FusedOptimizer`.
"""

from smp.optimizers.adam import FusedAdam
from smp.optimizers.fused import FusedOptimizer, SumNorms
from smp.optimizers.lamb import FusedLAMB
from smp.optimizers.novograd import FusedNovoGrad

FusedLamb = FusedLAMB

__all__ = [
    "FusedAdam",
    "FusedLAMB",
    "FusedLamb",
    "FusedNovoGrad",
    "FusedOptimizer",
    "SumNorms",
]
