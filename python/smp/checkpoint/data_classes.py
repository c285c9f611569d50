"""Reads objects that are data from files of ``torch.save``, and lists their classes."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import numpy_values

#: Calls of the class make empty bytes; others are pickled as texts.
_DATA_CLASSES: dict[str, type] = {"argparse.Namespace": argparse.Namespace, "builtins.bytes": bytes}
#: Base classes of which every loaded subclass is let in: their objects are data, their constructors
#: set attributes, and users' scripts keep them in files.
_DATA_BASES = (("transformers.configuration_utils", ("PretrainedConfig", "PreTrainedConfig")),)
_NAME = re.compile(r"[\w.]+\Z")


def names_in(path: str | Path) -> list[str]:
    """Returns classes and functions that the file needs and that torch does not let in itself.

    Raises:
        UnpicklingError: the file holds an object that cannot be read without running code.
    """
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))


def classes_of(names: Iterable[str]) -> Iterator[tuple[str, type]]:
    """Yields the names that are classes of loaded modules, with these classes; imports nothing.

    Classes of numpy are left out: `numpy_values` reads them.
    """
    names = list(names)
    for name in sorted({*names}.difference(numpy_values.known(names))):
        module_name, _, class_name = name.rpartition(".")
        module = sys.modules.get(module_name)
        cls = getattr(module, class_name, None) if module and _NAME.match(name) else None
        if isinstance(cls, type):
            yield name, cls


def refusal(names: list[str], own: Iterable[type] = ()) -> str | None:
    """Returns the reason why a file with these names is not read as data; None if it is.

    Args:
        names: result of `names_in`.
        own: further classes that are let in.
    """
    known = {*numpy_values.known(names), *_let_in(names, own)}
    refused = [name for name in names if name not in known]
    return f"objects of {', '.join(refused)}" if refused else None


def read(path: Path, names: list[str], own: Iterable[type] = (), **options: Any) -> Any:
    """Returns the content of a file that `refusal` found to be data.

    Args:
        path: the file.
        names: result of `names_in`.
        own: further classes that are let in.
        options: keyword arguments of ``torch.load``.

    Raises:
        UnpicklingError: the file asks for more than to fill such objects.
        Unfit: the file has a value of numpy that is not plain.
    """
    options["weights_only"] = True
    of_numpy = numpy_values.known(names)
    classes: list[Any] = [*_let_in(names, own).values()]
    if of_numpy:
        with torch.serialization.safe_globals(classes + numpy_values.stand_ins(of_numpy)):
            torch.load(path, **options)
        # Classes that the user has let in stay in afterwards.
        given = torch.serialization.get_safe_globals()
        classes += [thing for thing in numpy_values.real(of_numpy) if thing not in given]
    with torch.serialization.safe_globals(classes):
        return torch.load(path, **options)


def _let_in(names: list[str], own: Iterable[type]) -> dict[str, type]:
    """Returns classes by name whose objects are data, or that the caller lets in."""
    found = {name: _DATA_CLASSES[name] for name in names if name in _DATA_CLASSES}
    bases = (
        getattr(sys.modules.get(module), base, None)
        for module, names_of_bases in _DATA_BASES
        for base in names_of_bases
    )
    data_bases = tuple(base for base in bases if isinstance(base, type))
    permitted = set(own)
    for name, cls in classes_of(names):
        if cls in permitted or issubclass(cls, data_bases):
            found[name] = cls
    return found
