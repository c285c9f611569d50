"""What stands in for functions of PyTorch; see `smp.patches.checkpoint`."""

from smp.patches import checkpoint

__all__ = ["checkpoint"]
