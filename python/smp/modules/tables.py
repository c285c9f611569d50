"""Tables of a module's parameters and buffers in which each microbatch may replace tensors.

``torch.func.functional_call`` and similar code write tensors into a module, call it, and write the
module's own tensors back. Microbatches take turns on one module, so another one may run in between:
it would compute with these tensors, and take one of them for the module's own. Therefore only the
microbatch that has written a tensor sees it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch
from torch import nn

import smp._C as _C
from smp.modules import packed

TABLES = ("_parameters", "_buffers")
_SETS_ATTRIBUTE = nn.Module.__setattr__.__code__
_MISSING = object()


class Swaps:
    """Replacements of parameters and buffers of one model by microbatches.

    Args:
        context: function that returns the running microbatch's context, or None outside.
    """

    def __init__(self, context: Callable[[], Hashable | None]) -> None:
        self.context = context
        self.swapped: dict[int, Table] = {}

    def refuse_left(self) -> None:
        """Restores the module's own tensors, and raises if code of a step has not done so.

        Raises:
            RuntimeError: a tensor was left; the message names the parameter or buffer.
        """
        tables = self.swapped.values()
        left = [f"'{table.name_of(name)}'" for table in tables for name in table.left()]
        self.forget()
        if left:
            raise RuntimeError(
                f"{_C.rank_prefix()}code of the step has put other tensors in the place of "
                f"{', '.join(sorted(set(left))[:4])} and left them there, where microbatches share "
                "the module, so the next one would compute with them; put the module's own back "
                "(torch.func.functional_call does), or write into them between steps"
            )

    def forget(self) -> None:
        """Removes all replacements."""
        for table in list(self.swapped.values()):
            table.restore()


class Table(dict[str, Any]):
    """Parameters or buffers by name. Reading costs nothing extra until a tensor is replaced."""

    _swapping: type[Table]
    _plain: type[Table]
    _swaps: Swaps | None = None
    _path = ""
    _others: dict[tuple[Hashable, str], Any]
    _is_of_buffers = False

    def take_part(self, swaps: Swaps, path: str, is_of_buffers: bool) -> None:
        """Lets microbatches replace tensors from now on.

        Args:
            swaps: replacements of the model.
            path: path of the module.
            is_of_buffers: whether an assignment by a forward (``self.count = ...``) is no swap.
        """
        self._swaps, self._path, self._is_of_buffers = swaps, path, is_of_buffers
        self._others = {}

    def name_of(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def left(self) -> list[str]:
        return [name for _, name in self._others]

    def restore(self) -> None:
        """Removes all replacements in this table."""
        assert self._swaps is not None
        self._others.clear()
        self._swaps.swapped.pop(id(self), None)
        self.__class__ = self._plain

    def __setitem__(self, name: str, value: Any) -> None:
        if packed.is_same(value, dict.get(self, name)):
            return  # PEFT moves quantized weights to the device that they are on
        context = None if self._swaps is None else self._swaps.context()
        if context is None or not dict.__contains__(self, name):
            super().__setitem__(name, value)
            return
        if self._is_of_buffers and sys._getframe(1).f_code is _SETS_ATTRIBUTE:
            super().__setitem__(name, value)
            return
        assert self._swaps is not None
        if value is dict.__getitem__(self, name):
            if self._others.pop((context, name), _MISSING) is not _MISSING and not self._others:
                self.restore()
            return
        self._others[context, name] = value
        self._swaps.swapped[id(self)] = self
        self.__class__ = self._swapping

    def __delitem__(self, name: str) -> None:
        if self._swaps is not None and self._swaps.context() is not None:
            raise RuntimeError(
                f"{_C.rank_prefix()}code of the step deletes '{self.name_of(name)}' of a module "
                "that microbatches share, so others that run meanwhile would miss it; call the "
                "module with other tensors through torch.func.functional_call, or delete it "
                "between steps"
            )
        super().__delitem__(name)

    def read_all(self) -> dict[str, Any]:
        """Returns the tensors that a reader finds now, as a plain dictionary."""
        return dict(self.items())

    def take_over(self, plain: Mapping[str, Any]) -> None:
        """Writes the changes that were made to a dictionary of `read_all` into this table."""
        now = dict(self.items())
        for name, value in plain.items():
            if now.get(name, _MISSING) is not value:
                dict.__setitem__(self, name, value)

    def __reduce__(self) -> Any:
        """Copies and pickles as a plain dictionary."""
        return dict, (self.read_all(),)


class Swapping(Table):
    """A table while a microbatch has replaced one of its tensors."""

    def __getitem__(self, name: str) -> Any:
        other = self._other(name)
        return super().__getitem__(name) if other is _MISSING else other

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        return self._overlay(super().items()).items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return self._overlay(super().items()).values()

    def copy(self) -> dict[str, Any]:
        return self.read_all()

    def __iter__(self) -> Iterator[str]:
        """Iterates like a dictionary; its existence makes ``dict(table)`` ask for each item."""
        return super().__iter__()

    def _other(self, name: str) -> Any:
        assert self._swaps is not None
        return self._others.get((self._swaps.context(), name), _MISSING)

    def _overlay(self, items: ItemsView[str, Any]) -> dict[str, Any]:
        others = {name: self._other(name) for name in dict.keys(self)}
        return {k: v if others[k] is _MISSING else others[k] for k, v in items}


Table._swapping, Table._plain = Swapping, Table


def table_of(module: nn.Module, key: str) -> Table | None:
    """Returns the parameters or buffers of a module if they are a `Table`, else None."""
    found = module.__dict__[key]
    return found if isinstance(found, Table) else None


def hold_packed(root: nn.Module, half: torch.dtype | None) -> None:
    """Makes modules with quantized weights keep their parameter objects when code moves them.

    DoRA of PEFT writes ``weight.to(device)``, a new object with the same memory, into its base
    layer in each forward on the CPU.

    Args:
        root: the user's model.
        half: 16-bit dtype of training, or None.

    Raises:
        ValueError: see `packed.prepare`.
    """
    packed.prepare(root, half)
    for module in root.modules():
        plain = module.__dict__["_parameters"]
        if not isinstance(plain, Table) and any(
            p is not None and packed.is_packed(p) for p in plain.values()
        ):
            module.__dict__["_parameters"] = Table(plain)


def use_plain(module: nn.Module) -> None:
    """Replaces tables in which microbatches replace tensors by plain copies of what is read now.

    Args:
        module: a module whose attributes the caller restores.
    """
    for key in TABLES:
        table = table_of(module, key)
        if table is not None and table._swaps is not None:
            module.__dict__[key] = table.read_all()


def keep_apart(module: nn.Module, path: str, swaps: Swaps) -> Callable[[], None]:
    """Lets each microbatch replace parameters and buffers of a module.

    Args:
        module: module of the user.
        path: path of the module in the model.
        swaps: replacements of the model.

    Returns:
        function that undoes it; may be called twice.
    """
    made: list[tuple[str, Table]] = []
    for key in TABLES:
        plain = module.__dict__[key]
        if not plain:
            continue
        table = plain if isinstance(plain, Table) else Table(plain)
        table.take_part(swaps, path, key == "_buffers")
        if table is not plain:
            module.__dict__[key] = table
            made.append((key, table))

    def undo() -> None:
        for key, table in made:
            if module.__dict__[key] is table:
                module.__dict__[key] = dict(table)

    return undo
