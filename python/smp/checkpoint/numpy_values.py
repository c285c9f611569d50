"""Lets in numbers and arrays of numpy in user content, once a first pass has found them plain.

numpy trusts the fields of a pickled dtype: a forged one makes it take any memory for objects, whose
code it then runs. So the file is first read with the stand-ins of this module in numpy's place. It
is read with numpy itself only if all dtypes have no fields, and all data have the number of bytes
that their dtypes need.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable
from typing import Any

#: Dtypes by the texts that are pickled: truth values, numbers, and texts of fixed length.
_PLAIN = re.compile(r"([biufc]|[SU])(\d{1,9})\Z")
_CODES = "?bhilqBHILQefdgFDGSU"
_VERSION_OF_DTYPE, _VERSION_OF_ARRAY = 3, 1  # of the states in the pickle
_BYTES_OF_CHARACTER = 4


class Unfit(ValueError):
    """Raised if the file makes an object of numpy that is not plain data."""


def known(names: Iterable[str]) -> list[str]:
    """Returns those of some names, in the form of a pickle, that are of plain values of numpy.

    The result is empty if numpy is not installed.
    """
    found = [name for name in names if name in _STAND_INS]
    return found if found and importlib.util.find_spec("numpy") is not None else []


def stand_ins(names: Iterable[str]) -> list[Any]:
    """Returns stand-ins for ``safe_globals`` in a first pass.

    That pass raises :class:`Unfit` if a value is not plain; its result must not be used.

    Args:
        names: names that are `known`.
    """
    return [(_STAND_INS[name], name) for name in names]


def real(names: Iterable[str]) -> list[Any]:
    """Returns numpy's own objects for ``safe_globals`` in a second pass.

    Args:
        names: names that are `known`.
    """
    import numpy as np

    # The modules of these have other names from release to release.
    makers = {"scalar": np.int64(0).__reduce__()[0], "_reconstruct": np.zeros(1).__reduce__()[0]}
    things = {"dtype": np.dtype, "ndarray": np.ndarray, **makers}
    by_name = [(things[name.rpartition(".")[2]], name) for name in names]
    # A dtype gets its byte order by a state, which objects of these classes may then have.
    return [*by_name, *{type(np.dtype(code)) for code in _CODES}]


class _Dtype:
    """A stand-in for ``numpy.dtype``."""

    kind: str
    itemsize: int

    def __new__(cls, *args: Any) -> _Dtype:
        self = super().__new__(cls)
        match args:
            case (str(text), False, True) if (match := _PLAIN.match(text)) is not None:
                self.kind, size = match[1], int(match[2])
                self.itemsize = size * (_BYTES_OF_CHARACTER if self.kind == "U" else 1)
                return self
        raise Unfit(f"a numpy dtype of {args}, which is neither of numbers nor of texts")

    def __setstate__(self, state: Any) -> None:
        tail: tuple[int, ...] = (-1, -1, 0)
        if self.kind in "SU":
            alignment, flags = (_BYTES_OF_CHARACTER, 8) if self.kind == "U" else (1, 0)
            tail = (self.itemsize, alignment, flags)
        orders = [(_VERSION_OF_DTYPE, order, None, None, None, *tail) for order in "<>|="]
        is_plain = type(state) is tuple and {type(item) for item in state} <= {int, str, type(None)}
        if not is_plain or state not in orders:
            raise Unfit("a numpy dtype with fields, or of an unknown form")


class _Array:
    """A stand-in for ``numpy.ndarray``."""

    def __new__(cls, *args: Any) -> _Array:
        if args:
            raise Unfit("a numpy array that is not made from its bytes")
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        match state:
            case (int(version), tuple(shape), _Dtype() as dtype, bool(), bytes(data)):
                sizes = [type(size) is int and size >= 0 for size in shape]
                if version == _VERSION_OF_ARRAY and all(sizes):
                    if len(data) == math.prod(shape) * dtype.itemsize:
                        return
        raise Unfit("a numpy array whose bytes, shape and dtype do not fit")


def _rebuild_array(*args: Any) -> _Array:
    match args:
        case (made, (int(0),), bytes(b"b")) if made is _Array:
            return _Array()
    raise Unfit("a numpy array of a user-defined class")


def _rebuild_scalar(*args: Any) -> object:
    match args:
        case (_Dtype() as dtype, bytes(data)) if len(data) == dtype.itemsize:
            return object()
    raise Unfit("a numpy scalar whose bytes and dtype do not fit")


#: numpy 2 has its makers in ``_core``, earlier releases in ``core``.
_STAND_INS: dict[str, Any] = {
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _Array,
    **{f"numpy.{core}.multiarray._reconstruct": _rebuild_array for core in ("_core", "core")},
    **{f"numpy.{core}.multiarray.scalar": _rebuild_scalar for core in ("_core", "core")},
}
