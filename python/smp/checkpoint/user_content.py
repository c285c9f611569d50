"""What users put beside their model: written with ``torch.save``, read without running code."""

from __future__ import annotations

import argparse
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import torch

from smp import _C
from smp.checkpoint import file_system

#: Base classes of which every loaded subclass is let in: they are data, their constructors set
#: attributes, and the scripts of users keep them here.
_DATA_BASES = (("transformers.configuration_utils", ("PretrainedConfig", "PreTrainedConfig")),)
_NAME = re.compile(r"[\w.]+\Z")


def write(path: Path, content: Any, unique: str) -> None:
    """Writes and synchronises ``path``.

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


def read(path: Path, unsafe: bool) -> Any:
    """The content; plain containers, tensors, numbers, texts, Namespaces, and configurations of
    transformers, unless ``unsafe``.

    Raises:
        ValueError: the file holds objects of other classes; names them.
    """
    if unsafe:
        return torch.load(path, map_location="cpu", weights_only=False)
    try:
        needed = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
        allowed: list[Any] = [cls for name in needed if (cls := _data_class(name)) is not None]
        refused = [name for name in needed if _data_class(name) is None]
        if not refused:
            with torch.serialization.safe_globals(allowed):
                return torch.load(path, map_location="cpu", weights_only=True)
        reason = f"objects of {', '.join(sorted(refused))}"
    except pickle.UnpicklingError as error:
        reason = f"what is not loaded as data ({error})"
    raise ValueError(
        f"{_C.rank_prefix()}{path} holds {reason}, and loading such objects can run code. Keep "
        "plain values in user_content (state_dict() of a scheduler instead of the scheduler); or "
        "allow a class that you know with torch.serialization.add_safe_globals([...]); or, if you "
        "trust whoever wrote the file, call resume_from_checkpoint(..., unsafe_user_content=True)"
    )


def _data_class(name: str) -> type | None:
    """The class of this name, if its objects are data; nothing is imported for it."""
    if name == "argparse.Namespace":
        return argparse.Namespace
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
