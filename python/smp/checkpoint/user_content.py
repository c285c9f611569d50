"""Writes user content beside a model with ``torch.save``; reads it without running code."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import torch

import smp._C as _C
from smp.checkpoint import data_classes, file_system, numpy_values
from smp.config import given_files

_log = logging.getLogger("smp")

_ADVICE = (
    "Loading such objects can run code, so smp.resume_from_checkpoint refuses them. Keep plain "
    "values in user_content (state_dict() of a scheduler instead of the scheduler); or allow a "
    "class that you know with torch.serialization.add_safe_globals([...]) before resuming; or, if "
    "you trust whoever wrote the file, call resume_from_checkpoint(..., unsafe_user_content=True)"
)


def write(path: Path, content: Any, unique: str) -> None:
    """Writes and synchronises ``path``; warns of classes that :func:`read` will refuse.

    Args:
        path: the file.
        content: any value that ``torch.save`` takes.
        unique: name of this writer.

    Raises:
        ValueError: an object in it cannot be pickled.
    """
    try:
        file_system.write_file(path, lambda file: torch.save(content, file), unique)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"user_content cannot be saved: {error}") from error
    try:
        # Only the names are read: a trial read would change torch's list while others read.
        reason = data_classes.refusal(data_classes.names_in(path))
    except pickle.UnpicklingError as error:
        reason = f"what is not loaded as data ({error})"
    if reason is not None:
        _log.warning("smp: user_content was saved, but has %s. %s", reason, _ADVICE)


def read(path: Path, unsafe: bool) -> Any:
    """Returns the content, which must be data unless ``unsafe``.

    Data are plain containers, tensors, numbers, texts, numbers and texts of numpy and its arrays of
    them, Namespaces, and configurations of transformers.

    Raises:
        ValueError: the file holds objects of other classes; the text names them.
    """
    given_files.check_regular(path)
    if unsafe:
        return torch.load(path, map_location="cpu", weights_only=False)
    try:
        names = data_classes.names_in(path)
        reason = data_classes.refusal(names)
        if reason is None:
            return data_classes.read(path, names, map_location="cpu")
    except (pickle.UnpicklingError, numpy_values.Unfit) as error:
        reason = f"what is not loaded as data ({error})"
    raise ValueError(f"{_C.rank_prefix()}{path} has {reason}. {_ADVICE}")
