"""The parameters and buffers of a module, of which a microbatch may put others into their place.

``torch.func.functional_call`` and code like it write tensors into a module, call it, and write the
module's own back. Microbatches take turns on one module, so another one may run in between: it
would compute with these tensors, and take one of them for the module's own. What such code writes
is therefore seen by the microbatch alone that has written it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any

from torch import nn

import smp._C as _C

TABLES = ("_parameters", "_buffers")
_SETS_ATTRIBUTE = nn.Module.__setattr__.__code__
_MISSING = object()


class Swaps:
    """What microbatches have put in the place of parameters and buffers of one model.

    Args:
        context: returns what is running now, or None outside of microbatches.
    """

    def __init__(self, context: Callable[[], Hashable | None]) -> None:
        self.context = context
        self.swapped: dict[int, Table] = {}

    def refuse_left(self) -> None:
        """Raises when code of a step has not put the module's own back, which is done here.

        Raises:
            RuntimeError: names the parameter or buffer.
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
        """Takes back all that was put there."""
        for table in list(self.swapped.values()):
            table.restore()


class Table(dict[str, Any]):
    """Parameters or buffers by name. Reading is that of a dictionary until something is swapped."""

    _swapping: type[Table]
    _plain: type[Table]
    _swaps: Swaps | None = None
    _path = ""
    _others: dict[tuple[Hashable, str], Any]
    _is_of_buffers = False

    def take_part(self, swaps: Swaps, path: str, is_of_buffers: bool) -> None:
        """From now on microbatches have their own.

        Args:
            swaps: of the model.
            path: of the module.
            is_of_buffers: a buffer that a forward assigns (``self.count = ...``) is no swap.
        """
        self._swaps, self._path, self._is_of_buffers = swaps, path, is_of_buffers
        self._others = {}

    def name_of(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def left(self) -> list[str]:
        return [name for _, name in self._others]

    def restore(self) -> None:
        """All read the module's own."""
        assert self._swaps is not None
        self._others.clear()
        self._swaps.swapped.pop(id(self), None)
        self.__class__ = self._plain

    def __setitem__(self, name: str, value: Any) -> None:
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
        """Returns what a reader finds now, in a dictionary that neither swaps nor reports."""
        return dict(self.items())

    def take_over(self, plain: Mapping[str, Any]) -> None:
        """Writes what was written to a dictionary of `read_all` since."""
        now = dict(self.items())
        for name, value in plain.items():
            if now.get(name, _MISSING) is not value:
                dict.__setitem__(self, name, value)

    def __reduce__(self) -> Any:
        """Copies and pickles are of a plain module."""
        return dict, (self.read_all(),)


class Swapping(Table):
    """A table while some microbatch has put something in the place of a tensor."""

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
        """Iterates as a dictionary, but ``dict(table)`` asks for each item because of it."""
        return super().__iter__()

    def _other(self, name: str) -> Any:
        assert self._swaps is not None
        return self._others.get((self._swaps.context(), name), _MISSING)

    def _overlay(self, items: ItemsView[str, Any]) -> dict[str, Any]:
        others = {name: self._other(name) for name in dict.keys(self)}
        return {k: v if others[k] is _MISSING else others[k] for k, v in items}


Table._swapping, Table._plain = Swapping, Table


def table_of(module: nn.Module, key: str) -> Table | None:
    """The parameters or buffers of a module, if they are such a table."""
    found = module.__dict__[key]
    return found if isinstance(found, Table) else None


def keep_apart(module: nn.Module, path: str, swaps: Swaps) -> Callable[[], None]:
    """Gives microbatches parameters and buffers of a module that they may swap.

    Args:
        module: of the user.
        path: of the module in the model.
        swaps: of the model.

    Returns:
        undoes it; may be called twice.
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
