"""Finds what tensor parallelism would divide of a model, by the shapes of its modules alone."""

from __future__ import annotations

from collections import Counter

from torch import nn

from smp.nn.attention import DistributedAttentionLayer
from smp.nn.embedding import WholeEmbedding
from smp.nn.linear import ColumnLinear, RowLinear
from smp.nn.output_layer import DistributedTransformerOutputLayer
from smp.nn.vocabulary_head import VocabularyHead
from smp.planning.profile import Amount

# These are classes of the library's own layers.
_PRODUCTS = (ColumnLinear, RowLinear)
_KEEPS_INPUT = (DistributedAttentionLayer, DistributedTransformerOutputLayer, VocabularyHead)


def hidden_width(root: nn.Module) -> int | None:
    """Returns the channels between layers: those of most norms. None for a model without norms."""
    widths = Counter(
        weight.shape[0] for m in root.modules() if is_norm(m) and (weight := _weight(m)) is not None
    )
    return widths.most_common(1)[0][0] if widths else None


def has_split_parameters(module: nn.Module) -> bool:
    """Returns whether the parameters of this module, without its children, are divided.

    Products and tables are divided; norms and all other parameters stay whole.
    """
    weight = _weight(module)
    if isinstance(module, WholeEmbedding):
        return False
    if num_experts(module):
        return True
    return weight is not None and weight.dim() >= 2 and not is_norm(module)


def has_split_work(module: nn.Module, width: int | None) -> bool:
    """Returns whether the work and the activations of this module's own code are divided.

    Norms, dropouts between layers and the inputs of products that begin with all channels are not.
    Heads, intermediate features, activation functions and vocabulary entries are.
    """
    if is_norm(module) or isinstance(module, nn.Dropout):
        return False
    return not has_split_parameters(module) or input_width(module) != width


def kept_bytes(
    module: nn.Module, num_bytes: float, width: int | None, border_bytes: float, routed: int = 0
) -> Amount:
    """Returns the bytes that a module keeps for its backward.

    Args:
        module: module whose own code keeps them.
        num_bytes: all bytes that it keeps.
        width: see `hidden_width`.
        border_bytes: bytes of the activations between two layers.
        routed: experts per token whose features are divided; 0: experts are spread over the ranks.
    """
    whole = 0.0 if has_split_work(module, width) else num_bytes
    if num_experts(module):  # their rows, and results, have all channels
        whole = min(num_bytes, 2 * routed * border_bytes)
    elif isinstance(module, _KEEPS_INPUT):  # for the products that read it, which keep nothing
        whole = min(num_bytes, border_bytes)
    return Amount(num_bytes - whole, whole)


def num_experts(module: nn.Module) -> int:
    """Returns the experts of a module with one parameter slice per expert; 0 for other modules."""
    sizes = [p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3]
    return sizes[0] if len(sizes) >= 2 and len(set(sizes)) == 1 else 0


def experts_per_token(root: nn.Module) -> int:
    """Returns the experts per token by the model's configuration; 1 if it has none."""
    config = getattr(root, "config", None)
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    found = (getattr(config, name, None) for name in names)
    return next((int(n) for n in found if isinstance(n, int) and n > 0), 1)


def is_norm(module: nn.Module) -> bool:
    """Returns whether a module is a norm by class or by name: transformers has its own classes."""
    return isinstance(module, nn.LayerNorm) or type(module).__name__.endswith("Norm")


def input_width(module: nn.Module) -> int | None:
    """Returns the input features of a product; None for other modules."""
    if isinstance(module, nn.Linear):
        return module.in_features
    weight = _weight(module)
    if isinstance(module, _PRODUCTS) and weight is not None:
        return weight.shape[1]
    if type(module).__name__ == "Conv1D" and weight is not None:  # transformers: transposed
        return weight.shape[0]
    return None


def _weight(module: nn.Module) -> nn.Parameter | None:
    weight = module._parameters.get("weight")
    return weight if isinstance(weight, nn.Parameter) else None
