"""Import path of v1 for two small helpers."""

from smp.v1.utils import (
    get_distribution_axis,
    rmsg,
)

__all__ = [
    "get_distribution_axis",
    "rmsg",
]
