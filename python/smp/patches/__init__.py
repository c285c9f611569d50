"""Import path of v1 for replacements of functions of PyTorch."""

from smp.patches import checkpoint

__all__ = ["checkpoint"]
