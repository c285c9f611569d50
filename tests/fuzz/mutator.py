"""Makes inputs from right ones: changed bytes, and changed values of JSON."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

_NUMBERS = (0, 1, -1, 255, 2**31, -(2**31), 2**53, 2**62, 2**63, -(2**63), 2**64, 10**30)
_VALUES: tuple[Any, ...] = (
    *_NUMBERS,
    0.5,
    -0.0,
    1e400,
    float("nan"),
    True,
    None,
    "",
    "0",
    "..",
    "/etc/passwd",
    "\x00",
    [],
    {},
    [[]],
    [0, 0],
    [-1, -1],
    {"": 0},
)
_MOST_CHANGES = 3
_MOST_INSERTED = 16


class Format(Protocol):
    """A format of inputs that contain JSON."""

    def split(self, content: bytes) -> tuple[Any, bytes]:
        """The value, and what lies behind it."""

    def join(self, value: Any, rest: bytes) -> bytes:
        """The input with these."""


class Mutator:
    """Equal seeds make equal inputs."""

    def __init__(self, corpus: Sequence[bytes], form: Format, seed: int) -> None:
        """
        Args:
            corpus: inputs that are right.
            form: format of the inputs.
            seed: seed of the choices.
        """
        self._corpus, self._form = corpus, form
        self._random = random.Random(seed)

    def next(self) -> bytes:
        choose = self._random
        content = choose.choice(self._corpus)
        num_changes = choose.randrange(_MOST_CHANGES + 1)
        if choose.random() < 0.6:
            value, rest = self._form.split(content)
            for _ in range(num_changes):
                value = self._changed(value)
            return self._form.join(value, rest)
        for _ in range(num_changes):
            content = self._changed_bytes(content)
        return content

    def _changed(self, value: Any) -> Any:
        choose = self._random
        if isinstance(value, dict) and value and choose.random() < 0.9:
            key = choose.choice(list(value))
            kind = choose.randrange(12)
            if kind == 0:
                return {k: v for k, v in value.items() if k != key}
            if kind == 1:
                return {**value, choose.choice(("", "x", key + "0", "..")): value[key]}
            return {**value, key: self._changed(value[key])}
        if isinstance(value, list) and value and choose.random() < 0.9:
            at = choose.randrange(len(value))
            kind = choose.randrange(8)
            if kind == 0:
                return value[:at] + value[at + 1 :]
            if kind == 1:
                return value[:at] + [value[at]] + value[at:]
            return value[:at] + [self._changed(value[at])] + value[at + 1 :]
        if isinstance(value, int) and choose.random() < 0.5:
            return value + choose.choice((-1, 1, 8, -8, 2**32))
        return choose.choice(_VALUES)

    def _changed_bytes(self, content: bytes) -> bytes:
        choose = self._random
        at = choose.randrange(len(content) + 1)
        end = at + choose.randrange(1, _MOST_INSERTED)
        kind = choose.randrange(6)
        if kind == 0:
            return content[:at]
        if kind == 1:
            return content[:at] + content[end:]
        if kind == 2:
            return content[:end] + content[at:]
        if kind == 3:
            other = choose.choice(self._corpus)
            return content[:at] + other[choose.randrange(len(other)) :]
        if kind == 4:
            return content[:at] + choose.randbytes(end - at) + content[at:]
        return content[:at] + choose.randbytes(1) + content[at + 1 :]
