"""Initialises parameters by their module's own code, with values that no rank or layout changes.

A value depends on the seed and the parameter's name: not on the partition, on loaded parameters, or
on whether the initialisation was delayed (see `own_code`).

PyTorch's convention is to make modules on the meta device and to initialise them later by
``reset_parameters`` (``torch.nn.utils.skip_init``, FSDP).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from smp.initial.creation_values import forget_draws, is_as_drawn
from smp.initial.later_writes import forget_writes
from smp.initial.named_seeds import random_numbers
from smp.initial.originals import Cut, cuts_of, distributed_in, forget_originals, in_place
from smp.initial.own_code import Initialisation, Unit, join_names, unset
from smp.modules.materialize import exchange

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

    if not any(map(is_wanted, root.parameters())) and not any(b.is_meta for b in root.buffers()):
        forget_originals(root)
        forget_writes(root)
        return
    with random_numbers(device, seed) as seeds:
        replaced = distributed_in(root)
        theirs = {p for _, made in replaced for p in made.parameters()}
        cuts = cuts_of(root, is_wanted)
        with in_place(root) as original:
            Initialisation(original, device, seeds, name).run(
                _Delayed(
                    device,
                    lambda p: p in cuts or (p not in theirs and is_wanted(p)),
                    cuts,
                    on_ready,
                )
            )
        # Parameters without a counterpart in the user's module are drawn by the distributed one.
        for place, made in replaced:
            Initialisation(made, device, seeds, join_names(name, place)).run(
                _Delayed(device, is_wanted, {}, on_ready)
            )
    forget_originals(root)
    forget_writes(root)


def initialise_again(root: nn.Module, device: torch.device, seed: int | None = None) -> None:
    """Draws parameters that still have the values of their module's own code again, by name.

    These are parameters of modules made in :func:`smp.delay_param_initialization`. All others
    stay. Not collective.

    Args:
        root: the model as the user made it.
        device: device on which random numbers are drawn; parameters stay where they are.
        seed: seed of the random numbers; PyTorch's if not given.
    """
    drawn = {p for p in root.parameters() if is_as_drawn(p)}
    if drawn:
        with random_numbers(device, seed) as seeds:
            Initialisation(root, device, seeds).run(_Drawn(device, drawn))
    for parameter in root.parameters():
        forget_draws(parameter)


class _Delayed:
    """Meta parameters of this rank, and whole ones that parameters of this rank are cut from."""

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
        exchange(parameter, unset(parameter, self._device))

    def finish(self, parameter: nn.Parameter) -> None:
        ready = [parameter]
        if parameter in self._cuts:
            ready = []
            for cut in self._cuts[parameter]:
                exchange(
                    cut.target, cut.out_of(parameter).to(cut.target.dtype, copy=True).contiguous()
                )
                ready.append(cut.target)
            exchange(parameter, parameter.to("meta"))
        for own in ready:
            if self._on_ready is not None:
                self._on_ready(own)

    def fail(self, unit: Unit, error: Exception) -> None:
        raise error


class _Drawn:
    """Real parameters that are drawn again, unless their module's code fails."""

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
        parameter.data = unset(parameter, self._device)

    def finish(self, parameter: nn.Parameter) -> None:
        home = self._homes.pop(parameter)
        home.copy_(parameter.data)
        parameter.data = home

    def fail(self, unit: Unit, error: Exception) -> None:
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
