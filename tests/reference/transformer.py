"""Plain PyTorch forms of the modules of `smp.nn`, with the same arguments and parameter names.

Written for clarity: every score is a number in a tensor, every option an ``if``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def rotate(x: Tensor, positions: Tensor, dim: int, base: float, interleaved: bool) -> Tensor:
    """``[B, S, heads, D]``: turns pairs of the first ``dim`` channels, one pair after the other."""
    result = x.clone()
    for pair in range(dim // 2):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
        angle = (positions.to(x.dtype) * base ** (-2 * pair / dim))[:, :, None]
        a, b = x[..., first], x[..., second]
        result[..., first] = a * angle.cos() - b * angle.sin()
        result[..., second] = a * angle.sin() + b * angle.cos()
    return result


class Attention(nn.Module):
    def __init__(
        self,
        num_attention_heads: int,
        attention_head_size: int,
        hidden_size: int,
        attention_dropout_prob: float = 0.0,
        hidden_dropout_prob: float = 0.0,
        layernorm_epsilon: float = 1e-5,
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
        window_size: int | None = None,
        fused_qkv: bool = False,
        use_qkv_bias: bool = True,
        use_attn_dense_bias: bool = True,
        use_alibi: bool = False,
        alibi_bias_max: float = 8,
        **_without_effect_in_float64: Any,
    ) -> None:
        super().__init__()
        heads, size = num_attention_heads, attention_head_size
        self.heads, self.size = heads, size
        if fused_qkv:
            self.query_key_value = nn.Linear(hidden_size, 3 * heads * size, use_qkv_bias)
        else:
            self.query = nn.Linear(hidden_size, heads * size, use_qkv_bias)
            self.key = nn.Linear(hidden_size, heads * size, use_qkv_bias)
            self.value = nn.Linear(hidden_size, heads * size, use_qkv_bias)
        self.dense = nn.Linear(heads * size, hidden_size, use_attn_dense_bias)
        eps = layernorm_epsilon
        self.pre_layernorm = nn.LayerNorm(hidden_size, eps) if pre_layernorm else None
        self.layernorm = nn.LayerNorm(hidden_size, eps) if post_layernorm else None
        self.is_causal = causal_mask_size is not None and not cross_attention
        self.rotary = (rotary_dim, rotary_base, rotary_interleaved)
        self.scale = 1.0
        if scale_attention_scores:
            self.scale /= math.sqrt(size)
        if scale_attn_by_layer_idx:
            assert layer_idx is not None
            self.scale /= layer_idx + 1
        self.window, self.fused = window_size, fused_qkv
        self.is_cross = cross_attention
        self.slopes = None
        if use_alibi:
            self.slopes = [2.0 ** -(i * alibi_bias_max / heads) for i in range(1, heads + 1)]

    def forward(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        hidden, cross = inputs[0], inputs[1] if self.is_cross else None
        mask = inputs[2 if self.is_cross else 1]
        positions = inputs[2] if not self.is_cross and len(inputs) == 3 else None
        assert hidden is not None
        x = self.block(hidden, cross, mask, positions) + hidden
        return x if self.layernorm is None else self.layernorm(x)

    def block(
        self,
        hidden: Tensor,
        cross: Tensor | None,
        mask: Tensor | None,
        positions: Tensor | None,
        normed: Tensor | None = None,
    ) -> Tensor:
        """Computes attention without residual and post norm."""
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        x = x if normed is None else normed
        source = x if cross is None else cross
        if self.fused:
            q, k, v = self.query_key_value(x).unflatten(2, (self.heads, 3, self.size)).unbind(3)
        else:
            q = self.query(x).unflatten(2, (self.heads, self.size))
            k = self.key(source).unflatten(2, (self.heads, self.size))
            v = self.value(source).unflatten(2, (self.heads, self.size))
        dim, base, interleaved = self.rotary
        if dim is not None:
            if positions is None:
                positions = torch.arange(x.shape[1])[None]
            q = rotate(q, positions, dim, base, interleaved)
            k = rotate(k, positions, dim, base, interleaved)
        parts = []
        for head in range(self.heads):
            scores = torch.einsum("bid,bjd->bij", q[:, :, head], k[:, :, head])
            probabilities = self.probabilities(scores * self.scale, mask, head)
            parts.append(torch.einsum("bij,bjd->bid", probabilities, v[:, :, head]))
        result: Tensor = self.dense(torch.cat(parts, 2))
        return result

    def probabilities(self, scores: Tensor, mask: Tensor | None, head: int) -> Tensor:
        i = torch.arange(scores.shape[1])[:, None]
        j = torch.arange(scores.shape[2])[None]
        if self.slopes is not None:
            scores = scores - self.slopes[head] * (i - j).abs()
        if mask is not None:
            scores = scores + mask[:, 0]
        if self.is_causal:
            seen = j <= i
            if self.window is not None:
                seen = seen & (i - j < self.window)
            scores = scores.masked_fill(~seen, -math.inf)
        return scores.softmax(-1)


class Output(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_dropout_prob: float = 0.0,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        pre_layernorm: bool = False,
        post_layernorm: bool = True,
        has_pre_norm: bool = True,
        **_without_effect_in_float64: Any,
    ) -> None:
        super().__init__()
        self.dense1 = nn.Linear(hidden_size, intermediate_size)
        self.dense2 = nn.Linear(intermediate_size, hidden_size)
        has_pre_norm = has_pre_norm and pre_layernorm
        eps = layernorm_epsilon
        self.pre_layernorm = nn.LayerNorm(hidden_size, eps) if has_pre_norm else None
        self.layernorm = nn.LayerNorm(hidden_size, eps) if post_layernorm else None
        self.activation = ACTIVATIONS[activation]

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.block(hidden) + hidden
        return x if self.layernorm is None else self.layernorm(x)

    def block(self, hidden: Tensor, normed: Tensor | None = None) -> Tensor:
        x = hidden if self.pre_layernorm is None else self.pre_layernorm(hidden)
        x = x if normed is None else normed
        result: Tensor = self.dense2(self.activation(self.dense1(x)))
        return result


class Layer(nn.Module):
    def __init__(
        self,
        add_cross_attention: bool = False,
        parallel_attn_output: bool = False,
        single_pre_layernorm: bool = False,
        intermediate_size: int = 0,
        activation: str = "gelu",
        **options: Any,
    ) -> None:
        super().__init__()
        self.attention = Attention(**options)
        if add_cross_attention:
            not_cross = {"rotary_dim": None, "window_size": None, "use_alibi": False}
            not_cross |= {"fused_qkv": False}
            self.cross_attention = Attention(**(options | not_cross), cross_attention=True)
        self.output = Output(
            intermediate_size=intermediate_size,
            activation=activation,
            has_pre_norm=not single_pre_layernorm,
            **{k: v for k, v in options.items() if "layernorm" in k or k == "hidden_size"},
        )
        self.is_cross, self.is_parallel = add_cross_attention, parallel_attn_output
        self.has_one_norm = single_pre_layernorm

    def forward(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        hidden, *others = inputs
        mask = others[1] if self.is_cross else others[0]
        positions = others[3 if self.is_cross else 1 :]
        assert hidden is not None
        if self.is_parallel:
            normed = None
            if self.has_one_norm:
                assert self.attention.pre_layernorm is not None
                normed = self.attention.pre_layernorm(hidden)
            where = positions[0] if positions else None
            attended = self.attention.block(hidden, None, mask, where)
            return (hidden + attended + self.output.block(hidden, normed), *others)
        hidden = self.attention((hidden, mask, *positions))
        if self.is_cross and others[0] is not None:
            hidden = self.cross_attention((hidden, others[0], others[2]))
        return (self.output(hidden), *others)


class Transformer(nn.Module):
    def __init__(self, num_layers: int, window_size: Any = None, **options: Any) -> None:
        super().__init__()
        windows = window_size if isinstance(window_size, list) else [window_size] * num_layers
        self.seq_layers = nn.Sequential(
            *(
                Layer(**options, layer_idx=idx, window_size=windows[idx])
                for idx in range(num_layers)
            )
        )
        has_both = options.get("pre_layernorm", False) and options.get("post_layernorm", True)
        size, eps = options["hidden_size"], options.get("layernorm_epsilon", 1e-5)
        self.pre_layernorm = nn.LayerNorm(size, eps) if has_both else nn.Identity()
        self.layernorm = nn.LayerNorm(size, eps) if has_both else nn.Identity()

    def forward(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        outputs = self.seq_layers((self.pre_layernorm(inputs[0]), *inputs[1:]))
        return (self.layernorm(outputs[0]), *outputs[1:])


class LMHead(nn.Module):
    def __init__(
        self,
        vocab_size: int,
        num_positions: int,
        num_token_types: int = 0,
        add_lm_head: bool = True,
        tie_word_embedding: bool = True,
        lm_head_bias: bool = False,
        use_position_embedding: bool = True,
        embedding_dropout_prob: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        size = options["hidden_size"]
        self.word_embedding = nn.Embedding(vocab_size, size)
        self.position_embedding = (
            nn.Embedding(num_positions, size) if use_position_embedding else None
        )
        self.token_type_embedding = (
            nn.Embedding(num_token_types, size) if num_token_types > 0 else None
        )
        self.transformer = Transformer(**options)
        has_norm = options.get("pre_layernorm", False) and not options.get("post_layernorm", True)
        eps = options.get("layernorm_epsilon", 1e-5)
        self.layernorm = nn.LayerNorm(size, eps) if has_norm else nn.Identity()
        self.is_cross = options.get("add_cross_attention", False)
        self.passes_positions = options.get("rotary_dim") is not None
        if add_lm_head:
            self.lm_head = nn.Linear(size, vocab_size, bias=lm_head_bias)
            if tie_word_embedding:
                self.lm_head.weight = self.word_embedding.weight
        self.has_head = add_lm_head

    def forward(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, Tensor]:
        """(loss, logits), or (None, hidden states) without a head."""
        ids, mask, token_types, positions, *cross, labels = inputs
        assert ids is not None
        x = self.word_embedding(ids)
        if self.position_embedding is not None:
            places = torch.arange(ids.shape[1])[None] if positions is None else positions
            x = x + self.position_embedding(places)
        if token_types is not None:
            assert self.token_type_embedding is not None
            x = x + self.token_type_embedding(token_types)
        members: tuple[Tensor | None, ...] = (x, additive(mask))
        if self.is_cross:
            members = (x, cross[0], additive(mask), additive(cross[1]))
        if self.passes_positions:
            members += (positions,)
        hidden = self.layernorm(self.transformer(members)[0])
        if not self.has_head:
            return None, hidden
        logits = self.lm_head(hidden)
        if labels is None:
            return None, logits
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return F.cross_entropy(*flat, ignore_index=-100), logits


def additive(mask: Tensor | None) -> Tensor | None:
    """``[N, S]`` of 0 and 1 as ``[N, 1, 1, S]`` of 0 and the most negative number."""
    if mask is None:
        return None
    dtype = torch.get_default_dtype()
    return mask[:, None, None].to(dtype) * torch.finfo(dtype).min
