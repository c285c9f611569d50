"""Import path of the public `GradScaler`."""

from smp.optim.amp import (
    GradScaler,
)

__all__ = [
    "GradScaler",
]
