"""Initial values of parameters, by their module's own code, whatever rank they are on.

One module at a time: its parameters are real, those of all others are on the meta device, so that
whatever code does to these comes to nothing. Then the own code of the module runs, and that of all
modules above it, because a model may treat its parts specially. Random numbers are those of the
parameter's name. So no value depends on what else is there: not on the partition, not on what was
loaded, not on whether the initialisation was delayed.

That modules are made on the meta device and initialised later by ``reset_parameters`` is PyTorch's
convention (``torch.nn.utils.skip_init``, FSDP).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from smp import _C
from smp.memory.creation_values import (
    INITIALISER,
    RESETS,
    forget_draws,
    is_as_drawn,
    takes_a_module,
)
from smp.memory.materialize import exchange, filler, has_filler
from smp.memory.originals import Cut, cuts_of, distributed_in, forget_originals, in_place

_log = logging.getLogger("smp")


def initialise_delayed(
    root: nn.Module,
    is_local: Callable[[Tensor], bool],
    device: torch.device,
    *,
    name: str = "",
    seed: int | None = None,
    on_ready: Callable[[nn.Parameter], None] | None = None,
) -> None:
    """Allocates and initialises what is on the meta device: local parameters, and all buffers.

    At no time are more parameters whole than those that are ready and those of one module.

    Args:
        root: the model; parameters of other ranks stay on the meta device.
        is_local: whether a parameter belongs to this rank.
        device: of this process.
        name: of ``root`` in the whole model.
        seed: of random numbers; PyTorch's if not given.
        on_ready: called with each local parameter that was on the meta device, as soon as it has
            its values; may take its memory away.

    Raises:
        ValueError: names what no code of its module or model initialises.
    """

    def is_wanted(parameter: nn.Parameter) -> bool:
        return parameter.is_meta and is_local(parameter)

    if not any(map(is_wanted, root.parameters())) and not any(b.is_meta for b in root.buffers()):
        forget_originals(root)
        return
    with _random_numbers(device, seed) as seeds:
        replaced = distributed_in(root)
        theirs = {p for _, made in replaced for p in made.parameters()}
        cuts = cuts_of(root, is_wanted)
        with in_place(root) as original:
            _Initialisation(original, device, seeds, name).run(
                _Delayed(
                    device,
                    lambda p: p in cuts or (p not in theirs and is_wanted(p)),
                    cuts,
                    on_ready,
                )
            )
        # Whatever has no counterpart in the module of the user is drawn by the distributed one.
        for place, made in replaced:
            _Initialisation(made, device, seeds, _join(name, place)).run(
                _Delayed(device, is_wanted, {}, on_ready)
            )
    forget_originals(root)


def initialise_again(root: nn.Module, device: torch.device, seed: int | None = None) -> None:
    """Gives parameters that are as their module's own code left them the values of their names.

    That is those of modules which were made in :func:`smp.delay_param_initialization`, see there.
    Others stay. Not collective.

    Args:
        root: the model as the user made it.
        device: where random numbers are drawn; parameters stay where they are.
        seed: of random numbers; PyTorch's if not given.
    """
    drawn = {p for p in root.parameters() if is_as_drawn(p)}
    if drawn:
        with _random_numbers(device, seed) as seeds:
            _Initialisation(root, device, seeds).run(_Drawn(device, drawn))
    for parameter in root.parameters():
        forget_draws(parameter)


# ---- which tensors, and what becomes of them ------------------------------------------


class _Task(Protocol):
    """What is initialised."""

    def wants(self, parameter: nn.Parameter) -> bool: ...
    def wants_buffer(self, buffer: Tensor) -> bool: ...
    def begin(self, parameter: nn.Parameter) -> None:
        """Makes it a tensor that is full of :func:`filler`."""
    def finish(self, parameter: nn.Parameter) -> None:
        """It has its values."""
    def fail(self, unit: _Unit, error: Exception) -> None:
        """It has not, nor has the rest of its unit; raises or puts everything back."""


class _Delayed:
    """Parameters on the meta device: of this rank, or such that some of this rank are cut from."""

    def __init__(
        self,
        device: torch.device,
        wants: Callable[[nn.Parameter], bool],
        cuts: Mapping[nn.Parameter, Sequence[Cut]],
        on_ready: Callable[[nn.Parameter], None] | None,
    ) -> None:
        self._device = device
        self.wants = wants
        self._cuts = cuts
        self._on_ready = on_ready

    def wants_buffer(self, buffer: Tensor) -> bool:
        return buffer.is_meta

    def begin(self, parameter: nn.Parameter) -> None:
        exchange(parameter, _unset(parameter, self._device))

    def finish(self, parameter: nn.Parameter) -> None:
        ready = [parameter]
        if parameter in self._cuts:
            ready = []
            for cut in self._cuts[parameter]:
                exchange(cut.target, cut.out_of(parameter).to(cut.target.dtype, copy=True).contiguous())
                ready.append(cut.target)
            exchange(parameter, parameter.to("meta"))
        for own in ready:
            if self._on_ready is not None:
                self._on_ready(own)

    def fail(self, unit: _Unit, error: Exception) -> None:
        raise error


class _Drawn:
    """Real parameters that are drawn again; those whose code cannot do so stay."""

    def __init__(self, device: torch.device, drawn: set[nn.Parameter]) -> None:
        self._device = device
        self._drawn = drawn
        self._homes: dict[nn.Parameter, Tensor] = {}

    def wants(self, parameter: nn.Parameter) -> bool:
        return parameter in self._drawn

    def wants_buffer(self, buffer: Tensor) -> bool:
        return False

    def begin(self, parameter: nn.Parameter) -> None:
        self._homes[parameter] = parameter.data
        parameter.data = _unset(parameter, self._device)

    def finish(self, parameter: nn.Parameter) -> None:
        home = self._homes.pop(parameter)
        home.copy_(parameter.data)
        parameter.data = home

    def fail(self, unit: _Unit, error: Exception) -> None:
        for parameter, home in self._homes.items():
            parameter.data = home
        self._homes.clear()
        _log.warning(
            "smp: the parameters of '%s' keep the values of their creation, which may depend on "
            "the layout of the ranks: its own code cannot initialise them alone (%s: %s)",
            unit.name,
            type(error).__name__,
            str(error).strip().splitlines()[0] if str(error) else "",
        )


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    return filler(tensor.dtype, device).expand(tensor.shape).contiguous()


# ---- one module at a time -------------------------------------------------------------


@dataclass
class _Unit:
    """Tensors that are initialised together: those that a module is the first to hold.

    Attributes:
        name: of the module.
        module: it.
        parameters: name in the model and parameter.
        buffers: names in the module of those on the meta device.
        holders: all modules that hold one of the parameters.
    """

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    holders: list[nn.Module] = field(default_factory=list)


@dataclass(frozen=True)
class _Code:
    """Own code of one module.

    Attributes:
        name, module: whose.
        calls: that initialise it.
    """

    name: str
    module: nn.Module
    calls: tuple[Callable[[], object], ...]


class _Initialisation:
    """Of one model.

    Args:
        root: the model.
        device: of random numbers.
        seeds: of them.
        name: of the root in the whole model.
    """

    def __init__(
        self, root: nn.Module, device: torch.device, seeds: _Seeds, name: str = ""
    ) -> None:
        self._root = root
        self._name = name
        self._device = device
        self._seeds = seeds
        self._codes: list[_Code] = []  # children first
        self._position: dict[nn.Module, int] = {}
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
                self._visit(child, _join(name, key), models)
        calls: list[Callable[[], object]] = [reset for reset in resets if callable(reset)]
        if models:
            calls.append(lambda: getattr(models[-1], INITIALISER)(module))
        self._position[module] = len(self._codes)
        self._codes.append(_Code(name, module, tuple(calls)))

    def run(self, task: _Task) -> None:
        """Initialises all that the task wants."""
        units = list(self._units(task))
        if not units:
            return
        with _Hidden(self._root) as hidden:
            for unit in units:
                hidden.show(unit)
                for _, parameter in unit.parameters:
                    task.begin(parameter)
                try:
                    self._run_own_code(unit, hidden)
                    _check_set(unit)
                except Exception as error:
                    task.fail(unit, error)
                else:
                    for _, parameter in unit.parameters:
                        task.finish(parameter)
                hidden.hide(unit)

    def _units(self, task: _Task) -> Iterator[_Unit]:
        holders: dict[nn.Parameter, list[nn.Module]] = {}
        for module in self._root.modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    holders.setdefault(parameter, []).append(module)
        seen: set[nn.Parameter] = set()
        for place, module in self._root.named_modules():
            name = _join(self._name, place)
            unit = _Unit(name, module)
            for key, parameter in module._parameters.items():
                if parameter is None or parameter in seen or not task.wants(parameter):
                    continue
                seen.add(parameter)
                unit.parameters.append((_join(name, key), parameter))
                unit.holders += holders[parameter]
            for key, buffer in module._buffers.items():
                if buffer is not None and task.wants_buffer(buffer):
                    module._buffers[key] = _unset(buffer, self._device)
                    unit.buffers.append(key)
            if unit.parameters or unit.buffers:
                yield unit

    def _run_own_code(self, unit: _Unit, hidden: _Hidden) -> None:
        codes = self._codes_for(unit)
        tensors = [*unit.parameters, *_buffers_of(unit)]
        flags = [tensor for _, tensor in tensors if tensor.dtype == torch.bool]
        with hidden.buffers(unit, [code.module for code in codes]):
            self._call(codes, tensors)
            if not flags:
                return
            # Flags have no third value: what stays what it was filled with, both times, was not
            # set.
            before = [flag.clone() for flag in flags]
            for flag in flags:
                flag.fill_(True)
            self._call(codes, tensors)
            for (name, _), was, flag in zip(
                [item for item in tensors if item[1].dtype == torch.bool], before, flags,
                strict=True,
            ):
                if not torch.equal(was, flag):
                    raise _not_initialised(unit, name)

    def _codes_for(self, unit: _Unit) -> list[_Code]:
        """Own code of all modules that have a tensor of the unit in them, children first."""
        found: set[nn.Module] = set()
        waiting = [unit.module, *unit.holders]
        while waiting:
            module = waiting.pop()
            if module not in found:
                found.add(module)
                waiting += self._above[module]
        return [self._codes[i] for i in sorted(self._position[module] for module in found)]

    def _call(self, codes: Iterable[_Code], tensors: Sequence[tuple[str, Tensor]]) -> None:
        names = {tensor.untyped_storage()._cdata: name for name, tensor in tensors}
        with _SeededByName(names, self._seeds):
            for code in codes:
                self._seeds.set(code.name)
                for call in code.calls:
                    call()


def _buffers_of(unit: _Unit) -> list[tuple[str, Tensor]]:
    pairs = ((key, unit.module._buffers[key]) for key in unit.buffers)
    return [(_join(unit.name, key), buffer) for key, buffer in pairs if buffer is not None]


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name and key else name or key


def _check_set(unit: _Unit) -> None:
    for name, tensor in [*unit.parameters, *_buffers_of(unit)]:
        if tensor.dtype != torch.bool and has_filler(tensor):
            raise _not_initialised(unit, name)


def _not_initialised(unit: _Unit, name: str) -> ValueError:
    return ValueError(
        f"{_C.rank_prefix()}nothing initialises '{name}', which was created on the meta device; "
        f"give {type(unit.module).__name__} a reset_parameters() that does, or create it outside "
        "of delay_param_initialization"
    )


class _Hidden:
    """Parameters of a model but those of one unit, behind others on the meta device."""

    def __init__(self, root: nn.Module) -> None:
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module in root.modules():
            if isinstance(module, nn.RNNBase):
                module._flat_weight_refs = []  # weak references forbid to exchange tensors
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(parameter, []).append((module, key))

    def __enter__(self) -> _Hidden:
        for parameter in self._places:
            self._put(parameter, _on_meta(parameter))
        return self

    def __exit__(self, *_: object) -> None:
        for parameter in self._places:
            self._put(parameter, parameter)

    def show(self, unit: _Unit) -> None:
        for _, parameter in unit.parameters:
            self._put(parameter, parameter)

    def hide(self, unit: _Unit) -> None:
        for _, parameter in unit.parameters:
            self._put(parameter, _on_meta(parameter))

    def _put(self, parameter: nn.Parameter, shown: nn.Parameter) -> None:
        for module, key in self._places[parameter]:
            module._parameters[key] = shown

    @contextmanager
    def buffers(self, unit: _Unit, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Keeps the buffers of modules as they are, but those of the unit.

        Modules with tensors in the unit may read their own; of the others they are hidden.
        """
        readers = {unit.module, *unit.holders}
        kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for module in modules:
            for key, buffer in module._buffers.items():
                if buffer is None or (module is unit.module and key in unit.buffers):
                    continue
                shown = buffer.clone() if module in readers else buffer.to("meta")
                kept.append((module, key, buffer, shown))
                module._buffers[key] = shown
        try:
            yield
        finally:
            for module, key, buffer, _ in kept:
                module._buffers[key] = buffer


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.is_meta:
        return parameter
    # Without to("meta"), which would copy the strides of placeholders.
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    hidden = nn.Parameter(empty, parameter.requires_grad)
    hidden.__dict__.update(parameter.__dict__)
    return hidden


# ---- random numbers -------------------------------------------------------------------


@contextmanager
def _random_numbers(device: torch.device, seed: int | None) -> Iterator[_Seeds]:
    """Seeds by name; the generators are as before afterwards, and nothing is recorded."""
    outside = _C.RandomState.capture(str(device))
    try:
        with torch.no_grad():
            yield _Seeds(device, torch.initial_seed() if seed is None else seed)
    finally:
        outside.restore()


class _SeededByName(TorchDispatchMode):
    """Makes what is drawn for a tensor depend on its name alone."""

    def __init__(self, names: Mapping[int, str], seeds: _Seeds) -> None:
        super().__init__()
        self._names = names
        self._seeds = seeds

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(args[0], Tensor):
            name = self._names.get(args[0].untyped_storage()._cdata)
            if name is not None:
                self._seeds.set(name)
        return func(*args, **(kwargs or {}))


class _Seeds:
    """Random numbers by name.

    Args:
        device: of this process.
        seed: of all of them.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self._device = str(device)
        self._base = seed & (2**64 - 1)

    def set(self, name: str) -> None:
        """Seeds the generators for what has this name."""
        digest = hashlib.sha256(name.encode()).digest()
        seed = _C.mix_seed(self._base, int.from_bytes(digest[:8], "little"))
        _C.seed_generators(seed, self._device)
