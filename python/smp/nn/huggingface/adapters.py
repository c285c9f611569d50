"""Conversion of arguments and results between callers and distributed forms of modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.modules.host_values import is_known_zero, mapped, on_host
from smp.nn import layout as layouts
from smp.nn.huggingface.family import Family, Kind
from smp.nn.huggingface.outputs import keep_logits, lazy_output
from smp.nn.lm_head import LMHeadOutput
from smp.tensor_parallel.registry import Adapter, Arguments

_TAKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "labels")
_KEEP = ("logits_to_keep", "num_logits_to_keep")
_CACHES = ("past_key_values", "past_key_value", "layer_past")
_CROSS = ("encoder_hidden_states", "encoder_attention_mask")


class _Given:
    """The arguments of one call by name, as the installed class binds them.

    Args:
        family: name of the family, for messages.
        signature: signature of the original's ``forward``, without ``self``.
        args, kwargs: arguments of the call.
    """

    def __init__(
        self, family: str, signature: inspect.Signature, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self._family = family
        bound = signature.bind(*args, **kwargs)
        self._values: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                self._values |= value
            else:
                self._values[name] = value

    def take(self, name: str, default: Any = None) -> Any:
        """Removes an argument and returns it."""
        value = self._values.pop(name, None)
        return default if value is None else value

    def take_keep(self) -> int | Tensor:
        """Removes and returns the caller's choice of logits, see `keep_logits`."""
        kept = [self._values.pop(name, 0) for name in _KEEP]
        return next((k for k in kept if isinstance(k, Tensor) or k), 0)

    def take_fresh_caches(self, length: int) -> None:
        """Removes caches that are empty or that plain layers filled in this call.

        Args:
            length: length of the sequence; a cache of earlier calls has more.
        """
        for name in _CACHES:
            cache = self._values.get(name)
            length_of = getattr(cache, "get_seq_length", None)
            if length_of is None:
                continue
            num_layers = len(getattr(cache, "layers", [None]))
            if max((int(length_of(i)) for i in range(num_layers)), default=0) <= length:
                del self._values[name]

    def take_what_attention_ignores(self) -> None:
        """Removes arguments that composite models pass to all layers and no layer uses.

        Layers pass all arguments that they do not name to a function for attention.
        """
        used = _used_by_attention()
        for name in [name for name in self._values if used and name not in used]:
            del self._values[name]

    def refuse_rest(self) -> None:
        """Raises ValueError if an argument is left that would have an effect."""
        for name, value in self._values.items():
            if not _is_nothing(value):
                raise self.error(
                    name,
                    "has no effect in a distributed model; leave it out, or call the plain model "
                    "with a translated state dict",
                )

    def error(self, name: str, problem: str) -> ValueError:
        """Returns the error for a problem with an argument."""
        return ValueError(f"{_C.rank_prefix()}{self._family}: argument '{name}' {problem}")


class ModelAdapter:
    """An adapter for one call of a model with or without a head.

    Args:
        family: family of the model.
        kind: "head" or "base".
        signature: signature of the original's ``forward``.
        module: the distributed module.
    """

    def __init__(
        self, family: Family, kind: Kind, signature: inspect.Signature, module: nn.Module
    ) -> None:
        self._family, self._kind, self._signature = family, kind, signature
        self._config = getattr(module, "config", None)
        self._is_crossing = _is_crossing(module)
        self._shape: torch.Size | None = None
        self._keep: int | Tensor = 0
        self._share: tuple[Tensor, Any] | None = None
        self._returns_dict = True

    def forward_args(self, *args: Any, **kwargs: Any) -> Arguments:
        given = _Given(self._family.names.family, self._signature, args, kwargs)
        self._returns_dict = given.take("return_dict", getattr(self._config, "return_dict", True))
        self._keep = given.take_keep()
        given.take("use_cache")
        ids, mask, token_types, positions, labels = (given.take(name) for name in _TAKEN)
        self._share = _share_of(labels, given.take("num_items_in_batch"))
        cross = [given.take(name) for name in _CROSS] if self._is_crossing else []
        given.refuse_rest()
        if ids is None:
            raise given.error("input_ids", "is missing")
        self._shape = ids.shape
        if ids.dim() < 2 or (ids.dim() > 2 and self._kind == "head"):
            raise given.error("input_ids", f"has shape {list(ids.shape)}; expected [N, S]")
        ids = ids.view(-1, ids.shape[-1])
        length = ids.shape[1]
        if token_types is not None:
            token_types = token_types.view(-1, length)
        if positions is not None:
            positions = mapped(lambda given: given.view(-1, length), positions)
            if mask is None and _is_packed(positions):
                raise given.error(
                    "position_ids",
                    "starts anew inside of a sample, which without attention_mask stands for "
                    "several sequences; give them as samples of their own",
                )
        masked = _masked(given, "attention_mask", mask, ids.shape)
        if cross:
            states, cross_mask = cross
            shape = None if states is None else states.shape[:2]
            cross = [states, _masked(given, "encoder_attention_mask", cross_mask, shape)]
        return ((ids, masked, token_types, positions, *cross, labels),), {}

    def wrap(self, output: Any) -> Any:
        if self._kind == "base":
            assert self._shape is not None
            return self._result(last_hidden_state=output.view(*self._shape, output.shape[-1]))
        if not isinstance(output, LMHeadOutput):
            return self._result(logits=keep_logits(output, self._keep))
        if self._share is not None:
            count, num_items = self._share
            # A mean over no tokens is NaN, and their sum zero.
            output.loss = torch.where(count > 0, output.loss * count / num_items, 0.0)
        if not self._returns_dict:
            return output.loss, keep_logits(output.logits, self._keep)
        return lazy_output(self._family.output_class(self._kind), output, self._keep)

    def _result(self, **entries: Tensor) -> Any:
        if not self._returns_dict:
            return tuple(entries.values())
        return self._family.output_class(self._kind)(**entries)


def _share_of(labels: Tensor | None, num_items: Any) -> tuple[Tensor, Any] | None:
    """Returns the number of tokens of the loss, and that of all batches that are accumulated."""
    if labels is None or num_items is None:
        return None
    return (labels[..., 1:] != -100).sum(), num_items


class StackAdapter:
    """An adapter for one call of an encoder's layers or of one layer.

    Args:
        family: family of the model.
        kind: "stack" or "layer".
        signature: signature of the original's ``forward``.
        module: the distributed module.
    """

    def __init__(
        self, family: Family, kind: Kind, signature: inspect.Signature, module: nn.Module
    ) -> None:
        self._family, self._kind, self._signature = family, kind, signature
        self._is_crossing = _is_crossing(module)
        self._returns_dict = True

    def forward_args(self, *args: Any, **kwargs: Any) -> Arguments:
        given = _Given(self._family.names.family, self._signature, args, kwargs)
        hidden = given.take("hidden_states")
        _refuse_captures(given)
        self._returns_dict = given.take("return_dict", True)
        mask, positions = given.take("attention_mask"), given.take("position_ids")
        cross = [given.take(name) for name in _CROSS] if self._is_crossing else []
        given.take_fresh_caches(hidden.shape[1] if self._kind == "layer" else 0)
        for name in ("use_cache", "position_embeddings", "cache_position"):
            given.take(name)
        if "output_attentions" not in self._signature.parameters:
            given.take_what_attention_ignores()
        given.refuse_rest()
        additive = _additive(given, "attention_mask", mask, hidden, hidden.shape[1])
        inputs: tuple[Tensor | None, ...] = (hidden, additive)
        if cross:
            states, cross_mask = cross
            if states is not None:
                length = states.shape[1]
                cross_mask = _additive(given, "encoder_attention_mask", cross_mask, hidden, length)
            elif cross_mask is not None:
                raise given.error("encoder_attention_mask", "needs encoder_hidden_states")
            inputs = (hidden, states, additive, cross_mask)
        if self._family.rotates and positions is not None:
            inputs += (positions.view(-1, hidden.shape[1]),)
        return (inputs,), {}

    def wrap(self, output: Any) -> Any:
        hidden = output[0]
        if self._kind == "stack":
            if not self._returns_dict:
                return (hidden,)
            return self._family.output_class(self._kind)(last_hidden_state=hidden)
        is_older = "output_attentions" in self._signature.parameters
        return (hidden, None) if is_older or self._family.layers_return_tuples else hidden


def adapter_maker(
    family: Family, kind: Kind, module_cls: type[nn.Module]
) -> Callable[[nn.Module], Adapter]:
    """Returns a function that makes adapters for calls of one class's replacements."""
    signature = inspect.signature(module_cls.forward)
    parameters = list(signature.parameters.values())[1:]
    signature = signature.replace(parameters=parameters)
    cls = ModelAdapter if kind in ("head", "base") else StackAdapter

    def make(module: nn.Module) -> Adapter:
        return cls(family, kind, signature, module)

    return make


def _used_by_attention() -> frozenset[str]:
    """Returns the arguments that attention functions use; empty in releases without such a list."""
    models = sys.modules.get("transformers.modeling_utils")
    flash = sys.modules.get("transformers.modeling_flash_attention_utils")
    functions = getattr(models, "ALL_ATTENTION_FUNCTIONS", None)
    if functions is None or flash is None:
        return frozenset()
    names = {*flash.FlashAttentionKwargs.__annotations__, "head_mask", "output_hidden_states"}
    for function in (*functions.values(), flash._flash_attention_forward):
        function = inspect.unwrap(function)
        names.update(inspect.signature(function).parameters)
        code = getattr(function, "__code__", None)  # kwargs.get("softcap")
        names.update(c for c in getattr(code, "co_consts", ()) if isinstance(c, str))
    return frozenset(names | set(_CACHES) | set(_CROSS))


def _is_crossing(module: nn.Module) -> bool:
    """Returns whether a model or layer has cross attention; encoders, without the field, do not."""
    return bool(getattr(module, "add_cross_attention", False))


def _is_nothing(value: Any) -> bool:
    """Returns whether a value is None, False, or None for each layer."""
    if isinstance(value, list | tuple):
        return all(part is None for part in value)
    return value is None or value is False


def _is_packed(positions: Tensor) -> bool:
    """Returns whether transformers 5 or later reads several sequences from these positions."""
    major = int(getattr(sys.modules.get("transformers"), "__version__", "0").split(".")[0])
    if major < 5:
        return False
    known = on_host(positions)
    return bool(((positions if known is None else known).diff(dim=-1) != 1).any())


def _masked(
    given: _Given, name: str, mask: Tensor | None, shape: torch.Size | None
) -> Tensor | None:
    """Returns True where the caller's mask, ``[N, S]``, is 0; None stays None."""
    if mask is None:
        return None
    if shape is not None and mask.dim() != 4 and mask.numel() == shape.numel():
        return mapped(lambda theirs: theirs.view(shape) == 0, mask)
    expected = "None" if shape is None else str(list(shape))
    raise given.error(
        name, f"has shape {list(mask.shape)}; expected {expected}, with 0 for what is masked"
    )


def _additive(given: _Given, name: str, mask: Any, hidden: Tensor, length: int) -> Tensor | None:
    """Returns a prepared mask as numbers added to scores, ``[N or 1, 1, S or 1, S]``.

    Releases leave a mask out where their samples need none. Ranks with own batches have to agree,
    so if one of them needs a mask, all get one.
    """
    layout = layouts.current()
    prepared = None if mask is None else _prepared(given, name, mask, hidden)
    says_nothing = prepared is None or (
        not prepared.requires_grad and is_known_zero(prepared)  # else it would get no gradient
    )
    if layout.all_say(says_nothing, "mask of which nothing is masked"):
        return None
    if prepared is None:
        return hidden.new_zeros(hidden.shape[0], 1, 1, length)
    return prepared.expand(hidden.shape[0], -1, -1, -1) if layout.has_own_batches else prepared


def _prepared(given: _Given, name: str, mask: Any, hidden: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise given.error(name, f"is {type(mask).__name__}; expected a tensor [N, 1, 1 or S, S]")
    if mask.dim() == 2:
        mask = (mask != 0)[:, None, None]
    if mask.dtype == torch.bool:
        lowest = torch.finfo(hidden.dtype).min
        mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill_(~mask, lowest)
    prepared: Tensor = mask
    rows = prepared[:, :, :1]
    # A mask on a device is not read: the host would wait for it, in each layer.
    looks = on_host(prepared) is not None
    if prepared.stride(2) == 0 or (looks and torch.equal(prepared, rows.expand_as(prepared))):
        return rows
    return prepared


def _refuse_captures(given: _Given) -> None:
    """Raises ValueError if transformers 5 or later collects layers' outputs by hooks."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    wanted = None if collector is None else collector.get()
    for name in wanted or ():
        raise given.error(f"output_{name}", "cannot be True in a distributed model")
