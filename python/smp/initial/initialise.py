"""Initial values of parameters, by their module's own code, whatever rank they are on.

A value depends on the seed and the parameter's name: not on the partition, not on what was loaded,
not on whether the initialisation was delayed (see `own_code`).

That modules are made on the meta device and initialised later by ``reset_parameters`` is PyTorch's
convention (``torch.nn.utils.skip_init``, FSDP).
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
        ValueError: names what no code of its module or model initialises, and what a constructor
            has computed of delayed parameters.
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
        # Whatever has no counterpart in the module of the user is drawn by the distributed one.
        for place, made in replaced:
            Initialisation(made, device, seeds, join_names(name, place)).run(
                _Delayed(device, is_wanted, {}, on_ready)
            )
    forget_originals(root)
    forget_writes(root)


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
        with random_numbers(device, seed) as seeds:
            Initialisation(root, device, seeds).run(_Drawn(device, drawn))
    for parameter in root.parameters():
        forget_draws(parameter)


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
