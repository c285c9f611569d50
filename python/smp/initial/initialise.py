"""Initialises parameters by their module's own code, with values that no rank or layout changes.

A value depends on the seed and the parameter's name: not on the partition, on loaded parameters, or
on whether the initialisation was delayed (see `own_code`).

PyTorch's convention is to make modules on the meta device and to initialise them later by
``reset_parameters`` (``torch.nn.utils.skip_init``, FSDP).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import Tensor, nn

from smp.initial.creation_values import forget_draws, forget_writes, is_as_drawn
from smp.initial.named_seeds import random_numbers
from smp.initial.originals import Cut, cuts_of, distributed_in, forget_originals, in_place
from smp.initial.own_code import Initialisation, Task, Unit, join_names, unset
from smp.initial.sources import has_source, take_value
from smp.modules.materialize import exchange

_log = logging.getLogger("smp")
_awaiting: WeakSet[nn.Module] = WeakSet()


def await_values(root: nn.Module) -> None:
    """Notes that all parameters of a model get values from a file as soon as they are made.

    They are allocated and not drawn then. The caller loads them strictly, so that none is left out.
    """
    _awaiting.add(root)


def initialise_delayed(
    root: nn.Module,
    is_local: Callable[[Tensor], bool],
    device: torch.device,
    *,
    name: str = "",
    seed: int | None = None,
    on_ready: Callable[[nn.Parameter], None] | None = None,
) -> None:
    """Allocates and initialises local parameters and all buffers that are on the meta device.

    Besides the finished parameters only those of one module are whole at a time.

    Args:
        root: the model; parameters of other ranks stay on the meta device.
        is_local: whether a parameter belongs to this rank.
        device: device of this process.
        name: name of ``root`` in the whole model.
        seed: seed of the random numbers; PyTorch's if not given.
        on_ready: called with each local parameter that was on the meta device, as soon as it has
            its values; may free its memory.

    Raises:
        ValueError: no code of its module or model initialises a tensor, or a constructor has
            computed it from delayed parameters. The message has its name.
    """

    def is_wanted(parameter: nn.Parameter) -> bool:
        return parameter.is_meta and is_local(parameter)

    def begin(parameter: nn.Parameter) -> None:
        exchange(parameter, unset(parameter, device))

    def finish(parameter: nn.Parameter) -> None:
        ready = [cut.fill(parameter) for cut in cuts.get(parameter, ())] or [parameter]
        if all(own is not parameter for own in ready):
            exchange(parameter, parameter.to("meta"))
        if on_ready is not None:
            for own in ready:
                on_ready(own)

    if root in _awaiting and not any(b.is_meta for b in root.buffers()):
        for parameter in filter(is_wanted, root.parameters()):
            exchange(parameter, torch.empty_like(parameter, device=device))
            if on_ready is not None:
                on_ready(parameter)
    cuts: dict[nn.Parameter, list[Cut]] = {}
    if any(map(is_wanted, root.parameters())) or any(b.is_meta for b in root.buffers()):
        with random_numbers(device, seed) as seeds:
            replaced = distributed_in(root)
            theirs = {p for _, made in replaced for p in made.parameters()}
            cuts = cuts_of(root, is_wanted)
            for parameter in list(dict.fromkeys((*root.parameters(), *cuts))):
                if has_source(parameter) and (parameter in cuts or is_wanted(parameter)):
                    take_value(parameter, device)
                    finish(parameter)
                    cuts.pop(parameter, None)
            with in_place(root) as original:
                Initialisation(original, device, seeds, name).run(
                    Task(lambda p: p in cuts or (p not in theirs and is_wanted(p)), begin, finish)
                )
            # Parameters without a counterpart in the user's module are drawn by the distributed
            # one.
            cuts = {}
            for place, made in replaced:
                Initialisation(made, device, seeds, join_names(name, place)).run(
                    Task(is_wanted, begin, finish)
                )
    forget_originals(root)
    forget_writes(root)


def initialise_again(root: nn.Module, device: torch.device, seed: int | None = None) -> None:
    """Draws parameters that still have the values of their module's own code again, by name.

    These are parameters of modules made in :func:`smp.delay_param_initialization`. All others
    stay, also those that their module's own code cannot initialise alone. Not collective.

    Args:
        root: the model as the user made it.
        device: device on which random numbers are drawn; parameters stay where they are.
        seed: seed of the random numbers; PyTorch's if not given.
    """
    drawn = {p for p in root.parameters() if is_as_drawn(p)}
    homes: dict[nn.Parameter, Tensor] = {}

    def begin(parameter: nn.Parameter) -> None:
        homes[parameter] = parameter.data
        parameter.data = unset(parameter, device)

    def finish(parameter: nn.Parameter) -> None:
        home = homes.pop(parameter)
        parameter.data = home.copy_(parameter.data)

    def fail(unit: Unit, error: Exception) -> None:
        for parameter, home in homes.items():
            parameter.data = home
        homes.clear()
        _log.warning(
            "smp: the parameters of '%s' keep the values of their creation, which may depend on "
            "the layout of the ranks: its own code cannot initialise them alone (%s: %s)",
            unit.name,
            type(error).__name__,
            str(error).strip().splitlines()[0] if str(error) else "",
        )

    if drawn:
        with random_numbers(device, seed) as seeds:
            task = Task(drawn.__contains__, begin, finish, fail, buffers=False)
            Initialisation(root, device, seeds).run(task)
    forget_draws(root)
