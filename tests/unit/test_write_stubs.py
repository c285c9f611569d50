"""`cmake/write_stubs.py`: what mypy needs beside what pybind11-stubgen writes."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import REPO

sys.path.insert(0, str(REPO / "cmake"))
try:
    from write_stubs import corrected
finally:
    sys.path.pop(0)


@pytest.mark.parametrize(
    ("generated", "wanted"),
    [
        (
            "    def run(self, rank: typing.SupportsInt, s: typing.SupportsFloat = 0.5) -> None:",
            "    def run(self, rank: int, s: float = 0.5) -> None:",
        ),
        (
            "def f(board: FaultBoard = None, n: int = 2):",
            "def f(board: FaultBoard | None = None, n: int = 2):",
        ),
        ("def f(a: str | None = None) -> None:", "def f(a: str | None = None) -> None:"),
        (
            "def f(call: collections.abc.Callable) -> list:",
            "def f(call: collections.abc.Callable[..., typing.Any]) -> list[typing.Any]:",
        ),
        ("def f() -> dict:", "def f() -> dict[str, typing.Any]:"),
        (
            "def f(a: tuple) -> dict[int, int]:",
            "def f(a: tuple[typing.Any, ...]) -> dict[int, int]:",
        ),
        (
            "    def __eq__(self, arg0: Part) -> bool:",
            "    def __eq__(self, other: object) -> bool:",
        ),
        (
            "    def __exit__(self, *args) -> None:",
            "    def __exit__(self, *args: typing.Any) -> None:",
        ),
        ("    A list, a dict: X = None", "    A list, a dict: X = None"),
    ],
)
def test_signatures_are_corrected(generated: str, wanted: str) -> None:
    assert corrected(generated) == wanted + "\n"
