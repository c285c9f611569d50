"""The head of a language model whose vocabulary is split, and its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from smp.nn.embedding import VocabularyEmbedding, join_features
from smp.nn.held_logits import unreadable
from smp.nn.layout import Layout
from smp.nn.linear_cross_entropy import linear_cross_entropy
from smp.nn.parameters import add_split, fill, split_or_refuse
from smp.tensor_parallel import regions, sharding

IGNORE_INDEX = -100


class LMHeadOutput:
    """The output of `DistributedTransformerLMHead` when it gets labels.

    ``loss, logits = output`` and ``output["loss"]`` work as well.

    Attributes:
        loss: mean over the counted tokens of the caller's batch.
    """

    def __init__(
        self, loss: Tensor, local_logits: Tensor | None, hidden: Tensor, borders: _Borders
    ) -> None:
        self.loss = loss
        self._local_logits, self._hidden = local_logits, hidden
        self._borders = borders
        self._logits: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        """Logits ``[N, S, vocab_size]`` of the caller's batch, gathered when first read.

        Collective: all ranks of the tensor-parallel group have to read it.

        Raises:
            RuntimeError: ``fused_linear_cross_entropy`` computed the loss without them.
        """
        if self._logits is None:
            if self._local_logits is None:
                raise unreadable()
            self._logits = self._borders.logits(self._local_logits)
        return self._logits

    @property
    def hidden_states(self) -> Tensor:
        """Input of the head, ``[N, S, H]``. Collective as `logits`."""
        return self._borders.leave(self._hidden)

    def __getitem__(self, key: str | int) -> Tensor:
        if key in ("loss", 0):
            return self.loss
        if key in ("logits", 1):
            return self.logits
        raise (IndexError if isinstance(key, int) else KeyError)(key)

    def __iter__(self) -> Iterator[Tensor]:
        yield self.loss
        yield self.logits


class _Borders:
    """The conversion of split tensors to those of the caller.

    Args:
        layout: layout of the stack.
        sizes: sizes of the parts of the vocabulary.
        extent: length of the sequence.
    """

    def __init__(self, layout: Layout, sizes: list[int], extent: int) -> None:
        self._layout, self._sizes, self._extent = layout, sizes, extent

    def logits(self, local: Tensor) -> Tensor:
        return join_features(local, self._sizes, self._layout)

    def leave(self, hidden: Tensor) -> Tensor:
        return self._layout.leave(hidden, self._extent)


def _flatten_output(output: LMHeadOutput) -> tuple[list[Any], _Borders]:
    return [output.loss, output._local_logits, output._hidden], output._borders


def _unflatten_output(members: Any, borders: _Borders) -> LMHeadOutput:
    loss, local_logits, hidden = members
    return LMHeadOutput(loss, local_logits, hidden, borders)


pytree.register_pytree_node(
    LMHeadOutput,
    _flatten_output,
    _unflatten_output,
    serialized_type_name="smp.nn.LMHeadOutput",
)


class VocabularyHead(nn.Module):
    """A head that computes logits of this rank's part of the vocabulary, and the loss from them.

    Args:
        embedding: embedding whose table is used; None for an own table.
        vocab_size, hidden_size: rows and columns of the whole table.
        bias: the head has a bias.
        std: standard deviation of the initial table.
        layout: layout of the hidden states.

    Attributes:
        fuses_loss: losses are computed without logits.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    adds_bias = True
    fuses_loss = False

    def __init__(
        self,
        embedding: VocabularyEmbedding | None,
        vocab_size: int,
        hidden_size: int,
        bias: bool,
        std: float,
        layout: Layout,
    ) -> None:
        super().__init__()
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self._std, self._layout = std, layout
        self._sizes = split_or_refuse(vocab_size, "vocab_size")
        self._begin = sharding.begin_of(self._sizes)
        self._is_tied = embedding is not None
        if embedding is None:
            add_split(self, "weight", [vocab_size, hidden_size], 0, self._sizes)
        else:
            self.weight = embedding.weight
        if bias:
            add_split(self, "bias", [vocab_size], 0, self._sizes)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises this rank's part, except a table that is shared with the embedding."""
        if not self._is_tied:
            fill(self.weight, lambda t: t.normal_(0.0, self._std))
        if self.bias is not None:
            fill(self.bias, Tensor.zero_)

    def forward(
        self, hidden: Tensor, targets: Tensor | None, extent: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Computes losses and logits. Collective over the tensor-parallel group.

        Args:
            hidden: hidden states in the layout.
            targets: ``[all B, S]``, `IGNORE_INDEX` where there is none; None for no losses.
            extent: length of the sequence.

        Returns:
            Loss per target ``[all B, S]`` or None, and logits ``[all B, S, own part]``, or None if
            the loss is computed without them.
        """
        if targets is not None and self.fuses_loss:
            order = self._layout.order_of(targets)
            losses = linear_cross_entropy(
                self._layout.gathered(hidden, order, extent),
                self.weight,
                targets if order is None else order.blocks(targets),
                bias=self.bias,
                ignore_index=IGNORE_INDEX,
                reduction="none",
                begin=self._begin,
                vocab_size=self.vocab_size,
            )
            return losses if order is None else order.sorted(losses), None
        local = self._layout.columns(hidden, [self], extent)[0]
        if targets is None:
            return None, local
        losses = regions.vocabulary_cross_entropy(
            local.flatten(0, -2),
            targets.flatten(),
            self._begin,
            ignore_index=IGNORE_INDEX,
            vocab_size=self.vocab_size,
        )
        return losses.view(targets.shape), local

    def borders(self, extent: int) -> _Borders:
        """Returns the conversion of logits to those of the caller."""
        return _Borders(self._layout, self._sizes, extent)

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, {self.vocab_size}, local rows {self.weight.shape[0]}"
