"""Marks places in a model at which layout-independent dropout draws its masks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import nn

import smp._C as _C
from smp.compilation import CompiledParts
from smp.dropout import frames, places
from smp.dropout.draws import OUTSIDE, Draws
from smp.model.partitioning import Partitioning
from smp.nn.experts import HoldsExperts
from smp.nn.listed_experts import SpreadMixture
from smp.nn.module import DistributedModule
from smp.nn.planned.block import PlannedBlock
from smp.nn.planned.linear import PlannedPart
from smp.world import runtime


def draws_of(current: runtime.Runtime) -> Draws | None:
    """Returns the source of layout-independent masks; None: masks are those of PyTorch."""
    if not current.rank.config.layout_independent_dropout:
        return None
    if current.dropout is None:
        draws = Draws(current.rank, current.steps)
        current.dropout = draws
        current.on_shutdown(draws.close)
    assert isinstance(current.dropout, Draws)
    return current.dropout


class MaskPlaces:
    """Marks, around the modules of one model, where the running code is.

    Args:
        current: the runtime.
        idx: number of the model.
        partitioning: partitioning with the modules of the model.
        compiled: compiled parts of the model.
        label: returns the name of the model in messages.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        idx: int,
        partitioning: Partitioning,
        compiled: CompiledParts,
        label: Callable[[], str],
    ) -> None:
        self._current, self._idx = current, idx
        self._partitioning, self._compiled = partitioning, compiled
        self._label = label
        self._undo: Callable[[], None] | None = None

    def stand(self) -> None:
        """Puts marks around the modules, unless that is done.

        Raises:
            ValueError: modules are compiled.
        """
        if self._compiled.is_on:
            raise ValueError(
                f"{_C.rank_prefix()}smp config: {places.KEY}=True: torch.compile compiles modules "
                f"of model {self._label()}, and would keep the masks of one step for all; do not "
                "compile it, or leave the key out"
            )
        decision = self._partitioning.decision
        if self._undo is None and decision is not None:
            splits = self._current.rank.sizes["tp"] > 1
            self._undo = frames.stand_around(
                zip(decision.names, decision.modules, strict=True),
                self._idx,
                lambda module: splits and _knows_its_split_alone(module),
            )

    def outside_of_steps(self) -> AbstractContextManager[None]:
        """Returns a context for calls outside of step functions, in which a draw is an error."""
        if draws_of(self._current) is None or places.current() is not None:
            return nullcontext()
        return places.at(OUTSIDE)

    def leave(self) -> None:
        """Removes the marks. May be called twice."""
        if self._undo is not None:
            self._undo()
            self._undo = None


def _knows_its_split_alone(module: nn.Module) -> bool:
    """Returns whether a module is split and only its own code decides which elements a rank has."""
    if isinstance(module, HoldsExperts | SpreadMixture):
        return True
    if isinstance(getattr(module, "base_layer", None), PlannedPart):
        return True  # an adapter, which may drop in front of its base layer or behind
    if isinstance(module, PlannedBlock):
        return False
    is_own = type(module).__module__.startswith("smp.")
    return isinstance(module, DistributedModule) and not is_own
