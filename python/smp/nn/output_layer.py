"""The feed-forward block of a transformer layer, split over a tensor-parallel group."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from smp.nn import functional
from smp.nn import layout as layouts
from smp.nn.attention import check_norms, close_block
from smp.nn.layer_norm import make_norm
from smp.nn.linear import ColumnLinear, RowLinear
from smp.nn.module import IndivisibleModule
from smp.nn.parameters import split_or_refuse

# GELU variants are fused with the bias before them; the value is that operator's argument.
_GELUS = {"gelu": "none", "gelu_new": "tanh"}
#: other names in transformers for a GELU, and ours
GELU_ALIASES = {
    "gelu_python": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_python_tanh": "gelu_new",
}
ACTIVATIONS = (*_GELUS, "relu", *GELU_ALIASES)


class DistributedTransformerOutputLayer(IndivisibleModule):
    """A feed-forward block: norm, ``dense1``, activation, ``dense2``, dropout, residual.

    ``forward(hidden_states)`` returns hidden states ``[N, S, H]``. All ranks of a tensor-parallel
    group call it together, with inputs of one shape.

    Args:
        hidden_size: channels of the hidden states.
        intermediate_size: channels between the two products, of all ranks.
        hidden_dropout_prob: probability of dropout on the result.
        activation: "gelu", "gelu_new" (tanh) or "relu", or another name in transformers for a GELU,
            as "gelu_fast" and "gelu_pytorch_tanh".
        layernorm_epsilon: epsilon of the norms.
        initializer_range: standard deviation of initial weights with ``use_normal_initialization``.
        use_normal_initialization: normal weights and zero biases instead of those of ``nn.Linear``.
        pre_layernorm: the input is normalised.
        post_layernorm: the sum with the residual is normalised.
        fp32_residual_addition: the residual is added in float32.
        residual_init_std: standard deviation of the initial ``dense2`` instead of
            ``initializer_range``.

    Raises:
        Unsupported: a rank would get no intermediate channels.
        ValueError: the activation is unknown, or no norm is asked for.
    """

    def __init__(
        self,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        fp32_residual_addition: bool = False,
        residual_init_std: float | None = None,
        *,
        _inside: bool = False,
        _has_norm: bool = True,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is {activation!r}; expected one of {', '.join(map(repr, ACTIVATIONS))}"
            )
        activation = GELU_ALIASES.get(activation, activation)
        check_norms(pre_layernorm, post_layernorm)
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.hidden_dropout_prob, self.activation = hidden_dropout_prob, activation
        self.fp32_residual_addition = fp32_residual_addition
        self._layout = layouts.current()
        self._inside = _inside
        sizes = split_or_refuse(intermediate_size, "intermediate_size")
        std = initializer_range if use_normal_initialization else None
        # GELU adds the bias of its input.
        adds_bias = activation not in _GELUS
        self.dense1 = ColumnLinear(hidden_size, sizes, True, std, adds_bias=adds_bias)
        std = std if residual_init_std is None else residual_init_std
        self.dense2 = RowLinear(sizes, hidden_size, True, std, self._layout)
        make = functools.partial(make_norm, hidden_size, layernorm_epsilon, self._layout)
        self.pre_layernorm = make() if pre_layernorm and _has_norm else None
        self.layernorm = make() if post_layernorm else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        extent: int | None = None,
        products: Sequence[Tensor] | None = None,
        residual: Tensor | None = None,
        term: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Runs the block as its class describes. Collective over the tensor-parallel group.

        All arguments but the first are only for calls inside of a layer.

        Args:
            hidden_states: ``[N, S, H]``.
            extent: length of the sequence where `Layout.sizes` needs it.
            products: products with `columns`, by `Layout.order`, if they exist already.
            residual: tensor added at the end instead of the hidden states.
            term: extra term of this rank in the sum of all ranks' products.
            bias: second bias added to the sum.
        """
        layout = self._layout
        if not self._inside:
            extent = hidden_states.shape[1]
            result = self._compute(layout.enter(hidden_states), extent)
            return layout.leave(result, extent).to(hidden_states.dtype)
        return self._compute(hidden_states, extent, products, residual, term, bias)

    def _compute(
        self,
        hidden: Tensor,
        extent: int | None,
        products: Sequence[Tensor] | None = None,
        residual: Tensor | None = None,
        term: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        order = self._layout.order(hidden, extent)
        if products is None:
            products = self._layout.columns(self.norm(hidden), self.columns, extent, order)
        own_bias = self.dense2.bias
        assert own_bias is not None
        return close_block(
            self._layout.rows(self._activate(products), self.dense2, extent, order, term),
            own_bias if bias is None else own_bias + bias,
            hidden if residual is None else residual,
            self.hidden_dropout_prob if self.training else 0.0,
            self._layout,
            self.fp32_residual_addition,
            self.layernorm,
            extent,
        )

    def norm(self, hidden: Tensor) -> Tensor:
        """Returns the input of the first products."""
        normed: Tensor = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        if self.fp32_residual_addition:  # hidden states may be wider than weights
            normed = normed.to(self.dense2.weight.dtype)
        return normed

    @property
    def columns(self) -> list[ColumnLinear]:
        """Layers that read the hidden states."""
        return [self.dense1]

    def _activate(self, products: Sequence[Tensor]) -> Tensor:
        """Returns the own intermediate channels of all tokens, in the order of the products."""
        (product,) = products
        if self.activation in _GELUS:
            return functional.bias_gelu(product, self.dense1.bias, _GELUS[self.activation])
        return F.relu(product)

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"activation={self.activation!r}"
        )
