"""The kinds of values that keys of the configuration take, and their checks."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Limits of counts, which the C++ core keeps in 32 bits, and of sizes, which it keeps in 64.
MAX_COUNT = 2**31 - 1
MAX_SIZE = 2**63 - 1
_MAX_LIST = 2**20  # entries, one for each rank


@dataclass(frozen=True)
class Kind:
    """A kind of values that a key takes: `words` for messages, `convert` for the check.

    `form` is the JSON Schema of the values, without None.
    """

    words: str
    convert: Callable[[object], Any]  # raises TypeError, ValueError or OverflowError
    form: Mapping[str, Any]
    optional: bool = False
    choices: tuple[str, ...] = ()  # texts that are meant as they are, such as "none"


def _to_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise TypeError
    return value


def to_int(value: object, minimum: int, maximum: int) -> int:
    number = _to_number(value)  # 5e8 is fine, 2.5 is not
    if math.isinf(number) or number != int(number):
        raise ValueError
    if not minimum <= number <= maximum:
        raise ValueError
    return int(number)


def to_bool(value: object, choices: tuple[str, ...] = ()) -> bool | str:
    if isinstance(value, str) and value in choices:
        return value
    if isinstance(value, bool | int) and value in (0, 1):
        return bool(value)
    raise TypeError


def to_float(value: object, low: float, high: float) -> float:
    number = float(_to_number(value))
    if not low <= number <= high:
        raise ValueError
    return number


def to_choice(value: object, choices: tuple[str, ...]) -> object:
    if value not in choices:
        raise ValueError
    return value


def to_text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise TypeError
    return value


def to_bytes(value: object) -> int:
    """Returns the bytes of a number, or of a text such as ``"12GiB"``, ``"1.5 TB"``, ``"800MB"``.

    Raises:
        TypeError, ValueError: the value is no size above 0.
    """
    if not isinstance(value, str):
        return to_int(value, 1, MAX_SIZE)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]i?)?B\s*", value)
    if match is None:
        raise ValueError
    unit = match[2] or ""
    base = 1024 if unit.endswith("i") else 1000
    num_bytes = round(float(match[1]) * base ** " KMGT".index(unit[:1].upper() or " "))
    return to_int(num_bytes, 1, MAX_SIZE)


def to_tuple(value: object, convert: Callable[[object], Any]) -> tuple[Any, ...]:
    """Returns the values of a list, or of a text such as ``"1:2, 4"``, which means 1, 1 and 4."""
    if isinstance(value, str):
        words = [word.strip() for word in value.strip().strip("[]").split(",")]
        found: list[Any] = []
        for word in words:
            entry, colon, count = (part.strip() for part in word.partition(":"))
            times = to_int(convert_text(count), 1, MAX_COUNT) if colon else 1
            if len(found) + times > _MAX_LIST:
                raise ValueError
            found += [convert(convert_text(entry))] * times
        return tuple(found)
    if isinstance(value, list | tuple) and 0 < len(value) <= _MAX_LIST:
        return tuple(convert(entry) for entry in value)
    raise TypeError


def to_sizes(value: object) -> int | tuple[int, ...]:
    """Returns one size, or several of a list."""
    if isinstance(value, list | tuple) or (isinstance(value, str) and set(value) & set(",:[")):
        return to_tuple(value, to_bytes)
    return to_bytes(value)


def to_speed(value: object) -> float:
    number = to_float(value, 0.0, math.inf)
    if number == 0.0 or math.isinf(number):
        raise ValueError
    return number


def convert_text(text: str) -> object:
    """Returns the value of a word: bool, None, number, or the word itself."""
    word = text.strip()
    constants = {"true": True, "false": False, "none": None, "null": None}
    if word.lower() in constants:
        return constants[word.lower()]
    for convert in (int, float):
        try:
            return convert(word)
        except ValueError:
            continue
    return word
