"""Compiles parts of a model with `torch.compile`, and runs the others in eager mode."""

from smp.compilation.compiled_parts import STAGE, CompiledParts, check_mode

__all__ = ["STAGE", "CompiledParts", "check_mode"]
