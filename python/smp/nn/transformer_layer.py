"""A transformer layer split over a tensor-parallel group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from smp.activations.recompute import recompute
from smp.modules.forwards import WrapperKind, is_wrapped
from smp.nn import layout as layouts
from smp.nn.attention import DistributedAttentionLayer
from smp.nn.gradient_checkpointing import GradientCheckpointing
from smp.nn.module import IndivisibleModule
from smp.nn.output_layer import DistributedTransformerOutputLayer

Inputs = tuple[Tensor | None, ...]


class DistributedTransformerLayer(GradientCheckpointing, IndivisibleModule):
    """A layer of attention, optional cross attention and a feed-forward block.

    ``forward((hidden_states, attention_mask))`` returns the same tuple with new hidden states; with
    ``add_cross_attention`` the tuple is ``(hidden_states, cross_states, attention_mask,
    cross_mask)``. Without ``cross_states``, on all ranks of a group, the cross attention is left
    out and its parameters get no gradient. With rotary embeddings a last member ``position_ids``
    ``[N or 1, S]`` may follow. Hidden states are ``[N, S, H]``, masks additive ``[N, 1, 1, S]``;
    either all ranks of a tensor-parallel group pass a mask or none does. All ranks of the group
    call the layer together, with inputs of one shape.

    Args:
        num_attention_heads: number of query heads of all ranks together.
        attention_head_size: channels of one head.
        hidden_size: channels of the hidden states.
        intermediate_size: channels inside of the feed-forward block, of all ranks.
        attention_dropout_prob: probability of dropout on attention probabilities.
        hidden_dropout_prob: probability of dropout on results of attention and feed-forward block.
        activation: the same as for `DistributedTransformerOutputLayer`.
        layernorm_epsilon: epsilon of the norms.
        initializer_range: standard deviation of initial weights with ``use_normal_initialization``.
        use_normal_initialization: normal weights and zero biases instead of those of ``nn.Linear``.
        causal_mask_size: the longest sequence, attended causally; None for attention to all.
        add_cross_attention: the layer has a second attention block, ``cross_attention``.
        pre_layernorm, post_layernorm: norms at the start and at the end of each block.
        use_alibi, alibi_bias_max: linear position bias of attention scores.
        rotary_dim, rotary_interleaved, rotary_base: the same as for `DistributedAttentionLayer`, as
            are scale_attention_scores, scale_attn_by_layer_idx, layer_idx, attention_in_fp32,
            query_key_layer_scaling, window_size, fused_qkv, use_qkv_bias, use_attn_dense_bias,
            flash_attention.
        parallel_attn_output: both blocks read the same hidden states: ``x + attn(norm(x)) +
            mlp(norm(x))``.
        single_pre_layernorm: both blocks share one norm.
        fp32_residual_addition: residuals are added in float32.
        residual_init_std: standard deviation of the initial weights of the last product of each
            block, instead of ``initializer_range``.

    Raises:
        Unsupported: the sizes cannot be split over the ranks.
        ValueError: arguments contradict each other.
    """

    # transformers sets these attributes on layers that can be checkpointed.
    gradient_checkpointing = False
    preserve_rng_state = True
    #: code that would checkpoint a layer from outside leaves that to the layer
    checkpoints_itself = True

    def __init__(
        self,
        num_attention_heads: int = 32,
        attention_head_size: int = 32,
        hidden_size: int = 1024,
        intermediate_size: int = 4096,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
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
        parallel_attn_output: bool = False,
        single_pre_layernorm: bool = False,
        fp32_residual_addition: bool = False,
        residual_init_std: float | None = None,
        flash_attention: bool = True,
        *,
        _inside: bool = False,
    ) -> None:
        super().__init__()
        if parallel_attn_output and (post_layernorm or not pre_layernorm or add_cross_attention):
            raise ValueError(
                "parallel_attn_output needs pre_layernorm=True, post_layernorm=False and "
                "add_cross_attention=False"
            )
        if single_pre_layernorm and not parallel_attn_output:
            raise ValueError("single_pre_layernorm needs parallel_attn_output=True")
        self._layout = layouts.current()
        self._inside = _inside
        self.add_cross_attention = add_cross_attention
        self.parallel_attn_output = parallel_attn_output
        self.single_pre_layernorm = single_pre_layernorm

        def attention(is_cross: bool) -> DistributedAttentionLayer:
            return DistributedAttentionLayer(
                num_attention_heads=num_attention_heads,
                attention_head_size=attention_head_size,
                hidden_size=hidden_size,
                attention_dropout_prob=attention_dropout_prob,
                hidden_dropout_prob=hidden_dropout_prob,
                layernorm_epsilon=layernorm_epsilon,
                initializer_range=initializer_range,
                use_normal_initialization=use_normal_initialization,
                cross_attention=is_cross,
                causal_mask_size=None if is_cross else causal_mask_size,
                pre_layernorm=pre_layernorm,
                post_layernorm=post_layernorm,
                rotary_dim=None if is_cross else rotary_dim,
                rotary_interleaved=rotary_interleaved,
                rotary_base=rotary_base,
                scale_attention_scores=scale_attention_scores,
                scale_attn_by_layer_idx=scale_attn_by_layer_idx,
                layer_idx=layer_idx,
                attention_in_fp32=attention_in_fp32,
                query_key_layer_scaling=query_key_layer_scaling,
                window_size=None if is_cross else window_size,
                fused_qkv=fused_qkv and not is_cross,
                use_qkv_bias=use_qkv_bias,
                use_attn_dense_bias=use_attn_dense_bias,
                use_alibi=use_alibi and not is_cross,
                alibi_bias_max=alibi_bias_max,
                fp32_residual_addition=fp32_residual_addition,
                residual_init_std=residual_init_std,
                flash_attention=flash_attention,
                _inside=True,
            )

        self.attention = attention(is_cross=False)
        if add_cross_attention:
            self.cross_attention = attention(is_cross=True)
        self.output = DistributedTransformerOutputLayer(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            hidden_dropout_prob=hidden_dropout_prob,
            activation=activation,
            layernorm_epsilon=layernorm_epsilon,
            initializer_range=initializer_range,
            use_normal_initialization=use_normal_initialization,
            pre_layernorm=pre_layernorm,
            post_layernorm=post_layernorm,
            fp32_residual_addition=fp32_residual_addition,
            residual_init_std=residual_init_std,
            _inside=True,
            _has_norm=not single_pre_layernorm,
        )

    def forward(self, inputs: Inputs) -> Inputs:
        """Runs the layer as its class describes. Collective over the tensor-parallel group."""
        is_marked = is_wrapped(self, WrapperKind.CHECKPOINT)  # then the wrapper recomputes
        if self.gradient_checkpointing and self.training and not is_marked:
            result: Inputs = recompute(
                self._forward,
                (inputs,),
                preserve_rng_state=self.preserve_rng_state,
                modules=(self,),
            )
            return result
        return self._forward(inputs)

    def _forward(self, inputs: Inputs) -> Inputs:
        num_masked = 4 if self.add_cross_attention else 2
        check_inputs(inputs, num_masked)
        if self._inside:
            return (self._compute(inputs), *inputs[1:])
        inside, extent = enter_stack(inputs, num_masked, self._layout)
        assert inputs[0] is not None
        hidden = self._layout.leave(self._compute(inside), extent)
        return (hidden.to(inputs[0].dtype), *inputs[1:])

    def _compute(self, inputs: Inputs) -> Tensor:
        """Returns new hidden states; all tensors are in the layout."""
        hidden, *others = inputs
        assert hidden is not None
        cross, mask, cross_mask = None, others[0], None
        if self.add_cross_attention:
            cross, mask, cross_mask = others[:3]
        positions = others[3 if self.add_cross_attention else 1 :]
        extent = self._layout.extent_inside(hidden, mask)
        if self.parallel_attn_output:
            return self._compute_parallel(hidden, mask, positions, extent)
        hidden = self.attention((hidden, mask, *positions), extent=extent)
        if cross is not None:
            hidden = self.cross_attention((hidden, cross, cross_mask), extent=extent)
        result = self.output(hidden, extent=extent)
        assert isinstance(result, Tensor)
        return result

    def _compute_parallel(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        positions: Sequence[Tensor | None],
        extent: int | None,
    ) -> Tensor:
        attention, output = self.attention, self.output
        mine: Sequence[Tensor] | None = None
        others: Sequence[Tensor] | None = None
        if self.single_pre_layernorm:  # gathered once for both blocks
            columns = attention.columns
            normed = attention.norm(hidden)
            order = self._layout.order(hidden, extent)
            products = self._layout.columns(normed, [*columns, *output.columns], extent, order)
            mine, others = products[: len(columns)], products[len(columns) :]
        drops = self.training and output.hidden_dropout_prob > 0.0
        # Without dropout in between, the terms of both blocks are summed over ranks at once.
        block = attention(
            (hidden, mask, *positions), extent=extent, products=mine, unreduced=not drops
        )
        if drops:
            result = output(hidden, extent=extent, products=others, residual=block)
        else:
            bias = attention.dense.bias
            result = output(hidden, extent=extent, products=others, term=block, bias=bias)
        assert isinstance(result, Tensor)
        return result


def check_inputs(inputs: Inputs, num_members: int) -> None:
    """Raises ValueError unless inputs are the tuple of a layer, with or without positions."""
    names = "hidden_states, attention_mask"
    if num_members == 4:
        names = "hidden_states, cross_states, attention_mask, cross_mask"
    is_tuple = isinstance(inputs, Sequence) and len(inputs) in {num_members, num_members + 1}
    if not is_tuple or inputs[0] is None:
        raise ValueError(f"inputs has to be a tuple ({names}), with position_ids at its end or not")


def check_cross(states: Tensor | None, mask: Tensor | None) -> None:
    """Raises ValueError for a mask without states; without both, cross attention is left out."""
    if states is None and mask is not None:
        raise ValueError(
            "cross_mask was given and cross_states is None; give both, or neither to leave the "
            "cross attention out"
        )


def enter_stack(
    inputs: Inputs, num_members: int, layout: layouts.Layout
) -> tuple[Inputs, int | None]:
    """Brings the tuple of a layer into the layout.

    Returns:
        The tuple in the layout, and the length of the sequence.
    """
    hidden = inputs[0]
    assert hidden is not None
    positions = tuple(
        None if x is None else layout.expand_to_all(x, hidden.shape[0])
        for x in inputs[num_members:]
    )
    inside: Inputs = (layout.enter(hidden),)
    if num_members == 4:
        cross, cross_mask = inputs[1], inputs[3]
        check_cross(cross, cross_mask)
        if cross is not None:
            cross_mask = layout.whole_mask(cross_mask, cross)
            cross = layout.enter(cross)
        inside += (cross, layout.whole_mask(inputs[2], hidden), cross_mask)
    else:
        inside += (layout.whole_mask(inputs[1], hidden),)
    return inside + positions, hidden.shape[1]
