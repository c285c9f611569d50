"""Notices when code reads the parameters of a module."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Mapping, ValuesView
from typing import Any

from torch import nn


class Watched(dict[str, Any]):
    """The parameters of a module. Access to one, by its name or by listing them, is reported
    before: that is how a parent reads its child's, and a head the table of an embedding.

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
        """All of them, each reported before; in a dictionary that reports nothing."""
        for key in self._keys.values():
            self._read(key)
        return dict(dict.items(self))

    def take_over(self, plain: Mapping[str, Any]) -> None:
        """Writes what was written to a dictionary of `read_all` since."""
        for name, value in plain.items():
            if not dict.__contains__(self, name) or dict.__getitem__(self, name) is not value:
                self[name] = value

    def __reduce__(self) -> Any:
        """Copies and pickles are of a plain module."""
        self._read_all()
        return dict, (dict(dict.items(self)),)


def watched_parameters(module: nn.Module) -> Watched | None:
    """The parameters of a module, if somebody wants to know who reads them."""
    parameters = module.__dict__["_parameters"]
    return parameters if isinstance(parameters, Watched) else None


def watch_parameters(
    module: nn.Module,
    keys: Mapping[str, int],
    read: Callable[[int], None],
    *,
    on_listing: bool = True,
) -> Callable[[], None]:
    """Calls back before a parameter of a module is read, other than through a reference that
    somebody has kept.

    Args:
        module: of the user.
        keys: number of a parameter, by its name in the module; others are not watched.
        read: gets that number; must not read parameters itself.
        on_listing: whether it is called for all of them when they are listed, as code does that
            looks for the dtype or the device of a model.

    Returns:
        undoes it; may be called twice.
    """
    watched = Watched(module._parameters, keys, read, on_listing)
    module.__dict__["_parameters"] = watched

    def undo() -> None:
        if module.__dict__["_parameters"] is watched:
            module.__dict__["_parameters"] = dict(dict.items(watched))

    return undo
