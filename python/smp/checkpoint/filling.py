"""Fills a model and an optimizer of any layout from a partial checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.checkpoint.entries import (
    MASTER,
    MODEL,
    OPTIMIZER,
    Held,
    ModelState,
    model_state,
    names_of_tied,
    own_state_keys,
    storage_of,
    updated_by,
)
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.reader import FolderReader
from smp.checkpoint.values import decode
from smp.model import DistributedModel
from smp.model.parts import set_extra_states
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.precision.holdings import model_parameter_of
from smp.tensor_parallel.parts import Part
from smp.world.rank import Rank


@dataclass
class Source:
    """A manifest that is searched by the job's present names.

    Attributes:
        manifest: manifest of the folder.
        aliases: stored names by other names of tied parameters.
    """

    manifest: Manifest
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, manifest: Manifest) -> Source:
        aliases = manifest.values.get("aliases", {})
        return cls(manifest, aliases if isinstance(aliases, dict) else {})

    def stored_name(self, names: Iterable[str]) -> str | None:
        """Returns the name under which one of these, or a tied parameter, was saved, or None."""
        for name in names:
            for stored in (name, self.aliases.get(name)):
                if stored is not None and self.has(stored):
                    return stored
        return None

    def has(self, name: str) -> bool:
        entries = self.manifest.entries
        return MODEL + name in entries or MASTER + name in entries

    def shape(self, stored: str) -> tuple[int, ...]:
        entries = self.manifest.entries
        return (entries.get(MODEL + stored) or entries[MASTER + stored]).shape

    def values_for(self, stored: str, dtype: torch.dtype) -> str:
        """Returns the entry that the model's values are read from.

        The entry is the model's own if it has this dtype; else the master, which is more precise.
        """
        entries = self.manifest.entries
        own = entries.get(MODEL + stored)
        master = MASTER + stored if MASTER + stored in entries else None
        if own is not None and (master is None or own.dtype == _name_of(dtype)):
            return MODEL + stored
        assert master is not None
        return master

    def has_master(self, stored: str) -> bool:
        return MASTER + stored in self.manifest.entries

    def master_for(self, stored: str) -> str:
        """Returns the entry that a master is read from."""
        return (MASTER if self.has_master(stored) else MODEL) + stored

    @property
    def names(self) -> set[str]:
        """Returns the names of all saved tensors of the model."""
        prefixes = (MODEL, MASTER)
        return {
            name.removeprefix(prefix)
            for name in self.manifest.entries
            for prefix in prefixes
            if name.startswith(prefix)
        }


def fill_model(model: DistributedModel, folder: FolderReader, strict: bool, rank: Rank) -> None:
    """Reads this rank's parts of a partitioned model. Not collective.

    Raises:
        RuntimeError: names are missing or not expected, if ``strict``; shapes differ.
    """
    state, source = model_state(model, rank.ranks["pp"]), Source.of(folder.manifest)
    stored = _match(model, state, source, strict)
    with torch.no_grad():
        for name, held in state.held.items():
            if name in stored:
                fill_held(held, stored[name], source, folder)
    others = folder.manifest.values.get("extra_state", {})
    decoded = {key: decode(value, rank.device) for key, value in others.items()}
    set_extra_states(model.get_module(), decoded)
    storage_of(model).after_load()


def _match(
    model: DistributedModel, state: ModelState, source: Source, strict: bool
) -> dict[str, str]:
    """Returns stored names by names of the model."""
    others = names_of_tied(state.aliases)
    stored: dict[str, str] = {}
    missing, wrong = [], []
    used = set(state.aliases)
    for name, shape in state.shapes.items():
        found = source.stored_name([name, *others.get(name, [])])
        if found is None:
            missing.append(name)
            continue
        used.add(found)
        stored[name] = found
        if source.shape(found) != shape:
            wrong.append(f"'{name}' is {list(source.shape(found))} there and {list(shape)} here")
    unexpected = sorted(source.names - used)
    problems = list(wrong)
    if strict and missing:
        problems.append(f"the checkpoint has nothing for {_few(missing)}")
    if strict and unexpected:
        problems.append(f"the model has nothing for {_few(unexpected)}")
    if problems:
        raise RuntimeError(
            f"{_C.rank_prefix()}the checkpoint does not fit {type(model.get_module()).__name__}: "
            f"{'; '.join(problems)}. Build the model as it was saved (the same modules replaced by "
            "distributed ones), or load a whole model (partial=False), whose names are translated"
            + ("" if wrong else ", or pass strict=False to load what fits")
        )
    return stored


def fill_held(held: Held, stored: str, source: Source, folder: FolderReader) -> None:
    """Reads the values of a parameter or buffer, and of its master."""
    values = held.values
    read_into(folder, source.values_for(stored, values.tensor.dtype), values.part, values.tensor)
    if held.master is not None:
        read_into(folder, source.master_for(stored), held.master.part, held.master.tensor)


def fill_masters(
    optimizer: DistributedOptimizer,
    folder: FolderReader,
    model: DistributedModel,
    state: ModelState,
) -> None:
    """Reads the tensors that an optimizer updates from a checkpoint without its model.

    It reads masters and makes the model's values from them, or fills the parameters themselves if
    they have 32 bits. Parameters without a master in the checkpoint stay. Not collective.

    Args:
        optimizer: optimizer of the model.
        folder: checkpoint with masters.
        model: partitioned model.
        state: state of the model.

    Raises:
        RuntimeError: a parameter has another shape in the checkpoint.
    """
    source, others = Source.of(folder.manifest), names_of_tied(state.aliases)
    with torch.no_grad():
        for updated in updated_by(optimizer.optimizer, state):
            held = updated.held
            if held is None:  # another rank has it, or another model
                continue
            stored = source.stored_name([held.name, *others.get(held.name, [])])
            if stored is None or not source.has_master(stored):
                continue
            if source.shape(stored) != held.stored.shape:
                raise RuntimeError(
                    f"{_C.rank_prefix()}the checkpoint does not fit the optimizer: the master of "
                    f"'{held.name}' is {list(source.shape(stored))} there and "
                    f"{list(held.stored.shape)} here. Build the model as it was saved, or pass "
                    "load_optimizer=False"
                )
            fill_held(held, stored, source, folder)
    storage_of(model).after_load()


def read_into(folder: FolderReader, name: str, part: Part, target: Tensor) -> None:
    """Reads elements into a tensor on any device, of any dtype."""
    if target.numel() == 0:
        return
    direct = (
        target.device.type == "cpu"
        and target.is_contiguous()
        and _name_of(target.dtype) == folder.entry(name).dtype
    )
    if direct:
        folder.read(name, part, target.view(-1))
    else:
        target.copy_(folder.read(name, part).view(target.shape))


# ---- optimizer -----------------------------------------------------------------------


def fill_groups(
    optimizer: DistributedOptimizer,
    manifest: Manifest,
    names: Mapping[int, str],
    aliases: Mapping[str, str],
    strict: bool,
    device: torch.device,
) -> None:
    """Gives parameter groups the hyperparameters that their parameters had. Not collective.

    Args:
        optimizer: optimizer; its groups keep their identity.
        manifest: manifest of the folder.
        names: canonical names, by ``id`` of the model's parameter.
        aliases: canonical names of the model's tied parameters by their further names.
        strict: whether parameters that were not saved, and other divisions into groups, are errors.
        device: device of this rank.
    """
    stored = manifest.values.get("groups")
    if stored is None:
        return
    canonical = {**manifest.values.get("aliases", {})}
    group_of = {name: idx for idx, group in enumerate(stored) for name in group["names"]}
    others = names_of_tied(aliases)
    for idx, group in enumerate(optimizer.param_groups):
        wanted = [names.get(id(model_parameter_of(p))) for p in group["params"]]
        found: dict[int, str] = {}
        missing = []
        for name in wanted:
            known = [name, *others.get(str(name), [])]
            known += [canonical[n] for n in known if n in canonical]
            place = next((group_of[n] for n in known if n in group_of), None)
            if place is None:
                missing.append(str(name))
            else:
                found.setdefault(place, str(name))
        options = [stored[place]["options"] for place in found]
        if strict and (missing or any(option != options[0] for option in options)):
            reason = (
                f"has parameters that the saved optimizer had not: {_few(missing)}"
                if missing
                else "has parameters of several saved groups with other hyperparameters: "
                + ", ".join(f"'{name}' of group {place}" for place, name in found.items())
            )
            raise RuntimeError(
                f"{_C.rank_prefix()}parameter group {idx} {reason}; create the optimizer with the "
                "groups that were saved, or pass strict=False or load_optimizer=False"
            )
        if options:
            group.update({key: decode(value, device) for key, value in options[0].items()})


def fill_optimizer(
    optimizer: DistributedOptimizer, folder: FolderReader, state: ModelState
) -> None:
    """Reads this rank's parts of the optimizer's state. Not collective.

    Args:
        optimizer: optimizer of a partitioned model.
        folder: checkpoint with the state.
        state: state of the model.
    """
    manifest = folder.manifest
    aliases = manifest.values.get("aliases", {})
    rests: dict[str, list[str]] = {}
    for name in manifest.entries:
        if name.startswith(OPTIMIZER):
            parameter, _, rest = name.removeprefix(OPTIMIZER).rpartition("/")
            rests.setdefault(parameter, []).append(rest)
    numbers = manifest.values.get("state", {})
    others = names_of_tied(state.aliases)
    with torch.no_grad():
        for updated in updated_by(optimizer.optimizer, state):
            optimizer.state.pop(updated.tensor, None)
            held = updated.held
            if held is None:
                continue
            known = [held.name, *others.get(held.name, [])]
            known += [aliases[name] for name in known if name in aliases]
            stored = next((n for n in known if n in rests or n in numbers), None)
            if stored is None:
                continue
            entry = _state_of(updated.tensor, held, stored, rests.get(stored, []), numbers, folder)
            if entry:
                optimizer.state[updated.tensor] = entry
    _place_steps(optimizer.optimizer)


def _state_of(
    tensor: Tensor,
    held: Held,
    stored: str,
    rests: list[str],
    numbers: Mapping[str, Any],
    folder: FolderReader,
) -> dict[str, Any]:
    shape, part = held.stored.shape, held.stored.updated
    entry: dict[str, Any] = {
        key: decode(value, tensor.device) for key, value in numbers.get(stored, {}).items()
    }
    found = own_state_keys(stored, rests, held.stored)
    if part != Part.whole(shape):  # the way to cut other tensors is not known
        found = {
            key: name
            for key, name in found.items()
            if "@" in name or folder.entry(name).shape == shape
        }
    lost = {rest.partition("@")[0] for rest in rests} - set(found)
    is_elsewhere = part.flat_numel == 0 and 0 not in shape
    if is_elsewhere and (lost or not shape):
        return {}  # nothing here depends on it, and its shape is not known
    if lost:
        raise RuntimeError(
            f"{_C.rank_prefix()}{_few(sorted(lost))} in the optimizer's state of '{stored}' has "
            "another shape than the parameter, so it loads only where the parameter is cut as it "
            "was; resume on the layout that saved it, or with load_optimizer=False"
        )
    for key, name in found.items():
        info = folder.entry(name)
        dtype = getattr(torch, info.dtype)
        if info.shape == shape:
            value = torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
            read_into(folder, name, part, value)
        else:
            value = folder.read(name).to(tensor.device)
        entry[key] = value
    return entry


def _place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Moves state that an optimizer with other options saved to where this one expects it."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            entry = optimizer.state.get(tensor, {})
            for key, value in entry.items():
                if isinstance(value, Tensor) and key != "step":
                    entry[key] = value.to(tensor.device)
            step = entry.get("step")
            if isinstance(step, Tensor) and (group.get("capturable") or group.get("fused")):
                entry["step"] = step.to(tensor.device, torch.float32)
    # load_state_dict ends with this call.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _few(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} others"
