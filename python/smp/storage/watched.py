"""Notices when code reads the parameters of a module."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Mapping, ValuesView
from typing import Any

from torch import nn

from smp.modules.tables import Swapping, Table


class Watched(Table):
    """The parameters of a module, which reports each access in advance.

    An access is by name or by listing. Parents read parameters of children in this way, and a head
    reads the table of an embedding.

    Source: the idea is DeepSpeed's (ZeRO stage 3).
    """

    def __init__(
        self,
        parameters: Mapping[str, Any],
        keys: Mapping[str, int],
        read: Callable[[int], None],
        on_listing: bool,
    ) -> None:
        super().__init__(parameters)
        self._keys = keys
        self._read = read
        self._on_listing = on_listing

    def __getitem__(self, name: str) -> Any:
        key = self._keys.get(name)
        if key is not None:
            self._read(key)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._read_all()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._read_all()
        return super().values()

    def _read_all(self) -> None:
        for key in self._keys.values() if self._on_listing else ():
            self._read(key)

    def read_all(self) -> dict[str, Any]:
        """Returns all parameters, and reports each one in advance."""
        for key in self._keys.values():
            self._read(key)
        return super().read_all()


class SwappingWatched(Swapping, Watched):
    """Watched parameters while some microbatch has replaced one."""


Watched._swapping, Watched._plain = SwappingWatched, Watched


def watch_parameters(
    module: nn.Module,
    keys: Mapping[str, int],
    read: Callable[[int], None],
    *,
    on_listing: bool = True,
) -> Callable[[], None]:
    """Calls back before a parameter of a module is read, other than through a kept reference.

    Args:
        module: module of the user.
        keys: number of a parameter, by its name in the module; others are not watched.
        read: receives that number; must not read parameters itself.
        on_listing: whether it is called for all parameters when they are listed, for instance to
            look for the dtype or the device of a model.

    Returns:
        function that undoes it; may be called twice.
    """
    watched = Watched(module._parameters, keys, read, on_listing)
    module.__dict__["_parameters"] = watched

    def undo() -> None:
        if module.__dict__["_parameters"] is watched:
            module.__dict__["_parameters"] = dict(dict.items(watched))

    return undo
