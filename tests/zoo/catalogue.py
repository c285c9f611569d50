"""Finds the models of the zoo in the installed packages.

Every class of transformers that takes labels or returns a loss is found in its modules, so new
releases come in by themselves. Of torchvision, timm and diffusers, where they are installed, there
is one model of each module.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Parts of the names of arguments that take a target.
_TARGETS = ("label", "loss", "future_values", "start_positions", "bool_masked_pos")
# Packages that need not be installed, and what lists their models.
OPTIONAL = {
    "torchvision": "tests.zoo.vision:torchvision_entries",
    "timm": "tests.zoo.vision:timm_entries",
    "diffusers": "tests.zoo.diffusers_models:diffusers_entries",
}
# The class of a family that is tried first.
_FIRST = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM",
    "ForImageClassification", "ForPreTraining", "ForCTC", "ForSequenceClassification",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A model class.

    Attributes:
        source: "transformers", "torchvision", "timm", "diffusers" or "patterns".
        family: classes of one family share their layers.
        module, name: place of the class.
    """

    source: str
    family: str
    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.source}/{self.family}/{self.name}"

    def load(self) -> Any:
        return getattr(importlib.import_module(self.module), self.name)


def transformers_entries() -> list[Entry]:
    """Every class of transformers with a target among its arguments."""
    import transformers.models
    from transformers import PreTrainedModel

    found = []
    for file in sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py")):
        module_name = f"transformers.models.{file.parent.name}.{file.stem}"
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # packages that are not installed
            continue
        for name, value in vars(module).items():
            if not (isinstance(value, type) and issubclass(value, PreTrainedModel)):
                continue
            if value.__module__ == module_name and name in module.__all__ and _has_target(value):
                found.append(Entry("transformers", file.parent.name, module_name, name))
    return found


def pattern_entries() -> list[Entry]:
    """Every hand-written pattern."""
    from tests.zoo import calls, hooks, patterns, tensors

    # The imported modules have put their patterns among the others.
    assert calls is not None and hooks is not None and tensors is not None
    return [
        Entry("patterns", "patterns", make.__module__, name)
        for name, make in patterns.PATTERNS.items()
    ]


def installed_sources() -> list[str]:
    """Packages of `OPTIONAL` that are there."""
    return [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]


def missing_sources() -> list[str]:
    """Packages whose models the zoo would have."""
    return [name for name in OPTIONAL if name not in installed_sources()]


@functools.cache
def package_entries() -> list[Entry]:
    """Models of the packages that are installed."""
    found: list[Entry] = []
    for name in installed_sources():
        module, function = OPTIONAL[name].split(":")
        found += getattr(importlib.import_module(module), function)()
    return found


def _has_target(cls: type) -> bool:
    try:
        names = list(inspect.signature(cls.forward).parameters)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False
    return cls.config_class is not None and any(  # type: ignore[attr-defined]
        target in name for name in names for target in _TARGETS
    )


def _rank(entry: Entry) -> tuple[int, str]:
    for index, ending in enumerate(_FIRST):
        if entry.name.endswith(ending):
            return index, entry.name
    return len(_FIRST), entry.name


@functools.cache
def families() -> dict[str, list[Entry]]:
    """Entries by family; the first of each shows most."""
    result: dict[str, list[Entry]] = {}
    for entry in transformers_entries():
        result.setdefault(entry.family, []).append(entry)
    return {family: sorted(entries, key=_rank) for family, entries in result.items()}


def entries(all_classes: bool = False) -> list[Entry]:
    """Models to run: one of each family first, then the others."""
    by_family = list(families().values())
    firsts = pattern_entries() + [found[0] for found in by_family] + package_entries()
    return firsts + ([e for found in by_family for e in found[1:]] if all_classes else [])
