"""Reads JSON that must have a given form; errors name the key. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Malformed(ValueError):
    """An error that names the key, the expected and the actual value."""


class Node:
    """A value and the path to it."""

    __slots__ = ("_path", "_value", "key")

    def __init__(self, value: Any, path: str, key: str = "") -> None:
        self._value = value
        self._path = path
        self.key = key

    def malformed(self, expected: str) -> Malformed:
        came = repr(self._value)
        came = came if len(came) <= 80 else came[:77] + "..."
        return Malformed(f"key {self._path or '(top)'}: expected {expected}, got {came}")

    def __getitem__(self, key: str) -> Node:
        mapping = self._mapping()
        if key not in mapping:
            raise self.malformed(f"an object with the key '{key}'")
        return Node(mapping[key], f"{self._path}.{key}" if self._path else key, key)

    def __contains__(self, key: str) -> bool:
        return key in self._mapping()

    def only(self, *keys: str, optional: tuple[str, ...] = ()) -> Node:
        """Checks that these keys exist and no unknown ones; returns this node."""
        mapping = self._mapping()
        for key in keys:
            if key not in mapping:
                raise self.malformed(f"an object with the key '{key}'")
        for key in mapping:
            if key not in keys and key not in optional:
                raise self[key].malformed(f"no such key (known: {', '.join(keys + optional)})")
        return self

    def items(self) -> Iterator[tuple[str, Node]]:
        for key in self._mapping():
            yield key, self[key]

    def elements(self) -> Iterator[Node]:
        for index, value in enumerate(self._list()):
            yield Node(value, f"{self._path}[{index}]")

    def mapping(self) -> dict[str, Any]:
        return dict(self._mapping())

    def text(self) -> str:
        if not isinstance(self._value, str):
            raise self.malformed("text")
        return self._value

    def integer(self, low: int | None = None) -> int:
        if not _is_integer(self._value) or (low is not None and self._value < low):
            raise self.malformed("an integer" + ("" if low is None else f" of at least {low}"))
        return int(self._value)

    def integers(self, low: int, high: int, length: int | None = None) -> tuple[int, ...]:
        values = self._list()
        if not all(_is_integer(v) and low <= v <= high for v in values) or (
            length is not None and len(values) != length
        ):
            count = "" if length is None else f"{length} "
            raise self.malformed(f"{count}integers in [{low}, {high}]")
        return tuple(values)

    def _mapping(self) -> dict[str, Any]:
        if not isinstance(self._value, dict):
            raise self.malformed("an object")
        return self._value

    def _list(self) -> list[Any]:
        if not isinstance(self._value, list):
            raise self.malformed("a list")
        return self._value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
