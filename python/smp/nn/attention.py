"""Self and cross attention with heads split over a tensor-parallel group."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from smp.dropout import places
from smp.dropout.masks import Slice
from smp.modules.tracing import is_recorded
from smp.nn import functional
from smp.nn import layout as layouts
from smp.nn.attend import Scoring, alibi_slopes, attend, tell_beyond_fused
from smp.nn.layer_norm import make_norm
from smp.nn.layout import Layout
from smp.nn.linear import ColumnLinear, RowLinear
from smp.nn.module import IndivisibleModule
from smp.nn.parameters import split_or_refuse
from smp.nn.token_order import TokenOrder
from smp.tensor_parallel import regions, sharding


def scale_of(
    head_size: int | None, scale_scores: bool, by_layer_idx: bool, layer_idx: int | None
) -> float:
    """Returns the factor of attention scores.

    Raises:
        ValueError: a size or number that the factor depends on is missing.
    """
    scale = 1.0
    if scale_scores:
        if head_size is None:
            raise ValueError("scale_attention_scores needs attention_head_size, which is None")
        scale /= math.sqrt(head_size)
    if by_layer_idx:
        if layer_idx is None:
            raise ValueError("scale_attn_by_layer_idx needs layer_idx, which is None")
        scale /= layer_idx + 1
    return scale


class DistributedAttentionLayer(IndivisibleModule):
    """An attention block: norm, query, key and value, attention, projection, dropout, residual.

    ``forward((hidden_states, attention_mask))`` returns hidden states ``[N, S, H]``; with
    ``cross_attention`` the tuple is ``(hidden_states, cross_states, attention_mask)``. With rotary
    embeddings a last member ``position_ids`` ``[N or 1, S]`` may follow. Masks are additive; either
    all ranks of a tensor-parallel group pass one or none does. All ranks of the group call the
    layer together, with inputs of one shape.

    Args:
        num_attention_heads: number of query heads of all ranks together.
        attention_head_size: channels of one head.
        hidden_size: channels of the hidden states.
        attention_dropout_prob: probability of dropout on attention probabilities.
        hidden_dropout_prob: probability of dropout on the result of the projection.
        layernorm_epsilon: epsilon of the norms.
        initializer_range: standard deviation of initial weights with ``use_normal_initialization``.
        use_normal_initialization: normal weights and zero biases instead of those of ``nn.Linear``.
        cross_attention: keys and values come from ``cross_states``, nothing is causal.
        causal_mask_size: the longest sequence, attended causally; None for attention to all.
        pre_layernorm: the input is normalised.
        post_layernorm: the sum with the residual is normalised.
        rotary_dim: channels of each head that are rotated by their position; None for none.
        rotary_interleaved: pairs are neighbours, instead of members of the first and second half.
        rotary_base: base of the angles.
        scale_attention_scores: scores are divided by the root of the head size.
        scale_attn_by_layer_idx: scores are divided by ``layer_idx + 1``.
        layer_idx: number of the layer, from 0.
        attention_in_fp32: scores and softmax are computed in float32.
        query_key_layer_scaling: scores are divided by ``layer_idx + 1`` and multiplied by it again
            inside of a softmax in float32.
        window_size: largest number of positions that a position sees, itself the last.
        fused_qkv: one parameter ``query_key_value`` holds query, key and value of each head
            together.
        use_qkv_bias, use_attn_dense_bias: the products have biases.
        use_alibi: scores get a linear position bias, with base ``alibi_bias_max``.
        fp32_residual_addition: the residual is added in float32.
        residual_init_std: standard deviation of the initial projection instead of
            ``initializer_range``.
        flash_attention: ``scaled_dot_product_attention`` is used where it supports the options. It
            does not support ``window_size``, ``use_alibi`` and ``query_key_layer_scaling``, which
            is logged once, for information.

    Raises:
        Unsupported: heads cannot be split over the ranks.
        ValueError: arguments contradict each other.
    """

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        cross_attention: bool = False,
        causal_mask_size: int | None = None,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        rotary_dim: int | None = None,
        rotary_interleaved: bool = False,
        rotary_base: float = 10000.0,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        attention_in_fp32: bool = False,
        query_key_layer_scaling: bool = False,
        window_size: int | None = None,
        fused_qkv: bool = False,
        use_qkv_bias: bool = True,
        use_attn_dense_bias: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
        fp32_residual_addition: bool = False,
        residual_init_std: float | None = None,
        flash_attention: bool = True,
        *,
        _inside: bool = False,
    ) -> None:
        super().__init__()
        check_norms(pre_layernorm, post_layernorm)
        is_causal = causal_mask_size is not None and not cross_attention
        if fused_qkv and cross_attention:
            raise ValueError("fused_qkv needs self attention; cross_attention is True")
        if window_size is not None and not is_causal:
            raise ValueError(f"window_size is {window_size}; it needs causal_mask_size")
        if query_key_layer_scaling and layer_idx is None:
            raise ValueError("query_key_layer_scaling needs layer_idx, which is None")
        if rotary_dim is not None and not 0 < rotary_dim <= attention_head_size:
            raise ValueError(
                f"rotary_dim is {rotary_dim}; expected at most attention_head_size, "
                f"{attention_head_size}"
            )
        if rotary_dim is not None and rotary_dim % 2 == 1:
            raise ValueError(f"rotary_dim is {rotary_dim}; it has to be even")
        self._layout = layouts.current()
        self._inside = _inside
        self.cross_attention = cross_attention
        self.num_attention_heads, self.hidden_size = num_attention_heads, hidden_size
        self.attention_head_size = attention_head_size
        self.attention_dropout_prob = attention_dropout_prob
        self.hidden_dropout_prob = hidden_dropout_prob
        self.causal_mask_size = causal_mask_size
        self.fp32_residual_addition = fp32_residual_addition
        self._rotary = (rotary_dim, rotary_base, rotary_interleaved)
        scale = scale_of(
            attention_head_size, scale_attention_scores, scale_attn_by_layer_idx, layer_idx
        )
        self._scoring = Scoring(
            scale=scale,
            causal=is_causal,
            window=window_size,
            in_fp32=attention_in_fp32,
            prescale=float((layer_idx or 0) + 1) if query_key_layer_scaling else 1.0,
            flash=flash_attention,
        )
        tell_beyond_fused(self._scoring, use_alibi)
        heads = split_or_refuse(num_attention_heads, "num_attention_heads")
        begin = sharding.begin_of(heads)
        self._own_heads = Slice(1, begin, num_attention_heads)
        self._slopes: Tensor | None = None
        if use_alibi:
            every = alibi_slopes(num_attention_heads, alibi_bias_max)
            self._slopes = every[begin : begin + heads[regions.rank()]].clone()
        std = initializer_range if use_normal_initialization else None
        parts = [size * attention_head_size for size in heads]
        self._fused = fused_qkv
        if fused_qkv:
            fused = [3 * size for size in parts]
            self.query_key_value = ColumnLinear(hidden_size, fused, use_qkv_bias, std)
        else:
            self.query = ColumnLinear(hidden_size, parts, use_qkv_bias, std)
            self.key = ColumnLinear(hidden_size, parts, use_qkv_bias, std)
            self.value = ColumnLinear(hidden_size, parts, use_qkv_bias, std)
        std = std if residual_init_std is None else residual_init_std
        self.dense = RowLinear(parts, hidden_size, use_attn_dense_bias, std, self._layout)
        make = functools.partial(make_norm, hidden_size, layernorm_epsilon, self._layout)
        self.pre_layernorm = make() if pre_layernorm else None
        self.layernorm = make() if post_layernorm else None

    def forward(
        self,
        inputs: Sequence[Tensor | None],
        *,
        extent: int | None = None,
        products: Sequence[Tensor] | None = None,
        unreduced: bool = False,
    ) -> Tensor:
        """Runs the layer as its class describes. Collective over the tensor-parallel group.

        Args:
            inputs: tuple that the class describes.
            extent: length of the sequence where `Layout.sizes` needs it; only inside of a layer.
            products: products with `columns`, by `Layout.order`, if they exist already; only in a
                layer.
            unreduced: return this rank's term of the projection, before sum, bias, dropout and
                residual; only inside of a layer.
        """
        hidden, cross, mask, positions = self._take_apart(inputs)
        layout = self._layout
        if self._inside:
            return self._compute(hidden, cross, mask, positions, extent, products, unreduced)
        extent = hidden.shape[1]
        mask = layout.whole_mask(mask, hidden if cross is None else cross)
        if positions is not None:
            positions = layout.expand_to_all(positions, hidden.shape[0])
        cross_inside = None if cross is None else layout.enter(cross)
        result = self._compute(layout.enter(hidden), cross_inside, mask, positions, extent)
        return layout.leave(result, extent).to(hidden.dtype)

    def _take_apart(
        self, inputs: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Returns hidden states, cross states, mask and positions."""
        members = ["hidden_states", "attention_mask"]
        if self.cross_attention:
            members.insert(1, "cross_states")
        if self._rotary[0] is not None:
            members.append("position_ids")
        given = dict(zip(members, inputs, strict=False))
        has_all = len(inputs) in {len(members), 2 + self.cross_attention}
        if isinstance(inputs, Tensor) or not has_all or given["hidden_states"] is None:
            raise ValueError(f"inputs has to be a tuple ({', '.join(members)})")
        if self.cross_attention and given["cross_states"] is None:
            raise ValueError("cross_states is None; a layer with cross attention needs it")
        hidden, mask = given["hidden_states"], given["attention_mask"]
        assert hidden is not None
        if mask is not None and not mask.is_floating_point():
            raise ValueError(
                f"attention_mask has dtype {mask.dtype}; it is added to scores, so that it has to "
                "be 0 for what is seen and a very negative number for what is not"
            )
        return hidden, given.get("cross_states"), mask, given.get("position_ids")

    def _compute(
        self,
        hidden: Tensor,
        cross: Tensor | None,
        mask: Tensor | None,
        positions: Tensor | None,
        extent: int | None,
        products: Sequence[Tensor] | None = None,
        unreduced: bool = False,
    ) -> Tensor:
        """Computes `forward` between the borders; all tensors are in the layout."""
        layout = self._layout
        order = layout.order(hidden, extent)
        if products is None:
            products = layout.columns(self.norm(hidden), self.columns, extent, order)
        query, key, value = self._heads(products, order, cross, mask)
        if self.causal_mask_size is not None and query.shape[1] > self.causal_mask_size:
            raise ValueError(
                f"a sequence has {query.shape[1]} positions; causal_mask_size is "
                f"{self.causal_mask_size}"
            )
        query, key = self._rotate(query, key, positions)
        context = attend(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            mask,
            self._scoring,
            self.attention_dropout_prob if self.training else 0.0,
            self._slopes,
            self._own_heads,
            layout.has_own_batches,
        )
        context = context.transpose(1, 2)
        if order is not None:
            context = order.blocks(context)
        context = context.flatten(-2)
        if unreduced:
            term: Tensor = self.dense(context)
            return term
        return close_block(
            layout.rows(context, self.dense, extent, order),
            self.dense.bias,
            hidden,
            self.hidden_dropout_prob if self.training else 0.0,
            layout,
            self.fp32_residual_addition,
            self.layernorm,
            extent,
        )

    def norm(self, hidden: Tensor) -> Tensor:
        """Returns the input of the first products."""
        normed: Tensor = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        if self.fp32_residual_addition:  # hidden states may be wider than weights
            normed = normed.to(self.dense.weight.dtype)
        return normed

    @property
    def columns(self) -> list[ColumnLinear]:
        """Layers that read the hidden states."""
        if self._fused:
            return [self.query_key_value]
        return [self.query] if self.cross_attention else [self.query, self.key, self.value]

    def _heads(
        self,
        products: Sequence[Tensor],
        order: TokenOrder | None,
        cross: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values ``[all B, all S, own heads, D]``."""
        layout, size = self._layout, self.attention_head_size
        if order is not None:  # attention looks at whole sequences
            products = [order.sorted(product) for product in products]
        if self._fused:
            query, key, value = products[0].unflatten(2, (-1, 3, size)).unbind(3)
            return query, key, value
        if cross is not None:
            extent = layout.extent_inside(cross, mask)
            order = layout.order(cross, extent)
            of_cross = layout.columns(cross, [self.key, self.value], extent, order)
            if order is not None:
                of_cross = [order.sorted(product) for product in of_cross]
            products = [*products, *of_cross]
        query, key, value = (product.unflatten(2, (-1, size)) for product in products)
        return query, key, value

    def _rotate(
        self, query: Tensor, key: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rotary_dim, base, is_interleaved = self._rotary
        if rotary_dim is None:
            return query, key
        if positions is None:
            positions = torch.arange(query.shape[1], device=query.device)[None]
        cos, sin = _tables_of(positions, rotary_dim, base, query.dtype)
        return (
            functional.rotary(query, cos, sin, rotary_dim, is_interleaved),
            functional.rotary(key, cos, sin, rotary_dim, is_interleaved),
        )

    def extra_repr(self) -> str:
        return (
            f"heads={self.num_attention_heads}, head_size={self.attention_head_size}, "
            f"{self._scoring}"
        )


def close_block(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    dropout_p: float,
    layout: Layout,
    fp32_residual: bool,
    norm: nn.Module | None,
    extent: int | None,
) -> Tensor:
    """Returns ``norm(dropout(x + bias) + residual)``; all tensors are in the layout.

    A sum in float32 stays wide until a norm of this block or a later one has been applied.
    ``extent`` is the length of the sequence where `Layout.sizes` needs it.
    """
    place = places.current()
    if dropout_p > 0.0 and place is not None:
        biased = functional.bias_dropout_residual(x, bias, None, 0.0, 0, fp32_residual)
        part = layout.slice_of(biased, extent)
        total = place.drop(biased, dropout_p, part, layout.holds_group) + residual
    else:
        seed = layout.seed() if dropout_p > 0.0 else 0
        total = functional.bias_dropout_residual(x, bias, residual, dropout_p, seed, fp32_residual)
    if norm is not None:
        total = norm(total)
        if fp32_residual:
            total = total.to(x.dtype)
    return total


# All layers of a stack get one tensor of positions, so that its tables are computed once.
_made_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _tables_of(
    positions: Tensor, rotary_dim: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns `rotary_tables`, which layers with one tensor of positions share."""
    # A trace sees what each layer computes, and training cannot keep tensors of inference mode.
    is_seen = torch.compiler.is_compiling() or is_recorded()
    if is_seen or positions.is_inference() or torch.is_inference_mode_enabled():
        return rotary_tables(positions, rotary_dim, base, dtype)
    made = _made_tables.setdefault(positions, {})
    what = (positions._version, rotary_dim, base, torch.promote_types(dtype, torch.float32))
    if what not in made:
        made.clear()
        made[what] = rotary_tables(positions, rotary_dim, base, dtype)
    tables: tuple[Tensor, Tensor] = made[what]
    return tables


def rotary_tables(
    positions: Tensor, rotary_dim: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines ``[B or 1, S, rotary_dim / 2]`` of the angles of positions.

    The tables are float32, or float64 for a ``dtype`` of float64.
    """
    wide = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, rotary_dim, 2, dtype=wide, device=positions.device)
    angles = positions.to(wide)[..., None] * (1.0 / base ** (steps / rotary_dim))
    return angles.cos(), angles.sin()


def check_norms(pre_layernorm: bool, post_layernorm: bool) -> None:
    """Raises ValueError for a block without any norm."""
    if not pre_layernorm and not post_layernorm:
        raise ValueError(
            "pre_layernorm and post_layernorm are both False; at least one of them has to be True"
        )
