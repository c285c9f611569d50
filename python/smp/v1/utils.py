"""Small helpers that old scripts import."""

from __future__ import annotations

from torch import Tensor

import smp._C as _C
from smp.precision.holdings import model_parameter_of
from smp.tensor_parallel.sharding import dim_of, interval_of


def rmsg(msg: object) -> str:
    """Returns the message after this rank's place, as errors of the library have it.

    Args:
        msg: any object; before `smp.init` its text is returned alone.
    """
    return f"{_C.rank_prefix()}{msg}"


def get_distribution_axis(param: Tensor) -> int | None:
    """Returns the dim along which tensor-parallel ranks split a parameter, or None.

    The whole is the concatenation along it of the slices of all `tp_size()` ranks. Where a size
    does not divide, the first ranks have one element more. A parameter with several matrices
    in one dim (packed by a plan) is the concatenation of the slices of each of them.

    Args:
        param: parameter of a `DistributedModel`, or the tensor that its optimizer updates instead.
            A master of a sharded state is flat, and has the dim of its parameter.
    """
    return dim_of(interval_of(model_parameter_of(param)))
