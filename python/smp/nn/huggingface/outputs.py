"""Results in the classes of transformers, with logits that are gathered when they are read."""

from __future__ import annotations

import functools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from smp.nn.lm_head import LMHeadOutput

# Result classes of transformers are ordered dictionaries whose entries are attributes as well.
if TYPE_CHECKING:
    _Base = OrderedDict[str, Any]
else:
    _Base = object
_LOGITS = "logits"


class Source(Protocol):
    """An object with logits that are gathered on all ranks of the group when they are read."""

    @property
    def logits(self) -> Tensor: ...


class _Unread:
    """A placeholder in a dictionary for logits that have not been read yet.

    Args:
        source: object that has the logits.
        keep: positions of logits, see `keep_logits`.
    """

    def __init__(self, source: Source, keep: int | Tensor) -> None:
        self.source, self.keep = source, keep

    def read(self) -> Tensor:
        return keep_logits(self.source.logits, self.keep)


class _LazyOutput(_Base):
    """The first base of the classes below; gathers logits before it returns them in any way."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Keeps transformers from registering the class for pytrees in its own way."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:  # a caller copies a result with other values
            return cls.__mro__[2](*args, **kwargs)
        return super().__new__(cls)

    def __init__(self) -> None:
        """Sets nothing: entries are set one by one."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return tuple(self[name] for name in list(self.keys())[key])
        if isinstance(key, int):
            return self[list(self.keys())[key]]
        value = dict.__getitem__(self, key)
        if isinstance(value, _Unread):
            value = value.read()
            OrderedDict.__setitem__(self, key, value)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        OrderedDict.__setitem__(self, key, value)
        if key != _LOGITS:
            object.__setattr__(self, key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if value is None and name not in self:
            object.__setattr__(self, name, value)
        else:
            self[name] = value

    @property
    def logits(self) -> Any:
        """Logits ``[N, S, vocab_size]``. The first read is collective over the group."""
        return self.get(_LOGITS)

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default

    def values(self) -> Any:
        return [self[name] for name in self.keys()]

    def items(self) -> Any:
        return [(name, self[name]) for name in self.keys()]

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())

    def copy(self) -> Any:
        return _rebuild(type(self).__mro__[2], dict(self._entries()))

    def __reduce__(self) -> Any:
        return _rebuild, (type(self).__mro__[2], dict(self._entries()))

    def __repr__(self) -> str:
        entries = ", ".join(
            f"{name}={'(not read)' if isinstance(value, _Unread) else repr(value)}"
            for name, value in self._entries()
        )
        return f"{type(self).__name__}({entries})"

    def _entries(self) -> list[tuple[str, Any]]:
        """Returns the entries of the dictionary without reading logits."""
        return [(name, dict.__getitem__(self, name)) for name in self.keys()]


_lazy_classes: dict[type[Any], type[Any]] = {}


def _lazy_class(base: type[Any]) -> type[Any]:
    """Returns the lazy subclass of a result class of transformers, made once."""
    if base in _lazy_classes:
        return _lazy_classes[base]
    members = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    made = _lazy_classes[base] = type(base.__name__, (_LazyOutput, base), members)
    pytree.register_pytree_node(
        made,
        _flatten,
        functools.partial(_unflatten, base),
        serialized_type_name=f"smp.nn.huggingface.{base.__module__}.{base.__name__}",
    )
    return made


def _flatten(output: _LazyOutput) -> tuple[list[Any], list[Any]]:
    names: list[Any] = []
    values: list[Any] = []
    for name, value in output._entries():
        if isinstance(value, _Unread):
            names.append((name, value.keep))
            values.append(value.source)
        else:
            names.append((name, None))
            values.append(value)
    return values, names


def _unflatten(base: type[Any], values: Any, names: list[Any]) -> Any:
    entries = {}
    for (name, keep), value in zip(names, values, strict=True):
        entries[name] = value if keep is None else _Unread(value, keep)
    return _rebuild(base, entries)


def _rebuild(base: type[Any], entries: dict[str, Any]) -> Any:
    output = _lazy_class(base)()
    for name, value in entries.items():
        output[name] = value
    return output


def lazy_output(base: type[Any], source: LMHeadOutput, keep: int | Tensor) -> Any:
    """Returns a result with a loss and with logits that are gathered when they are read.

    Args:
        base: class of transformers; the result is an instance of it.
        source: object that has loss and logits.
        keep: positions of logits, see `keep_logits`.
    """
    return _rebuild(base, {"loss": source.loss, _LOGITS: _Unread(source, keep)})


def lazy_result(base: type[Any], entries: dict[str, Any]) -> Any:
    """Returns a plain model's result with logits that are gathered when they are read.

    Args:
        base: class of the result, which is an instance of it.
        entries: entries by name; "logits" is the object that has them.
    """
    return _rebuild(base, {**entries, _LOGITS: _Unread(entries[_LOGITS], 0)})


def is_lazy(output: Any) -> bool:
    """Returns whether a result already gathers its logits when they are read."""
    return isinstance(output, _LazyOutput)


def ready_entries(output: Any) -> dict[str, Any]:
    """Returns the entries of a lazy result except logits that are not gathered yet."""
    return {k: value for k, value in output._entries() if not isinstance(value, _Unread)}


def keep_logits(logits: Tensor, keep: int | Tensor) -> Tensor:
    """Returns the logits at the positions that ``logits_to_keep`` asks for.

    Args:
        logits: ``[N, S, vocab_size]``.
        keep: number of positions at the end, 0 for all; or indices ``[n]`` or ``[N, n]``; or a
            boolean mask ``[N, S]``.
    """
    if isinstance(keep, Tensor) and keep.dim() == 2:
        if keep.dtype == torch.bool:
            return logits[keep]
        return torch.take_along_dim(logits, keep[..., None], dim=1)
    if isinstance(keep, Tensor):
        return logits[:, keep]
    return logits[:, -keep:] if keep else logits
