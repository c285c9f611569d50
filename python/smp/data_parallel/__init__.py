"""Averaging gradients over data-parallel ranks, and giving these the same values to begin with."""

from smp.data_parallel.reduction import agree_on_maxima as agree_on_maxima
from smp.data_parallel.reduction import broadcast_initial as broadcast_initial
from smp.data_parallel.reduction import make_records as make_records
from smp.data_parallel.reduction import make_reducer as make_reducer
