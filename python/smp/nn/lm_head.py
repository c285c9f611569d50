"""A transformer between embeddings and a language-model head, split over a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from smp.dropout import places as places_of_masks
from smp.modules.host_values import is_known_zero
from smp.nn import functional
from smp.nn import layout as layouts
from smp.nn.embedding import VocabularyEmbedding, WholeEmbedding
from smp.nn.gradient_checkpointing import GradientCheckpointing
from smp.nn.layer_norm import make_norm
from smp.nn.module import DistributedModule
from smp.nn.transformer import DistributedTransformer, layer_options
from smp.nn.transformer_layer import check_cross
from smp.nn.vocabulary_head import IGNORE_INDEX, LMHeadOutput, VocabularyHead

__all__ = ["DistributedTransformerLMHead", "LMHeadOutput"]


class DistributedTransformerLMHead(GradientCheckpointing, DistributedModule):
    """A model of embeddings, `DistributedTransformer`, final norm and language-model head.

    ``forward((input_ids, attention_mask, token_type_ids, position_ids, labels))``; with
    ``add_cross_attention`` also ``cross_states, cross_mask`` before ``labels``. Masks are
    ``[N, S]`` of 0 and 1, and 1 means masked. Everything but ``input_ids`` may be None, on all
    ranks of a tensor-parallel group or on none; without ``cross_states`` layers leave their cross
    attention out. It returns
    attention out. It returns

    * with labels: `LMHeadOutput`. A token's loss is that of the label of the next one; labels of
      -100 do not count; the mean is over the counted tokens of the caller's batch, in float32 at
      least,

    Args:
        num_layers: number of layers of the transformer.
        vocab_size: rows of the word embedding, which is split over the ranks.
        num_positions: rows of the position embedding.
        num_token_types: rows of the token-type embedding; 0 for none.
        add_lm_head: the module has a head.
        embedding_dropout_prob: probability of dropout on the sum of embeddings; by default
            ``hidden_dropout_prob``.
        tie_word_embedding: the head uses the word embedding's table.
        lm_head_bias: the head has a bias.
        use_position_embedding: the module has a position embedding.
        token_types_are_words: token types are rows of the word embedding, as with GPT-2.
        **others: arguments of the layers, see `DistributedTransformer`. With ``pre_layernorm``
            alone a final norm follows the last layer.

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
        vocab_size: int = 30522,
        num_positions: int = 1024,
        attention_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        activation: str = "gelu",
        layernorm_epsilon: float = 1e-5,
        num_token_types: int = 0,
        causal_mask_size: int | None = None,
        add_cross_attention: bool = False,
        add_lm_head: bool = True,
        initializer_range: float = 0.02,
        use_normal_initialization: bool = False,
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
        embedding_dropout_prob: float | None = None,
        tie_word_embedding: bool = True,
        lm_head_bias: bool = False,
        use_position_embedding: bool = True,
        token_types_are_words: bool = False,
    ) -> None:
        options = layer_options(locals())
        super().__init__()
        self._layout = layout = layouts.current()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.add_cross_attention, self.add_lm_head = add_cross_attention, add_lm_head
        self._passes_positions = rotary_dim is not None
        self.embedding_dropout_prob = (
            hidden_dropout_prob if embedding_dropout_prob is None else embedding_dropout_prob
        )
        std = initializer_range
        self.word_embedding = VocabularyEmbedding(vocab_size, hidden_size, std, layout)
        self.position_embedding = self.token_type_embedding = None
        self.token_types_are_words = token_types_are_words
        if use_position_embedding:
            self.position_embedding = WholeEmbedding(num_positions, hidden_size, std, layout)
        if num_token_types > 0:
            self.token_type_embedding = WholeEmbedding(num_token_types, hidden_size, std, layout)
        self.transformer = DistributedTransformer(num_layers, **options, _inside=True)
        has_norm = pre_layernorm and not post_layernorm
        eps = layernorm_epsilon
        self.layernorm = make_norm(hidden_size, eps, layout) if has_norm else None
        if add_lm_head:
            self.lm_head = VocabularyHead(
                self.word_embedding if tie_word_embedding else None,
                vocab_size,
                hidden_size,
                lm_head_bias,
                std,
                layout,
            )

    def forward(self, inputs: Sequence[Tensor | None]) -> Tensor | LMHeadOutput:
        """Runs the model as its class describes. Collective over the tensor-parallel group."""
        names = ["input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"]
        if self.add_cross_attention:
            names[4:4] = ["cross_states", "cross_mask"]
        if isinstance(inputs, Tensor) or len(inputs) != len(names):
            raise ValueError(f"inputs has to be a tuple ({', '.join(names)})")
        given = dict(zip(names, inputs, strict=True))
        ids, labels = given["input_ids"], given["labels"]
        if ids is None:
            raise ValueError("input_ids is None; expected integers [N, S]")
        hidden = self._run(ids, given)
        layout, extent = self._layout, ids.shape[1]
        if not self.add_lm_head:
            if labels is not None:
                raise ValueError("labels were given; they need add_lm_head=True")
            return layout.leave(hidden, extent)
        borders = self.lm_head.borders(extent)
        if labels is None:
            _, logits = self.lm_head(hidden, None, extent)
            return borders.logits(logits)
        # The loss of position i is that of label i + 1.
        targets = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:].contiguous()
        losses, local = self.lm_head(hidden, layout.all_samples(targets), extent)
        counted = (targets != IGNORE_INDEX).sum()
        mean = layout.own_samples(losses).sum() / counted.clamp(min=1)
        # If no token counts, PyTorch's loss is NaN, too, with gradients of zero.
        loss = torch.where(counted > 0, mean, float("nan"))
        return LMHeadOutput(loss, local, hidden, borders)

    def _run(self, ids: Tensor, given: dict[str, Tensor | None]) -> Tensor:
        """Returns hidden states before the head, in the layout."""
        layout = self._layout
        positions = given["position_ids"]
        if positions is not None and positions.shape[0] != ids.shape[0]:
            positions = positions.expand(ids.shape[0], -1).contiguous()
        hidden = self._embed(ids, given["token_type_ids"], positions)
        members: list[Tensor | None] = [hidden]
        mask = self._mask(given["attention_mask"], hidden, ids)
        if self.add_cross_attention:
            cross, cross_mask = given["cross_states"], given["cross_mask"]
            check_cross(cross, cross_mask)
            if cross is not None:
                cross_mask = self._mask(cross_mask, hidden, cross)
                cross = layout.enter(cross)
            members += [cross, mask, cross_mask]
        else:
            members.append(mask)
        if self._passes_positions:
            if positions is None:
                members.append(torch.arange(ids.shape[1], device=ids.device)[None])
            else:
                members.append(layout.all_samples(positions))
        last: Tensor = self.transformer(tuple(members))[0]
        if self.layernorm is not None:
            last = self.layernorm(last)
        return last.to(hidden.dtype)  # wider with fp32_residual_addition

    def _embed(self, ids: Tensor, token_types: Tensor | None, positions: Tensor | None) -> Tensor:
        layout = self._layout
        hidden: Tensor = self.word_embedding(ids)
        if self.position_embedding is not None:
            if positions is None:
                self._check_length(ids.shape[1])
                places = torch.arange(ids.shape[1], device=ids.device)[None]
                # Equal on all ranks: only a sequence that is split matters.
                inside = layout.enter(places) if layout.dim == 1 else places
            else:
                inside = layout.enter(positions)
            hidden = hidden + self.position_embedding(inside)
        if token_types is not None and self.token_types_are_words:
            hidden = hidden + self.word_embedding(token_types)
        elif token_types is not None:
            if self.token_type_embedding is None:
                raise ValueError("token_type_ids were given; they need num_token_types > 0")
            hidden = hidden + self.token_type_embedding(layout.enter(token_types))
        dropout_p = self.embedding_dropout_prob if self.training else 0.0
        here = places_of_masks.current()
        if dropout_p > 0.0 and here is not None:
            part = layout.slice_of(hidden, ids.shape[1])
            hidden = here.drop(hidden, dropout_p, part, layout.holds_group)
        elif dropout_p > 0.0:
            hidden = functional.dropout(hidden, dropout_p, layout.seed())
        return hidden

    def _check_length(self, length: int) -> None:
        assert self.position_embedding is not None
        num_positions = self.position_embedding.num_embeddings
        if length > num_positions:
            raise ValueError(f"a sequence has {length} positions; num_positions is {num_positions}")

    def _mask(self, mask: Tensor | None, hidden: Tensor, keys: Tensor) -> Tensor | None:
        """Makes an additive ``[all N, 1, 1, S]`` out of ``[N, S]`` with 1 for masked keys.

        The result is None if nothing is masked: attention has more kernels without a mask.

        Args:
            mask: mask of the caller.
            hidden: hidden states, whose dtype the result gets.
            keys: ``[N, S, *]`` of the caller, which the mask covers.
        """
        additive = None
        if mask is not None:
            if mask.shape != keys.shape[:2]:
                raise ValueError(
                    f"a mask has shape {list(mask.shape)}; expected {list(keys.shape[:2])} with 1 "
                    "for what is masked"
                )
            if not self._layout.all_say(is_known_zero(mask), "mask of which nothing is masked"):
                additive = torch.zeros(mask.shape, dtype=hidden.dtype, device=hidden.device)
                additive.masked_fill_(mask != 0, torch.finfo(hidden.dtype).min)
                additive = additive[:, None, None, :]
        return self._layout.whole_mask(additive, keys, hidden.dtype)
