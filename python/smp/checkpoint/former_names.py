"""Renames the tensors of checkpoints whose models had distributed forms that exist no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from smp.checkpoint.entries import OPTIMIZER
from smp.checkpoint.manifest import Manifest
from smp.nn.huggingface import llama
from smp.storage.parts import MASTER, MODEL


def with_present_names(manifest: Manifest) -> Manifest:
    """Returns a manifest with the names that tensors of its model have now.

    The partition names modules of the former model, so it is left out.
    """
    pairs = manifest.values.get("registrations", [])
    former = [module_cls for family, module_cls in pairs if family in llama.FAMILIES]
    if not former:
        return manifest
    values = dict(manifest.values)
    values["registrations"] = [pair for pair in pairs if pair[0] not in llama.FAMILIES]
    values.pop("partition", None)
    entries = manifest.entries
    for module_cls in former:
        names = {_parameter_of(entry) for entry in entries} | values.get("aliases", {}).keys()
        present = llama.present_names(module_cls, sorted(names))
        entries = {_renamed(entry, present): stored for entry, stored in entries.items()}
        values |= _renamed_values(values, present)
    return dataclasses.replace(manifest, entries=entries, values=values)


def _parameter_of(entry: str) -> str:
    """Returns the name of the parameter that an entry belongs to."""
    kind, _, name = entry.partition("/")
    return name.rpartition("/")[0] if f"{kind}/" == OPTIMIZER else name


def _renamed(entry: str, present: Mapping[str, str]) -> str:
    name = _parameter_of(entry)
    if not entry.startswith((MODEL, MASTER, OPTIMIZER)) or name not in present:
        return entry
    kind, _, rest = entry.partition("/")
    return f"{kind}/{present[name]}{rest.removeprefix(name)}"


def _renamed_values(values: Mapping[str, Any], present: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values in which tensors are named."""

    def rename(name: str) -> str:
        return present.get(name, name)

    renamed: dict[str, Any] = {}
    if "aliases" in values:
        aliases = values["aliases"].items()
        renamed["aliases"] = {rename(name): rename(stored) for name, stored in aliases}
    if "state" in values:
        renamed["state"] = {rename(name): state for name, state in values["state"].items()}
    if "groups" in values:
        renamed["groups"] = [
            {**group, "names": [rename(name) for name in group["names"]]}
            for group in values["groups"]
        ]
    return renamed
