"""Modules that are split over the ranks of a tensor-parallel group.

Constructors take the sizes of the whole module. The modules need ``smp.init`` and also work with a
tensor-parallel degree of 1. docs/design/tensor_parallelism.md describes how they compute.
"""

from smp.nn import functional
from smp.nn.attention import DistributedAttentionLayer
from smp.nn.embedding import DistributedEmbedding
from smp.nn.flash import FlashAttentionLayer
from smp.nn.layer_norm import FusedLayerNorm, FusedRMSNorm
from smp.nn.linear import DistributedLinear
from smp.nn.lm_head import DistributedTransformerLMHead
from smp.nn.module import DistributedModule
from smp.nn.output_layer import DistributedTransformerOutputLayer
from smp.nn.transformer import DistributedTransformer
from smp.nn.transformer_layer import DistributedTransformerLayer
from smp.nn.vocabulary_head import LMHeadOutput
from smp.tensor_parallel.registry import Unsupported

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "FusedRMSNorm",
    "LMHeadOutput",
    "Unsupported",
    "functional",
]
