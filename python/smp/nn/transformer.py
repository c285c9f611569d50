"""A stack of transformer layers split over a tensor-parallel group."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from smp.nn import layout as layouts
from smp.nn.gradient_checkpointing import GradientCheckpointing
from smp.nn.layer_norm import make_norm
from smp.nn.module import DistributedModule
from smp.nn.transformer_layer import DistributedTransformerLayer, Inputs, check_inputs, enter_stack

_LAYER_OPTIONS = frozenset(inspect.signature(DistributedTransformerLayer).parameters)


def layer_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a layer takes as well."""
    return {
        name: value
        for name, value in arguments.items()
        if name in _LAYER_OPTIONS and not name.startswith("_")
    }


class DistributedTransformer(GradientCheckpointing, DistributedModule):
    """A stack of transformer layers, one after the other, in ``seq_layers``.

    ``forward`` takes and returns the tuple of `DistributedTransformerLayer`. If both
    ``pre_layernorm`` and ``post_layernorm`` are True, there is also a norm of the input and one of
    the output of the whole stack.

    Args:
        num_layers: number of layers; layer ``i`` has ``layer_idx=i``.
        window_size: window of all layers, or one for each of them.
        **others: arguments of each layer, see `DistributedTransformerLayer`.

    Raises:
        Unsupported: the sizes cannot be split over the ranks.
        ValueError: arguments contradict each other.
    """

    def __init__(
        self,
        num_layers: int = 12,
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
        attention_in_fp32: bool = False,
        query_key_layer_scaling: bool = False,
        window_size: int | None | Sequence[int | None] = None,
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
        options = layer_options(locals())
        super().__init__()
        self._layout = layouts.current()
        self._inside = _inside
        self._num_members = 4 if add_cross_attention else 2
        self._rotates = rotary_dim is not None
        windows = options.pop("window_size")
        if windows is None or isinstance(windows, int):
            windows = [windows] * num_layers
        elif len(windows) != num_layers:
            raise ValueError(f"window_size has {len(windows)} entries for {num_layers} layers")
        self.seq_layers = nn.Sequential(
            *(
                DistributedTransformerLayer(
                    **options, layer_idx=idx, window_size=window, _inside=True
                )
                for idx, window in enumerate(windows)
            )
        )
        has_both = pre_layernorm and post_layernorm
        eps = layernorm_epsilon
        self.pre_layernorm = make_norm(hidden_size, eps, self._layout) if has_both else None
        self.layernorm = make_norm(hidden_size, eps, self._layout) if has_both else None

    def forward(self, inputs: Inputs) -> Inputs:
        """Runs the layers as the class describes. Collective over the tensor-parallel group."""
        check_inputs(inputs, self._num_members)
        if self._inside:
            return self._compute(inputs)
        assert inputs[0] is not None
        inside, extent = enter_stack(inputs, self._num_members, self._layout)
        if self._rotates and all(x is None for x in inside[self._num_members :]):
            # One tensor for all layers, which share what they compute of it.
            assert inside[0] is not None
            positions = torch.arange(inputs[0].shape[1], device=inside[0].device)[None]
            inside = (*inside[: self._num_members], positions)
        hidden = self._compute(inside)[0]
        assert hidden is not None
        hidden = self._layout.leave(hidden, extent)
        return (hidden.to(inputs[0].dtype), *inputs[1:])

    def _compute(self, inputs: Inputs) -> Inputs:
        """Runs norms and layers; all tensors are in the layout."""
        if self.pre_layernorm is not None:
            inputs = (self.pre_layernorm(inputs[0]), *inputs[1:])
        outputs: Inputs = self.seq_layers(inputs)
        if self.layernorm is not None:
            outputs = (self.layernorm(outputs[0]), *outputs[1:])
        return outputs
