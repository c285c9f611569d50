"""Attention inside of blocks that compute a part of the tokens: it reads all tokens of some heads.

The exchange of tokens against heads is that of DeepSpeed-Ulysses (Jacobs et al. 2023,
arXiv:2309.14509). What computes attention stays what it is and sees whole sequences, so masks,
windows, sinks and caps mean what they mean in one process. Three ways lead there: functions that
transformers' ``AttentionInterface`` returns, methods ``_attn(query, key, value, ...)`` of modules,
and ``scaled_dot_product_attention`` of PyTorch. Calls that the arguments of the last one say in
full may go around a `ring` instead; there blocks of keys replace what computes attention. Code that
has taken another way, or has imported PyTorch's function by name, mixes tokens in the eyes of a
block's trial.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import checkpoint

import smp._C as _C
from smp.context_parallel import regions
from smp.context_parallel.parts import Heads, Interval, mapped, share_heads
from smp.context_parallel.ring import attend_in_ring
from smp.context_parallel.ring_work import DotProducts, Rings


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
    """A call of attention.

    Attributes:
        query: ``[B, heads, Q, D]``.
        key, value: ``[B, heads of keys, K, D]``.
        further: mask and other arguments, by name; tensors in it are of all tokens and heads.
        run: computes attention of a share of the heads, or of all where it is None; gets queries,
            keys, values and `further`.
        tokens_dim, heads_dim: dims of the result.
        owner: module whose attention it is; None if it is not known.
        products: returns arguments of PyTorch's function that say all about the call, if there are
            such; gets the number of all tokens.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    further: dict[str, Any]
    run: Callable[[Tensor, Tensor, Tensor, dict[str, Any], Share | None], Tensor]
    tokens_dim: int
    heads_dim: int
    owner: Any = None
    products: Callable[[int], DotProducts | None] = lambda length: None

    def heads(self, size: int) -> Heads:
        """Returns the shares of so many ranks.

        Raises:
            CannotShare: a rank would have no head, or tensors have other dims.
        """
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
    """An owner of attention during a block's call.

    Attributes:
        has_second_runs: whether checkpoints inside of the block may run it again; else they are
            plain calls.
    """

    has_second_runs: bool

    def attend(self, call: Call) -> Tensor: ...


_handler: ContextVar[Handler | None] = ContextVar("smp_context_attention", default=None)


@contextlib.contextmanager
def handled_by(handler: Handler | None) -> Iterator[None]:
    """Hands the calls of attention in this context to a handler; None: they are PyTorch's."""
    token = _handler.set(handler)
    try:
        yield
    finally:
        _handler.reset(token)


def _handle(call: Call) -> Tensor:
    handler = _handler.get()
    assert handler is not None
    with handled_by(None):  # what computes attention may call attention
        return handler.attend(call)


# ---- what is replaced while models compute parts of sequences


class _Replaced:
    """Functions of PyTorch and transformers in which code of blocks arrives.

    A second run of a checkpoint of PyTorch gets the handler of the first run.
    """

    def __init__(self) -> None:
        self._num_users = 0
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Replaces the functions, for one more model."""
        self._num_users += 1
        if self._num_users > 1:
            return
        self._replace(F, "scaled_dot_product_attention", _as_function)
        self._replace(checkpoint, "_checkpoint_without_reentrant_generator", _carrying(0))
        forward = functools.partial(_carrying(1), is_static=True)
        self._replace(checkpoint.CheckpointFunction, "forward", forward)
        inherited = checkpoint.CheckpointFunction.apply
        holder: Any = checkpoint.CheckpointFunction
        holder.apply = staticmethod(_as_apply(inherited))
        self._undo.append(functools.partial(delattr, checkpoint.CheckpointFunction, "apply"))
        try:
            from transformers.modeling_utils import AttentionInterface
        except ImportError:
            return
        if hasattr(AttentionInterface, "get_interface"):  # earlier releases call PyTorch's function
            self._replace(AttentionInterface, "get_interface", _as_interface)

    def end(self) -> None:
        """Restores them with the last model."""
        self._num_users -= 1
        if self._num_users == 0:
            for undo in self._undo:
                undo()
            self._undo = []

    def _replace(self, holder: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        original = holder.__dict__[name]
        function = original.__func__ if isinstance(original, staticmethod) else original
        setattr(holder, name, wrapper(function))
        self._undo.append(functools.partial(setattr, holder, name, original))


replaced = _Replaced()


def _carrying(position: int) -> Callable[..., Any]:
    """Returns a wrapper of a function that gets a function to run twice, at this position."""

    def wrapper(original: Callable[..., Any], is_static: bool = False) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            handler = _handler.get()
            if handler is None:
                return original(*args, **kwargs)
            if not handler.has_second_runs:
                return iter((None,))  # around a plain call
            given = list(args)
            given[position] = _with_handler(given[position], handler)
            return original(*given, **kwargs)

        return staticmethod(call) if is_static else call

    return wrapper


def _as_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original, assigned=())
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        handler = _handler.get()
        if handler is None or handler.has_second_runs:
            return original(function, preserve, *args)
        return function(*args)

    return apply


def _with_handler(function: Callable[..., Any], handler: Handler) -> Callable[..., Any]:
    @functools.wraps(function, assigned=())
    def run(*args: Any, **kwargs: Any) -> Any:
        with handled_by(handler):
            return function(*args, **kwargs)

    return run


# ---- PyTorch's own function


def _as_function(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def attention(*args: Any, **kwargs: Any) -> Tensor:
        if _handler.get() is None:
            return original(*args, **kwargs)
        return _attend(original, *args, **kwargs)

    return attention


def _attend(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    def run(
        query: Tensor, key: Tensor, value: Tensor, further: dict[str, Any], share: Share | None
    ) -> Tensor:
        mask = _shared(further, share)["attn_mask"]
        return original(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    products = _products(query, key, value, attn_mask, dropout_p, is_causal, scale)
    call = Call(query, key, value, {"attn_mask": attn_mask}, run, 2, 1, None, lambda _: products)
    return _handle(call)


def _products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
) -> DotProducts | None:
    """Returns the form of a call that can be computed by blocks of keys, or None."""
    can_read = mask is None or (mask.dim() >= 2 and not mask.is_meta and not mask.requires_grad)
    if dropout > 0 or not can_read or query.shape[2] != key.shape[2]:
        return None
    return DotProducts(mask, is_causal, scale)


def _shared(further: dict[str, Any], share: Share | None) -> dict[str, Any]:
    """Returns further arguments, of a share of the heads where they have a value for each."""
    if share is None:
        return further
    return {name: share.of_argument(value) for name, value in further.items()}


# ---- functions of transformers


def _as_interface(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(self, *args, **kwargs)
        return function if _handler.get() is None else functools.partial(_attend_in, function)

    return get_interface


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

    def run(
        query: Tensor, key: Tensor, value: Tensor, further: dict[str, Any], share: Share | None
    ) -> Tensor:
        named = dict(_shared(further, share))
        mask = named.pop(_MASK)
        owner = module if share is None else _OfShare(module, share)
        result: Tensor = function(owner, query, key, value, mask, **named)[0]
        return result

    further = {_MASK: attention_mask, **kwargs}

    def products(length: int) -> DotProducts | None:
        """Runs the function without data, and sees how it calls that of PyTorch."""
        seen = _Seen()
        shapes = [(*x.shape[:2], length, x.shape[3]) for x in (query, key, value)]
        of_all = [torch.empty(shape, dtype=query.dtype, device="meta") for shape in shapes]
        try:
            with handled_by(seen), torch.no_grad():
                function(module, *of_all, attention_mask, **kwargs)
        except Exception:  # code that needs numbers computes attention itself
            return None
        return seen.products if seen.num_calls == 1 else None

    call = Call(query, key, value, further, run, 1, 2, module, products)
    return _handle(call), None


class _Seen:
    """Notes the form of calls without data.

    Attributes:
        products: form of the last call, if blocks of keys can compute it.
        num_calls: number of calls.
    """

    has_second_runs = False

    def __init__(self) -> None:
        self.products: DotProducts | None = None
        self.num_calls = 0

    def attend(self, call: Call) -> Tensor:
        self.num_calls += 1
        self.products = call.products(call.query.shape[2])
        return call.query.new_empty(*call.query.shape[:3], call.value.shape[-1])


_MASK = "attention_mask"


class _OfShare:
    """A module of attention as its function sees it that computes a share of the heads."""

    def __init__(self, module: Any, share: Share) -> None:
        self._module, self._share = module, share

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "num_key_value_groups":
            return self._share.group
        return self._share.of_argument(value) if isinstance(value, Tensor) else value


# ---- methods of modules


def watch_methods(block: nn.Module) -> list[Callable[[], Any]]:
    """Watches methods ``_attn(query, key, value, ...)``, as GPT-J and others have them.

    A method returns the result, ``[B, heads, tokens, D]``, and weights of attention. Only its
    module's instance is changed.

    Args:
        block: block with the modules.

    Returns:
        functions that undo it.
    """
    undo: list[Callable[[], Any]] = []
    for module in block.modules():
        method = getattr(type(module), _METHOD, None)
        if _METHOD not in module.__dict__ and method is not None and _is_attention(method):
            # The method is bound, so that a deep copy has its own.
            module.__dict__[_METHOD] = types.MethodType(_as_method(method), module)
            undo.append(functools.partial(module.__dict__.pop, _METHOD, None))
    return undo


_METHOD = "_attn"


def _is_attention(method: Callable[..., Any]) -> bool:
    return list(inspect.signature(method).parameters)[1:4] == ["query", "key", "value"]


def _as_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def attend(
        self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if _handler.get() is None:
            return method(self, query, key, value, *args, **kwargs)

        further = {**{str(idx): x for idx, x in enumerate(args)}, **kwargs}

        def run(
            query: Tensor, key: Tensor, value: Tensor, further: dict[str, Any], share: Share | None
        ) -> Tensor:
            found = list(_shared(further, share).values())
            named = dict(zip(kwargs, found[len(args) :], strict=True))
            result: Tensor = method(self, query, key, value, *found[: len(args)], **named)[0]
            return result

        return _handle(Call(query, key, value, further, run, 2, 1, owner=self)), None

    return attend


# ---- in parts


@dataclass(frozen=True)
class Form:
    """Parts and wholes among the arguments of a call of attention, as a trial has seen them.

    Attributes:
        queries_cut, keys_cut: queries, or keys and values, are of this rank's part of the tokens.
        further: names of further arguments that are so, and their dims.
        in_ring: whether blocks of keys give the same result, so that they may go around a ring.
    """

    queries_cut: bool
    keys_cut: bool
    further: tuple[tuple[str, int], ...] = ()
    in_ring: bool = False


class Exchange:
    """Handles attention in a block that computes a part of the tokens.

    Args:
        forms: forms of the calls, each with the module that it belongs to.
        length: number of tokens of all ranks.
        rings: rings of the group.

    Attributes:
        num_in_ring: number of calls that went around rings.
    """

    has_second_runs = True

    def __init__(self, forms: Sequence[tuple[Any, Form]], length: int, rings: Rings) -> None:
        self._forms, self._length, self._rings = forms, length, rings
        self._num_calls = self.num_in_ring = 0

    def attend(self, call: Call) -> Tensor:
        form = self._form(call)
        if not form.queries_cut:
            return call.run(call.query, call.key, call.value, call.further, None)
        if form.in_ring and (products := call.products(self._length)) is not None:
            return self._in_ring(call, products)
        heads = self._heads(call, form)
        share = call.share(heads)
        query = regions.to_heads(call.query, self._length, heads.queries)
        key, value = (self._keys(x, heads, form) for x in (call.key, call.value))
        dims, sizes = dict(form.further), regions.sizes_of(self._length)

        def whole(name: str, x: Tensor) -> Tensor:
            dim = dims.get(name)
            return x if dim is None else regions.gather(x, dim, sizes)

        output = call.run(query, key, value, mapped(call.further, "", whole), share)
        return regions.to_tokens(output, call.tokens_dim, call.heads_dim, heads.queries)

    def _heads(self, call: Call, form: Form) -> Heads:
        """Returns the shares of all ranks.

        Raises:
            RuntimeError: the call was to go around a ring, and there are more ranks than heads.
        """
        try:
            return call.heads(regions.group().size)
        except CannotShare as reason:
            if not form.in_ring:
                raise
            raise RuntimeError(
                f"{_C.rank_prefix()}this call of attention cannot go around a ring, as it drops "
                f"elements or has a mask with gradients, and {reason}. Set dropout of attention to "
                "0, or lower context_parallel_degree to the number of heads"
            ) from reason

    def _in_ring(self, call: Call, products: DotProducts) -> Tensor:
        heads = call.heads(self._rings.on_host)
        key, value = (repeated(x, heads) for x in (call.key, call.value))
        query, key, value = _cast(call.query, key, value)
        self.num_in_ring += 1
        output = attend_in_ring(query, key, value, heads, products, self._rings, self._length)
        return output.movedim((1, 2), (call.heads_dim, call.tokens_dim))

    def _form(self, call: Call) -> Form:
        """Returns the form of a call; runs of checkpoints repeat calls in any order."""
        self._num_calls += 1
        of_owner = {form for owner, form in self._forms if owner is call.owner}
        own = regions.own(self._length).size
        pairs = [(call.query, "queries_cut"), (call.key, "keys_cut")]
        found = [
            form
            for form in of_owner
            if all(x.shape[-2] == own or not getattr(form, name) for x, name in pairs)
        ]
        if self._num_calls <= len(self._forms):
            owner, form = self._forms[self._num_calls - 1]
            if owner is call.owner and form in found:
                return form
        if len(found) == 1:
            return found[0]
        raise RuntimeError(
            f"{_C.rank_prefix()}attention got queries {list(call.query.shape)} and keys "
            f"{list(call.key.shape)} in a block that computes {own} of {self._length} tokens; "
            "whether they are of all tokens cannot be told. Pad the sequence of the encoder, or of "
            "the decoder, to another length"
        )

    def _keys(self, x: Tensor, heads: Heads, form: Form) -> Tensor:
        x = repeated(x, heads)
        if form.keys_cut:
            return regions.to_heads(x, self._length, heads.keys)
        return Interval.of_rank(heads.keys, regions.group().group_rank).of(x, 1)


def _cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns tensors of the dtype to which autocast brings those of PyTorch's function."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype is torch.float64:
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)


def repeated(x: Tensor, heads: Heads) -> Tensor:
    """Returns keys or values with each head as often as ranks need it."""
    return x if heads.repeats == 1 else x.repeat_interleave(heads.repeats, 1)
