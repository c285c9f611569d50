"""What users put beside their model: written with ``torch.save``, read without running code."""

from __future__ import annotations

import argparse
import logging
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import torch

import smp._C as _C
from smp.checkpoint import file_system, numpy_values
from smp.config import given_files

_log = logging.getLogger("smp")

#: Empty bytes are made by a call of the class; others are pickled as texts.
_DATA_CLASSES: dict[str, type] = {"argparse.Namespace": argparse.Namespace, "builtins.bytes": bytes}
#: Base classes of which every loaded subclass is let in: they are data, their constructors set
#: attributes, and the scripts of users keep them here.
_DATA_BASES = (("transformers.configuration_utils", ("PretrainedConfig", "PreTrainedConfig")),)
_NAME = re.compile(r"[\w.]+\Z")
_ADVICE = (
    "Loading such objects can run code, so smp.resume_from_checkpoint refuses them. Keep plain "
    "values in user_content (state_dict() of a scheduler instead of the scheduler); or allow a "
    "class that you know with torch.serialization.add_safe_globals([...]) before resuming; or, if "
    "you trust whoever wrote the file, call resume_from_checkpoint(..., unsafe_user_content=True)"
)


def write(path: Path, content: Any, unique: str) -> None:
    """Writes and synchronises ``path``; warns of classes that :func:`read` will refuse.

    Args:
        content: anything that ``torch.save`` takes.
        unique: of this writer.

    Raises:
        ValueError: an object in it cannot be pickled.
    """
    try:
        file_system.write_file(path, lambda file: torch.save(content, file), unique)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"user_content cannot be saved: {error}") from error
    try:
        # The names alone: a read for a trial would change torch's list while others read.
        reason = _refusal(_names_in(path))
    except pickle.UnpicklingError as error:
        reason = f"what is not loaded as data ({error})"
    if reason is not None:
        _log.warning("smp: user_content was saved, but has %s. %s", reason, _ADVICE)


def read(path: Path, unsafe: bool) -> Any:
    """The content; plain containers, tensors, numbers, texts, those of numpy and its arrays of
    them, Namespaces, and configurations of transformers, unless ``unsafe``.

    Raises:
        ValueError: the file holds objects of other classes; names them.
    """
    given_files.check_regular(path)
    if unsafe:
        return torch.load(path, map_location="cpu", weights_only=False)
    try:
        names = _names_in(path)
        reason = _refusal(names)
        if reason is None:
            return _read_as_data(path, names)
    except (pickle.UnpicklingError, numpy_values.Unfit) as error:
        reason = f"what is not loaded as data ({error})"
    raise ValueError(f"{_C.rank_prefix()}{path} has {reason}. {_ADVICE}")


def _names_in(path: Path) -> list[str]:
    """Classes and functions that the file needs, and that torch does not let in itself."""
    return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))


def _refusal(names: list[str]) -> str | None:
    """Why a file with these names is refused; None if it is not for its names."""
    known = numpy_values.known(names)
    refused = [name for name in names if name not in known and _data_class(name) is None]
    return f"objects of {', '.join(refused)}" if refused else None


def _read_as_data(path: Path, names: list[str]) -> Any:
    of_numpy = numpy_values.known(names)
    classes: list[Any] = [cls for name in names if (cls := _data_class(name)) is not None]
    if of_numpy:
        with torch.serialization.safe_globals(classes + numpy_values.stand_ins(of_numpy)):
            torch.load(path, map_location="cpu", weights_only=True)
        # What the user has let in stays in afterwards.
        given = torch.serialization.get_safe_globals()
        classes += [thing for thing in numpy_values.real(of_numpy) if thing not in given]
    with torch.serialization.safe_globals(classes):
        return torch.load(path, map_location="cpu", weights_only=True)


def _data_class(name: str) -> type | None:
    """The class of this name, if its objects are data; nothing is imported for it."""
    if name in _DATA_CLASSES:
        return _DATA_CLASSES[name]
    module_name, _, class_name = name.rpartition(".")
    module = sys.modules.get(module_name)
    cls = getattr(module, class_name, None) if module and _NAME.match(name) else None
    if not isinstance(cls, type):
        return None
    for base_module, base_names in _DATA_BASES:
        for base_name in base_names:
            base = getattr(sys.modules.get(base_module), base_name, None)
            if isinstance(base, type) and issubclass(cls, base):
                return cls
    return None
