"""Attention inside of blocks that compute a part of the tokens: it reads all tokens of some heads.

The exchange of tokens against heads is that of DeepSpeed-Ulysses (Jacobs et al. 2023,
arXiv:2309.14509). What computes attention stays what it is and sees whole sequences, so masks,
windows, sinks and caps mean what they mean in one process. Two ways lead there: functions that
transformers' ``AttentionInterface`` returns, and ``scaled_dot_product_attention`` of PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from smp.context_parallel import regions
from smp.context_parallel.parts import Heads, Interval, share_heads


class CannotShare(Exception):
    """Heads cannot be shared by the ranks; the text is the end of a sentence."""


@dataclass(frozen=True)
class Share:
    """The heads of which attention is computed.

    Attributes:
        own: heads of the queries.
        num_heads: number of query heads of all ranks.
        group: number of query heads that read one head of keys.
    """

    own: Interval
    num_heads: int
    group: int

    def of_argument(self, x: Any) -> Any:
        """Returns an argument with a value for each head, of these heads; others unchanged."""
        if not isinstance(x, Tensor):
            return x
        dim = 0 if x.dim() == 1 else 1
        has_heads = x.dim() in (1, 4) and x.shape[dim] == self.num_heads > 1
        return self.own.of(x, dim) if has_heads else x


@dataclass
class Call:
    """One call of attention.

    Attributes:
        query: ``[B, heads, Q, D]``.
        key, value: ``[B, heads of keys, K, D]``.
        run: computes attention of a share of the heads, or of all where it is None.
        tokens_dim, heads_dim: dims of the result.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    run: Callable[[Tensor, Tensor, Tensor, Share | None], Tensor]
    tokens_dim: int
    heads_dim: int

    def heads(self) -> Heads:
        """Returns the shares of the ranks.

        Raises:
            CannotShare: a rank would have no head, or tensors have other dims.
        """
        size = regions.group().size
        shapes = [tuple(x.shape) for x in (self.query, self.key, self.value)]
        if any(len(shape) != 4 for shape in shapes):
            raise CannotShare(
                f"attention has queries, keys and values of shapes {shapes}, not four dims"
            )
        heads = share_heads(self.query.shape[1], self.key.shape[1], size)
        if heads is None or self.key.shape[1] != self.value.shape[1]:
            raise CannotShare(
                f"{shapes[0][1]} heads of queries and {shapes[1][1]} of keys cannot be shared by "
                f"{size} ranks"
            )
        return heads

    def share(self, heads: Heads) -> Share:
        """Returns what this rank computes."""
        rank = regions.group().group_rank
        own = Interval.of_rank(heads.queries, rank)
        return Share(own, sum(heads.queries), heads.queries[rank] // heads.keys[rank])


class Handler(Protocol):
    """An owner of attention during a block's call."""

    def attend(self, call: Call) -> Tensor: ...


_handler: ContextVar[Handler | None] = ContextVar("smp_context_attention", default=None)


@contextlib.contextmanager
def handled_by(handler: Handler | None) -> Iterator[None]:
    """Hands the calls of attention in this context to a handler; None: they are PyTorch's."""
    token = _handler.set(handler)
    try:
        with contextlib.nullcontext() if handler is None else _Mode():
            yield
    finally:
        _handler.reset(token)


def _handle(call: Call) -> Tensor:
    handler = _handler.get()
    assert handler is not None
    token = _handler.set(None)  # what computes attention may call attention
    try:
        return handler.attend(call)
    finally:
        _handler.reset(token)


# ---- PyTorch's own function


class _Mode(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention and _handler.get() is not None:
            return _attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    def run(query: Tensor, key: Tensor, value: Tensor, share: Share | None) -> Tensor:
        mask = attn_mask if share is None else share.of_argument(attn_mask)
        result: Tensor = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result

    return _handle(Call(query, key, value, run, tokens_dim=2, heads_dim=1))


# ---- functions of transformers


@functools.cache
def watch_transformers() -> None:
    """Makes transformers' functions of attention known to blocks, if it is installed."""
    try:
        from transformers.modeling_utils import AttentionInterface

        original = AttentionInterface.get_interface
    except (ImportError, AttributeError):
        return  # these releases call PyTorch's function

    @functools.wraps(original)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(self, *args, **kwargs)
        return function if _handler.get() is None else functools.partial(_attend_in, function)

    AttentionInterface.get_interface = get_interface


def _attend_in(
    function: Callable[..., Any],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Replaces a function of transformers. Weights of attention are not returned."""

    def run(query: Tensor, key: Tensor, value: Tensor, share: Share | None) -> Tensor:
        if share is None:
            output = function(module, query, key, value, attention_mask, **kwargs)
        else:
            own = {name: share.of_argument(x) for name, x in kwargs.items()}
            mask = share.of_argument(attention_mask)
            output = function(_OfShare(module, share), query, key, value, mask, **own)
        result: Tensor = output[0]
        return result

    return _handle(Call(query, key, value, run, tokens_dim=1, heads_dim=2)), None


class _OfShare:
    """A module of attention as its function sees it that computes a share of the heads."""

    def __init__(self, module: Any, share: Share) -> None:
        self._module, self._share = module, share

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "num_key_value_groups":
            return self._share.group
        return self._share.of_argument(value) if isinstance(value, Tensor) else value


# ---- in parts


@dataclass(frozen=True)
class Form:
    """What a block gives to one of its calls of attention, as its trial has seen.

    Attributes:
        queries_cut, keys_cut: queries, or keys and values, are of this rank's part of the tokens.
    """

    queries_cut: bool
    keys_cut: bool


class Exchange:
    """Handles attention in a block that computes a part of the tokens.

    Args:
        forms: forms of the calls, in their order.
        length: number of tokens of all ranks.
    """

    def __init__(self, forms: list[Form], length: int) -> None:
        self._forms, self._length, self._num_calls = forms, length, 0

    def attend(self, call: Call) -> Tensor:
        form = self._forms[self._num_calls]
        self._num_calls += 1
        if not form.queries_cut:
            return call.run(call.query, call.key, call.value, None)
        heads = call.heads()
        share = call.share(heads)
        query = regions.to_heads(call.query, self._length, heads.queries)
        key, value = (self._keys(x, heads, form) for x in (call.key, call.value))
        output = call.run(query, key, value, share)
        return regions.to_tokens(output, call.tokens_dim, call.heads_dim, heads.queries)

    def _keys(self, x: Tensor, heads: Heads, form: Form) -> Tensor:
        x = repeated(x, heads)
        if form.keys_cut:
            return regions.to_heads(x, self._length, heads.keys)
        return Interval.of_rank(heads.keys, regions.group().group_rank).of(x, 1)


def repeated(x: Tensor, heads: Heads) -> Tensor:
    """Returns keys or values with each head as often as ranks need it."""
    return x if heads.repeats == 1 else x.repeat_interleave(heads.repeats, 1)
