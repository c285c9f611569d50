"""Marking modules for tensor parallelism, and replacing them by distributed ones."""

from smp.replacement.fp8_layers import convert_to_fp8
from smp.replacement.fused_heads import fuse_heads
from smp.replacement.marks import model_creation, set_tensor_parallelism, tensor_parallelism
from smp.replacement.names import refuse_pieces, to_ours, to_theirs
from smp.replacement.registration import tp_register, tp_register_with_module
from smp.replacement.replace import replace_marked

__all__ = [
    "convert_to_fp8",
    "fuse_heads",
    "model_creation",
    "refuse_pieces",
    "replace_marked",
    "set_tensor_parallelism",
    "tensor_parallelism",
    "to_ours",
    "to_theirs",
    "tp_register",
    "tp_register_with_module",
]
