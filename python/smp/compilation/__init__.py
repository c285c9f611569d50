"""What of a model `torch.compile` compiles, and what happens where it cannot."""

from smp.compilation.compiled_parts import STAGE, CompiledParts, check_mode

__all__ = ["STAGE", "CompiledParts", "check_mode"]
