"""The state that travels with a call besides its arguments, and returns besides its result.

Code of one process shares more than arguments and results: containers in context variables,
attributes of modules, whether modules train and parameters require gradients. State that the
trace or the caller's context shows travels with the call; everything else is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import smp._C as _C
from smp.modules import collected
from smp.modules.module_writes import Key, ModuleWrites
from smp.modules.tables import Swaps, keep_apart
from smp.pipeline import collectors, module_state
from smp.pipeline.callee import is_certain
from smp.pipeline.module_state import ModuleState


@dataclass(frozen=True)
class RequestState:
    """The state that travels with a request.

    Attributes:
        containers: containers in context variables of the caller.
        hooked: indices of the models whose outputs the caller captures by hooks.
        attributes: values written to the callee and to modules below it.
        flags: modes of these modules and flags of their parameters, if they have changed since
            the model was partitioned.
        is_same_rank: whether the caller is on the rank of the callee.
    """

    containers: dict[str, Any] | None = None
    hooked: tuple[int, ...] = ()
    attributes: dict[Key, Any] | None = None
    flags: tuple[bool, ...] | None = None
    is_same_rank: bool = False


@dataclass(frozen=True)
class AnswerState:
    """The state that travels with an answer.

    Attributes:
        additions: additions to the containers of the caller.
        attributes: values that the callee and the modules below it have written.
    """

    additions: list[collectors.Addition] | None = None
    attributes: dict[Key, Any] | None = None

    @property
    def is_certain(self) -> bool:
        """Returns whether the structure determines everything but the data of tensors."""
        values: list[Any] = list((self.attributes or {}).values())
        for addition in self.additions or ():
            items = addition.items
            values += items.values() if isinstance(items, dict) else items
        return all(map(is_certain, values))


class CallState:
    """The state around the calls of one model on one rank.

    Args:
        modules: modules of the model, the same on all ranks.
        names: names of the modules, for errors.
        writes: writes of its forwards.
        owners: global ranks, by index, of modules of other ranks and of modules of later stages of
            this rank.
        global_rank: global rank of this process.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        names: Sequence[str],
        writes: ModuleWrites,
        owners: Mapping[int, int],
        global_rank: int,
    ) -> None:
        self._modules = modules
        self._names = names
        self._ids = {module: i for i, module in enumerate(modules)}
        self._attributes = ModuleState(modules, names, writes, owners, global_rank)
        self._flags: dict[int, _Flags] = {}
        self._flags_at_first: dict[nn.Module | nn.Parameter, bool] = {}
        self._values_of: dict[int, dict[tuple[int, str], Any]] = {}
        self.swaps = Swaps(module_state.context)
        self._undo: list[Callable[[], None]] = []

    def open(self) -> None:
        """Prepares the modules when the model is connected."""
        self._attributes.open()
        for module, name in zip(self._modules, self._names, strict=True):
            self._undo.append(keep_apart(module, name, self.swaps))
            self._flags_at_first[module] = module.training
            for parameter in dict.values(module._parameters):  # no values are read
                if parameter is not None:
                    self._flags_at_first[parameter] = parameter.requires_grad

    def close(self) -> None:
        """Restores the modules. May be called twice."""
        self._attributes.close()
        for undo in self._undo:
            undo()
        self._undo.clear()

    def microbatch_done(self, mb: int) -> None:
        """Frees the values of a microbatch."""
        self._values_of.pop(mb, None)

    # ---- caller

    def along(self, module_id: int, is_same_rank: bool) -> RequestState | None:
        """Returns the state that travels with a call of a module, or None."""
        containers = collectors.collectors()
        attributes = self._attributes.values(module_id)
        flags = self._flags_of(module_id).changed(self._flags_at_first)
        if not containers and attributes is None and flags is None:
            return None
        hooked = collectors.hooked_models(self._modules) if containers else ()
        return RequestState(
            containers={name: collected.outline(value) for name, value in containers.items()},
            hooked=tuple(self._ids[model] for model in hooked),
            attributes=attributes,
            flags=flags,
            is_same_rank=is_same_rank,
        )

    def settle(self, back: AnswerState, is_same_rank: bool) -> None:
        """Applies the state that a call has returned."""
        if back.additions:
            collectors.add(collectors.collectors(), back.additions)
        self._attributes.take(back.attributes, is_same_rank)

    # ---- callee

    @contextlib.contextmanager
    def as_at_the_caller(
        self, module_id: int, mb: int, along: RequestState | None
    ) -> Iterator[None]:
        """Lets the module run inside as if its caller ran it, in a context of its own."""
        module_state.begin_context(self._values_of.setdefault(mb, {}))
        along = along or RequestState()
        if along.containers:
            collectors.install(along.containers, [self._modules[i] for i in along.hooked])
        self._attributes.take(along.attributes, along.is_same_rank)
        flags = self._flags_of(module_id).set_to(along.flags, self._flags_at_first)
        with flags, module_state.running(module_state.Running.CALL):
            yield

    def back(self, module_id: int, along: RequestState | None) -> AnswerState:
        """Returns the state that travels with the answer; called inside `as_at_the_caller`."""
        attributes = self._attributes.values(module_id)
        found = None
        if along is not None and along.containers:
            name = self._names[module_id]
            found = collectors.additions(along.containers, name)
        return AnswerState(found or None, attributes)

    def _flags_of(self, module_id: int) -> _Flags:
        flags = self._flags.get(module_id)
        if flags is None:
            module = self._modules[module_id]
            flags = self._flags[module_id] = _Flags(module, self._names[module_id])
        return flags


_FirstFlags = Mapping[nn.Module | nn.Parameter, bool]


class _Flags:
    """The modes of a module and of those below it, and the flags of their parameters."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._name = name
        self._modules = list(module.modules())
        self._parameters = [
            (m._parameters, key, p, f"{path}.{key}" if path else key)
            for path, m in module.named_modules()
            for key, p in m._parameters.items()
            if p is not None
        ]

    def _now(self) -> list[bool]:
        now = [module.training for module in self._modules]
        now += [parameter.requires_grad for _, _, parameter, _ in self._parameters]
        return now

    def _then(self, at_first: _FirstFlags) -> list[bool]:
        then = [at_first.get(module, module.training) for module in self._modules]
        return then + [at_first.get(p, p.requires_grad) for _, _, p, _ in self._parameters]

    def changed(self, at_first: _FirstFlags) -> tuple[bool, ...] | None:
        """Returns the present flags if they differ from those at first, else None.

        Code of a module changes them only on the rank that runs it, so the caller's count.

        Raises:
            RuntimeError: a parameter is not the module's own.
        """
        for table, key, parameter, path in self._parameters:
            if table.get(key) is not parameter:
                raise RuntimeError(
                    f"{_C.rank_prefix()}module '{self._name}' is on another rank, and its "
                    f"parameter '{path}' has been replaced here (torch.func.functional_call, or "
                    "code that assigns parameters), which that rank cannot see; call the module "
                    "with its own parameters, or put it on partition 0 (smp.set_partition)"
                )
        now = self._now()
        return None if now == self._then(at_first) else tuple(now)

    @contextlib.contextmanager
    def set_to(self, flags: Sequence[bool] | None, at_first: _FirstFlags) -> Iterator[None]:
        """Sets flags inside as at the caller: to ``flags``, or to those at first.

        Raises:
            ValueError: with gradients on, the caller trains a parameter that is frozen here.
        """
        before = self._now()
        wanted = self._then(at_first) if flags is None else list(flags)
        if wanted == before:
            yield
            return
        self._refuse_thawed(before, wanted)
        self._set(wanted)
        try:
            yield
        finally:
            self._set(before)

    def _refuse_thawed(self, before: Sequence[bool], wanted: Sequence[bool]) -> None:
        first = len(self._modules)
        pairs = zip(self._parameters, before[first:], wanted[first:], strict=True)
        for (_, _, _, path), is_trained, is_wanted in pairs:
            if is_wanted and not is_trained and torch.is_grad_enabled():
                raise ValueError(
                    f"{_C.rank_prefix()}module '{self._name}' is called from another rank, where "
                    f"its parameter '{path}' is trained, but it is frozen on this rank, so its "
                    "gradient would be lost. A forward, or the script on some ranks only, has "
                    "thawed it (requires_grad_(True)). Thaw parameters between steps, on all ranks"
                )

    def _set(self, flags: Sequence[bool]) -> None:
        for module, flag in zip(self._modules, flags, strict=False):
            module.training = flag
        own = flags[len(self._modules) :]
        for (_, _, parameter, _), flag in zip(self._parameters, own, strict=True):
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
