"""Import path of v1 for what stands in for functions of PyTorch."""

from smp.patches import checkpoint

__all__ = ["checkpoint"]
