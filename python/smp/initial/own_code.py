"""Runs the own code of modules that initialises their parameters, one module at a time.

The parameters of one module are real; all others are on the meta device, so that writes to them
have no effect. The own code of the module runs, and then that of all modules above it, because a
model may treat its parts specially. Random numbers depend on the parameter's name. So no value
depends on the rest of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

import smp._C as _C
from smp.initial.creation_values import INITIALISER, RESETS, takes_a_module, writes_of
from smp.initial.later_writes import Write
from smp.initial.named_seeds import SeededByName, Seeds
from smp.modules.materialize import filler, has_filler

_HAS_VALUES = "_is_hf_initialized"


@dataclass
class Unit:
    """Tensors that are initialised together: those that a module is the first to hold.

    Attributes:
        name: name of the module.
        module: the module.
        parameters: name in the model and parameter.
        buffers: names in the module of those on the meta device.
        holders: all modules that hold one of the parameters.
        later: parameters and writes to them that follow all own code.
    """

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    holders: list[nn.Module] = field(default_factory=list)
    later: list[tuple[nn.Parameter, Write]] = field(default_factory=list)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Returns name in the model and tensor of all parameters and buffers."""
        pairs = ((key, self.module._buffers[key]) for key in self.buffers)
        buffers = [(join_names(self.name, key), b) for key, b in pairs if b is not None]
        return [*self.parameters, *buffers]


@dataclass(frozen=True)
class Task:
    """The tensors to initialise, and what is done with them.

    Attributes:
        wants: returns whether a parameter is initialised.
        begin: fills a parameter by :func:`unset`.
        finish: takes a parameter that has its values.
        fail: restores the parameters of a unit whose initialisation failed; None: the error is
            raised.
        buffers: whether buffers on the meta device are initialised.
    """

    wants: Callable[[nn.Parameter], bool]
    begin: Callable[[nn.Parameter], None]
    finish: Callable[[nn.Parameter], None]
    fail: Callable[[Unit, Exception], None] | None = None
    buffers: bool = True


class _Code(NamedTuple):
    """The own code of one module: its place in the order of calls, its name, and the calls."""

    position: int
    name: str
    module: nn.Module
    calls: list[Callable[[], object]]


class Initialisation:
    """Initialises one model's parameters.

    Args:
        root: the model.
        device: device on which random numbers are drawn.
        seeds: random numbers by name.
        name: name of the root in the whole model.
    """

    def __init__(self, root: nn.Module, device: torch.device, seeds: Seeds, name: str = "") -> None:
        self._root = root
        self._name = name
        self._device = device
        self._seeds = seeds
        self._codes: dict[nn.Module, _Code] = {}  # children first
        self._above: dict[nn.Module, list[nn.Module]] = {root: []}
        self._visit(root, name, ())

    def _visit(self, module: nn.Module, name: str, models: tuple[nn.Module, ...]) -> None:
        initialiser = getattr(module, INITIALISER, None)
        resets = [getattr(module, reset, None) for reset in RESETS]
        if callable(initialiser):
            if takes_a_module(initialiser):
                models = (*models, module)
            else:
                resets.append(initialiser)
        for key, child in module.named_children():
            known = child in self._above
            self._above.setdefault(child, []).append(module)
            if not known:
                self._visit(child, join_names(name, key), models)
        calls: list[Callable[[], object]] = [reset for reset in resets if callable(reset)]
        if models:
            calls.append(lambda: getattr(models[-1], INITIALISER)(module))
        self._codes[module] = _Code(len(self._codes), name, module, calls)

    def run(self, task: Task) -> None:
        """Initialises all tensors that the task wants."""
        units = list(self._units(task))
        if not units:
            return
        with _Hidden(self._root) as hidden:
            for unit in units:
                parameters = [parameter for _, parameter in unit.parameters]
                hidden.put(parameters, _itself)
                for parameter in parameters:
                    # Transformers marks what has its values, and own code passes over it.
                    parameter.__dict__.pop(_HAS_VALUES, None)
                    task.begin(parameter)
                try:
                    self._run_own_code(unit, hidden)
                    _check_set(unit)
                except Exception as error:
                    if task.fail is None:
                        raise
                    task.fail(unit, error)
                else:
                    for parameter in parameters:
                        task.finish(parameter)
                hidden.put(parameters, _on_meta)

    def _units(self, task: Task) -> Iterator[Unit]:
        holders: dict[nn.Parameter, list[nn.Module]] = {}
        for module in self._root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    holders.setdefault(parameter, []).append(module)
        seen: set[nn.Parameter] = set()
        for place, module in self._root.named_modules():
            unit = Unit(join_names(self._name, place), module)
            for key, parameter in module._parameters.items():
                if parameter is None or parameter in seen or not task.wants(parameter):
                    continue
                seen.add(parameter)
                name = join_names(unit.name, key)
                unit.parameters.append((name, parameter))
                unit.holders += holders[parameter]
                writes = writes_of(parameter)
                _check_known(unit, name, writes)
                unit.later += [(parameter, write) for write in writes]
            for key, buffer in module._buffers.items():
                if buffer is not None and task.buffers and buffer.is_meta:
                    module._buffers[key] = unset(buffer, self._device)
                    unit.buffers.append(key)
            if unit.parameters or unit.buffers:
                yield unit

    def _run_own_code(self, unit: Unit, hidden: _Hidden) -> None:
        codes = self._codes_for(unit)
        names = {tensor.untyped_storage()._cdata: name for name, tensor in unit.tensors()}
        flags = [(name, t) for name, t in unit.tensors() if t.dtype == torch.bool]
        results = []
        with hidden.buffers(unit, [code.module for code in codes]):
            # Flags have no third value. A flag that keeps its filling both times was not set.
            for filling in (False, True) if flags else (False,):
                for _, flag in flags:
                    flag.fill_(filling)
                with SeededByName(names, self._seeds):
                    for code in codes:
                        self._seeds.set(code.name)
                        for call in code.calls:
                            call()
                    for parameter, write in unit.later:
                        write.repeat(parameter)
                results.append([flag.clone() for _, flag in flags])
        for (name, _), *values in zip(flags, *results, strict=True):
            if not torch.equal(*values):
                raise _not_initialised(unit, name)

    def _codes_for(self, unit: Unit) -> list[_Code]:
        """Returns the own code of all modules that contain a tensor of the unit, children first."""
        found: set[nn.Module] = set()
        waiting = [unit.module, *unit.holders]
        while waiting:
            module = waiting.pop()
            if module not in found:
                found.add(module)
                waiting += self._above[module]
        return sorted(self._codes[module] for module in found)


def join_names(name: str, key: str) -> str:
    return f"{name}.{key}" if name and key else name or key


def _check_set(unit: Unit) -> None:
    for name, tensor in unit.tensors():
        if tensor.dtype != torch.bool and has_filler(tensor):
            raise _not_initialised(unit, name)


def _check_known(unit: Unit, name: str, writes: Sequence[Write]) -> None:
    for write in writes:
        if write.arguments is None:
            raise ValueError(
                f"{_C.rank_prefix()}'{name}' was created on the meta device, and a constructor "
                f"has set it by {write.name} to what cannot be computed again, because it depends "
                "on parameters that have no values yet or is a part of a larger tensor; do that in "
                f"a reset_parameters() of {type(unit.module).__name__}, or in the _init_weights of "
                "the model, or create it outside of delay_param_initialization"
            )


def _not_initialised(unit: Unit, name: str) -> ValueError:
    return ValueError(
        f"{_C.rank_prefix()}nothing initialises '{name}', which was created on the meta device; "
        f"give {type(unit.module).__name__} a reset_parameters() that does, or create it outside "
        "of delay_param_initialization"
    )


class _Hidden:
    """Hides all parameters of a model but one unit's behind others on the meta device."""

    def __init__(self, root: nn.Module) -> None:
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in root.modules():
            if isinstance(module, nn.RNNBase):
                module._flat_weight_refs = []  # weak references forbid to exchange tensors
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(parameter, []).append((module, key))

    def __enter__(self) -> _Hidden:
        self.put(self._places, _on_meta)
        return self

    def __exit__(self, *_: object) -> None:
        self.put(self._places, _itself)

    def put(
        self, parameters: Iterable[nn.Parameter], shown: Callable[[nn.Parameter], nn.Parameter]
    ) -> None:
        """Shows what ``shown`` returns in the places of parameters."""
        for parameter in parameters:
            other = shown(parameter)
            for module, key in self._places[parameter]:
                module._parameters[key] = other

    @contextmanager
    def buffers(self, unit: Unit, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Preserves the buffers of modules, except the unit's, against their own code.

        Modules with tensors in the unit see copies of their buffers; the others see none.
        """
        readers = {unit.module, *unit.holders}
        kept: list[tuple[nn.Module, str, Tensor]] = []
        for module in modules:
            for key, buffer in module._buffers.items():
                if buffer is None or (module is unit.module and key in unit.buffers):
                    continue
                kept.append((module, key, buffer))
                module._buffers[key] = buffer.clone() if module in readers else buffer.to("meta")
        try:
            yield
        finally:
            for module, key, buffer in kept:
                module._buffers[key] = buffer


def _itself(parameter: nn.Parameter) -> nn.Parameter:
    return parameter


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.is_meta:
        return parameter
    # Not to("meta"), which would copy the strides of placeholders.
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    hidden = nn.Parameter(empty, parameter.requires_grad)
    hidden.__dict__.update(parameter.__dict__)
    return hidden


def unset(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor like another, of elements that no initialisation writes."""
    whole = filler(tensor.dtype, device).expand(tensor.shape)
    return whole.clone(memory_format=torch.contiguous_format)
