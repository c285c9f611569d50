"""Sessions that run what has a marker import the files that name it, and no others.

To import all of the tests takes each process of a session 16 seconds of its processor; few files
have tests that wait, that must be alone or that are samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests import samples

#: Whoever has one of these markers has it from the text of its own file.
MARKERS = ("waits", "alone", "sample")


def lacks_marks(path: Path, config: pytest.Config) -> bool:
    """Returns whether a file that the user did not name has no tests for a session."""
    if not (path.name.startswith("test_") and path.suffix == ".py"):
        return False
    named = [argument.partition("::") for argument in config.args]
    if any(separator for _, separator, _ in named) or any(
        Path(file).resolve() == path for file, _, _ in named
    ):
        return False
    expression = config.option.markexpr
    if expression in MARKERS and not names_marker(path, expression):
        return True
    return samples.SAMPLES == "others" and not has_samples(path)


@cache
def names_marker(path: Path, marker: str) -> bool:
    return f"mark.{marker}" in path.read_text()


@cache
def has_samples(path: Path) -> bool:
    """Returns whether a file has tests of several cases."""
    text = path.read_text()
    return any(word in text for word in ("mark.sample", "parametrize", "params="))


def check_named(items: Iterable[pytest.Item]) -> None:
    """Refuses tests that have a marker from elsewhere: sessions would miss them."""
    for item in items:
        for marker in MARKERS:
            if item.get_closest_marker(marker) and not names_marker(item.path, marker):
                raise pytest.UsageError(
                    f"{item.nodeid} has the marker '{marker}', which its file does not name; write "
                    f"pytest.mark.{marker} there, else `-m {marker}` does not import the file"
                )
