"""Attention on a packed tensor of queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smp.nn.attend import Scoring, attend
from smp.nn.attention import scale_of


class FlashAttentionLayer(nn.Module):
    """An attention without a tensor of scores, on the heads that the caller has.

    Args:
        attention_dropout_prob: probability of dropout on probabilities, while training.
        attention_head_size: channels of a head; needed with ``scale_attention_scores``.
        scale_attention_scores: scores are divided by the root of the head size.
        scale_attn_by_layer_idx: scores are divided by ``layer_idx + 1``.
        layer_idx: number of the layer, from 0; needed with ``scale_attn_by_layer_idx``.
        scale: factor of scores; replaces the four arguments before it.
        triton_flash_attention: the documented variant: no dropout, and a mask is possible.
        use_alibi: the mask holds a linear position bias; needs ``triton_flash_attention``.

    Raises:
        ValueError: a needed argument is missing.
    """

    def __init__(
        self,
        attention_dropout_prob: float = 0.1,
        attention_head_size: int | None = None,
        scale_attention_scores: bool = True,
        scale_attn_by_layer_idx: bool = False,
        layer_idx: int | None = None,
        scale: float | None = None,
        triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:
        super().__init__()
        if use_alibi and not triton_flash_attention:
            raise ValueError("use_alibi is True; it needs triton_flash_attention=True")
        if scale is None:
            scale = scale_of(
                attention_head_size, scale_attention_scores, scale_attn_by_layer_idx, layer_idx
            )
        self.scale = scale
        self.attention_dropout_prob = 0.0 if triton_flash_attention else attention_dropout_prob
        self.triton_flash_attention, self.use_alibi = triton_flash_attention, use_alibi

    def forward(self, qkv: Tensor, attn_mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Computes attention.

        Args:
            qkv: ``[B, S, 3, heads, head_size]``.
            attn_mask: additive mask, ``[B or 1, heads or 1, 1 or S, S]``; only with
                ``triton_flash_attention`` and ``use_alibi``.
            causal: position i sees positions up to i.

        Returns:
            ``[B, heads, S, head_size]``.
        """
        if attn_mask is not None and not self.use_alibi:
            raise ValueError(
                "attn_mask was given; it needs triton_flash_attention=True and use_alibi=True"
            )
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                f"qkv has shape {list(qkv.shape)}; expected [B, S, 3, heads, head_size]"
            )
        query, key, value = (x.transpose(1, 2) for x in torch.unbind(qkv, 2))
        scoring = Scoring(self.scale, causal)
        dropout_p = self.attention_dropout_prob if self.training else 0.0
        return attend(query, key, value, attn_mask, scoring, dropout_p)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, attention_dropout_prob={self.attention_dropout_prob}"
