"""Fills a model and an optimizer of any layout from a partial checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import smp._C as _C
from smp.checkpoint.entries import (
    OPTIMIZER,
    Updated,
    model_state,
    names_of_tied,
    own_state_keys,
    updated_by,
)
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.reader import FolderReader
from smp.checkpoint.values import decode
from smp.model import DistributedModel
from smp.model.parts import set_extra_states
from smp.optim.adam import has_own_form, imported_entry, keeps_residue
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.precision.holdings import model_parameter_of
from smp.storage.parts import MASTER, MODEL, ModelState, Stored
from smp.tensor_parallel.partial import MASTER as MASTER_KEY
from smp.tensor_parallel.parts import Part
from smp.world.rank import Rank


class Source:
    """A manifest that is searched by the job's present names.

    Attributes:
        aliases: stored names by other names of tied parameters.
        shapes: shapes of the model's saved tensors by stored name.
    """

    def __init__(self, manifest: Manifest) -> None:
        aliases = manifest.values.get("aliases", {})
        self._entries = manifest.entries
        self.aliases: dict[str, str] = aliases if isinstance(aliases, dict) else {}
        self.shapes = {
            name.removeprefix(prefix): entry.shape
            for prefix in (MASTER, MODEL)
            for name, entry in manifest.entries.items()
            if name.startswith(prefix)
        }

    def values_for(self, stored: str, dtype: torch.dtype) -> str:
        """Returns the entry that the model's values are read from.

        The entry is the model's own if it has this dtype; else the master, which is more precise.
        """
        own = self._entries.get(MODEL + stored)
        is_own = own is not None and (not self.has_master(stored) or own.dtype == _name_of(dtype))
        return (MODEL if is_own else MASTER) + stored

    def has_master(self, stored: str) -> bool:
        return MASTER + stored in self._entries

    def master_for(self, stored: str) -> str:
        """Returns the entry that a master is read from."""
        return (MASTER if self.has_master(stored) else MODEL) + stored


class FitTexts(NamedTuple):
    """Words of the error that what was saved does not fit a model.

    Attributes:
        what: word for what was saved.
        missing, unexpected: texts with a place for names.
        show: writes names.
        advice: text on what to do.
        strict: text on what to do if shapes are equal.
    """

    what: str
    missing: str
    unexpected: str
    show: Callable[[list[str]], str]
    advice: str
    strict: str


def match(
    model: DistributedModel,
    state: ModelState,
    there: Mapping[str, tuple[int, ...]],
    aliases: Mapping[str, str],
    strict: bool,
    texts: FitTexts,
) -> dict[str, str]:
    """Returns stored names by names of the model.

    Args:
        model: partitioned model.
        state: state of the model.
        there: shapes by stored name.
        aliases: stored names by other names of tied parameters.
        strict: whether names that are missing or not expected are errors.
        texts: words of errors.

    Raises:
        RuntimeError: names are missing or not expected, if ``strict``; shapes differ.
    """
    tied = names_of_tied(state.aliases)
    stored = {name: stored_name(name, tied, there, aliases) for name in state.tensors}
    found = {name: other for name, other in stored.items() if other is not None}
    problems = [
        f"'{name}' is {list(there[other])} there and {list(state.tensors[name].shape)} here"
        for name, other in found.items()
        if there[other] != state.tensors[name].shape
    ]
    advice = texts.advice + ("" if problems else texts.strict)
    missing = [name for name, other in stored.items() if other is None]
    unexpected = sorted(there.keys() - state.keys.keys() - {*found.values()})
    if strict and missing:
        problems.append(texts.missing.format(texts.show(missing)))
    if strict and unexpected:
        problems.append(texts.unexpected.format(texts.show(unexpected)))
    if problems:
        raise RuntimeError(
            f"{_C.rank_prefix()}the {texts.what} does not fit {type(model.get_module()).__name__}: "
            f"{'; '.join(problems)}. {advice}"
        )
    return found


def stored_name(
    name: str, tied: Mapping[str, list[str]], there: Container[str], aliases: Mapping[str, str]
) -> str | None:
    """Returns the name under which a parameter, or one tied to it, was saved, or None.

    Args:
        name: canonical name.
        tied: further names by canonical name.
        there: stored names.
        aliases: stored names by other names of tied parameters.
    """
    known = [name, *tied.get(name, ())]
    candidates = (other for n in known for other in (n, aliases.get(n)))
    return next((other for other in candidates if other is not None and other in there), None)


def few(names: list[str]) -> str:
    """Writes the first names, and how many there are besides."""
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} others"


_TEXTS = FitTexts(
    "checkpoint",
    "the checkpoint has nothing for {}",
    "the model has nothing for {}",
    few,
    "Build the model as it was saved (the same modules replaced by distributed ones), or load a "
    "whole model (partial=False), whose names are translated",
    ", or pass strict=False to load what fits",
)


def fill_model(model: DistributedModel, folder: FolderReader, strict: bool, rank: Rank) -> None:
    """Reads this rank's parts of a partitioned model. Not collective.

    Raises:
        RuntimeError: names are missing or not expected, or quantized weights are others, if
            ``strict``; shapes differ.
    """
    state, source = model_state(model, rank), Source(folder.manifest)
    if strict:
        _check_quantized(state.quantized, folder.manifest.values.get("quantized", {}))
    stored = match(model, state, source.shapes, source.aliases, strict, _TEXTS)
    with torch.no_grad():
        for name, held in state.held.items():
            if name in stored:
                fill_held(held, stored[name], source, folder)
    others = folder.manifest.values.get("extra_state", {})
    decoded = {key: decode(value, rank.device) for key, value in others.items()}
    set_extra_states(model.get_module(), decoded)
    state.storage.after_load()


def _check_quantized(own: Mapping[str, str], saved: Mapping[str, str]) -> None:
    """Raises a RuntimeError if a checkpoint was saved beside other quantized weights."""
    others = [name for name, checksum in own.items() if saved.get(name, checksum) != checksum]
    if others:
        name = others[0]
        raise RuntimeError(
            f"{_C.rank_prefix()}the checkpoint was saved beside other quantized weights: those of "
            f"{few(others)} differ, expected {saved[name]}, got {own[name]} for the first. Make "
            "the model of the files that it was trained on, with the same quantization, or pass "
            "strict=False if they differ by rounding (another kind of device or release)"
        )


def fill_held(held: Stored, stored: str, source: Source, folder: FolderReader) -> None:
    """Reads the values of a parameter or buffer, and of its master."""
    values, master = held.values, held.master
    folder.read(source.values_for(stored, values.tensor.dtype), values.part, values.tensor)
    if master is not None:
        folder.read(source.master_for(stored), master.part, master.tensor)


def fill_masters(optimizer: DistributedOptimizer, folder: FolderReader, state: ModelState) -> None:
    """Reads the tensors that an optimizer updates from a checkpoint without its model.

    It reads masters and makes the model's values from them, or fills the parameters themselves if
    they have 32 bits. Parameters without a master in the checkpoint stay. Not collective.

    Args:
        optimizer: optimizer of the model.
        folder: checkpoint with masters.
        state: state of the model.

    Raises:
        RuntimeError: a parameter has another shape in the checkpoint.
    """
    source, tied = Source(folder.manifest), names_of_tied(state.aliases)
    with torch.no_grad():
        for updated in updated_by(optimizer, state):
            held = updated.held
            if held is None:  # another rank has it, or another model
                continue
            stored = stored_name(held.name, tied, source.shapes, source.aliases)
            if stored is None or not source.has_master(stored):
                continue
            if source.shapes[stored] != held.shape:
                raise RuntimeError(
                    f"{_C.rank_prefix()}the checkpoint does not fit the optimizer: the master of "
                    f"'{held.name}' is {list(source.shapes[stored])} there and "
                    f"{list(held.shape)} here. Build the model as it was saved, or pass "
                    "load_optimizer=False"
                )
            fill_held(held, stored, source, folder)
    state.storage.after_load()


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
    tied = names_of_tied(aliases)
    for idx, group in enumerate(optimizer.param_groups):
        found: dict[int, str] = {}
        missing = []
        for parameter in group["params"]:
            name = str(names.get(id(model_parameter_of(parameter))))
            other = stored_name(name, tied, group_of, canonical)
            if other is None:
                missing.append(name)
            else:
                found.setdefault(group_of[other], name)
        options = [stored[place]["options"] for place in found]
        if strict and (missing or any(option != options[0] for option in options)):
            reason = (
                f"has parameters that the saved optimizer had not: {few(missing)}"
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
    tied, there = names_of_tied(state.aliases), {*rests, *numbers}
    with torch.no_grad():
        for updated in updated_by(optimizer, state):
            optimizer.state.pop(updated.tensor, None)
            held = updated.held
            if held is None or updated.state_part is None:
                continue
            stored = stored_name(held.name, tied, there, aliases)
            if stored is None:
                continue
            entry = _state_of(updated, stored, rests.get(stored, []), numbers, folder)
            if entry and keeps_residue(optimizer.optimizer, updated.tensor):
                _add_master(entry, updated.tensor, held, stored, folder)
            if entry:
                optimizer.state[updated.tensor] = imported_entry(
                    optimizer.optimizer, updated.tensor, entry
                )
    _place_steps(optimizer.optimizer)


def _state_of(
    updated: Updated,
    stored: str,
    rests: list[str],
    numbers: Mapping[str, Any],
    folder: FolderReader,
) -> dict[str, Any]:
    held, part, tensor = updated.held, updated.state_part, updated.tensor
    assert held is not None and part is not None
    shape = held.shape
    entry: dict[str, Any] = {
        key: decode(value, tensor.device) for key, value in numbers.get(stored, {}).items()
    }
    found = own_state_keys(stored, rests, part, shape)
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
            f"{_C.rank_prefix()}{few(sorted(lost))} in the optimizer's state of '{stored}' has "
            "another shape than the parameter, so it loads only where the parameter is cut as it "
            "was; resume on the layout that saved it, or with load_optimizer=False"
        )
    for key, name in found.items():
        info = folder.entry(name)
        dtype = getattr(torch, info.dtype)
        if info.shape == shape:
            value = torch.empty(updated.state_shape, dtype=dtype, device=tensor.device)
            folder.read(name, part, value)
        else:
            value = folder.read(name).to(tensor.device)
        entry[key] = value
    return entry


def _add_master(
    entry: dict[str, Any], tensor: Tensor, held: Stored, stored: str, folder: FolderReader
) -> None:
    """Adds a master of its own that the checkpoint has to the state that has digits of it."""
    source = Source(folder.manifest)
    if not source.has_master(stored):
        return
    value = torch.empty_like(tensor, dtype=torch.float32, memory_format=torch.contiguous_format)
    folder.read(source.master_for(stored), held.updated, value)
    entry[MASTER_KEY] = value


def _place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Moves state that an optimizer with other options saved to where this one expects it."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            entry = optimizer.state.get(tensor, {})
            is_placed = has_own_form(optimizer, tensor)
            for key, value in entry.items():
                if isinstance(value, Tensor) and key != "step" and not is_placed:
                    entry[key] = value.to(tensor.device)
            step = entry.get("step")
            if isinstance(step, Tensor) and (group.get("capturable") or group.get("fused")):
                entry["step"] = step.to(tensor.device, torch.float32)
    # load_state_dict ends with this call.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
