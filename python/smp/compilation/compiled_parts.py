"""Compiles parts of one model on this rank."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping

from torch import nn

import smp._C as _C
from smp.compilation.backend import prepare_threads
from smp.compilation.compiled_forward import CompiledForward
from smp.compilation.notes import CompilationNotes
from smp.compilation.units import Chooser, Left, Unit, has_hooks, is_recorded
from smp.modules.compiled import (
    COMPILED_CALL,
    PLAIN_FORWARD,
    CompileRequest,
    take_calls,
    take_compiled,
)
from smp.modules.forwards import Forward, WrapperKind, num_changes, wrap_forward
from smp.partition.decision import Decision
from smp.world import comm
from smp.world.rank import Rank

_log = logging.getLogger("smp")

#: Mode that compiles the modules that are local to a stage.
STAGE = "stage"


def check_mode(mode: object) -> None:
    """Raises unless the value of `compile` is "stage" or None."""
    if mode is not None and mode != STAGE:
        raise ValueError(
            f'{_C.rank_prefix()}DistributedModel: compile must be "stage" or None, got {mode!r}; '
            "options of torch.compile are arguments of DistributedModel.compile()"
        )


class CompiledParts:
    """Replaces the user's compiled modules of a model by units that are compiled on this rank.

    Modules are chosen when the model is partitioned, and again when wrappers of their forwards
    change or hooks are registered on them, because the compiler would not see that.

    Args:
        rank: rank of this process.
        root: the user's model, without the wrappers of `torch.compile` around its modules.
        mode: "stage", or None for only those modules that the user has compiled.
        requests: requests of the removed wrappers, by module.
    """

    def __init__(
        self,
        rank: Rank,
        root: nn.Module,
        mode: str | None,
        requests: Mapping[nn.Module, CompileRequest],
    ) -> None:
        prepare_threads()
        self._rank = rank
        self._root = root
        self._by_stage = mode == STAGE
        self._requests = dict(requests)
        self._modules: list[nn.Module] = []
        self._here: set[nn.Module] = set()
        self._writes: set[nn.Module] = set()
        self._is_placed = False
        self._failed: dict[type[nn.Module], str] = {}
        self._chosen_for: object = None
        self._changes_then = -1
        self._units: dict[nn.Module, Unit] = {}
        self._undo: dict[nn.Module, Callable[[], None]] = {}
        self._notes = CompilationNotes()

    @property
    def units(self) -> list[str]:
        """Returns names of the modules that are compiled on this rank, each as a whole."""
        return [unit.name for module, unit in self._units.items() if module in self._undo]

    @property
    def is_on(self) -> bool:
        """Returns whether there is anything to compile, as far as is known."""
        return self._by_stage or bool(self._requests)

    def request(self, module: nn.Module, request: CompileRequest | None) -> bool:
        """Sets the user's request for a module, in place of an earlier one.

        Returns:
            whether the request has changed.
        """
        if self._requests.get(module) == request:
            return False
        if request is None:
            self._requests.pop(module, None)
        else:
            self._requests[module] = request
        self._chosen_for = None
        return True

    def place(self, decision: Decision, pp_rank: int) -> None:
        """Notes the partition of the model.

        Args:
            decision: ranks of all modules.
            pp_rank: pipeline rank of this process.
        """
        self._modules = list(decision.modules)
        owners = zip(decision.modules, decision.owner_partitions, strict=True)
        self._here = {module for module, owner in owners if owner in (None, pp_rank)}
        self._writes = {decision.modules[idx] for idx, _ in decision.index.writes.own}
        self._is_placed = True
        for module in [m for m in self._requests if m not in decision.partition_of]:
            del self._requests[module]
            reason = "a module of smp.nn has taken its place"
            self._notes.note(Left("replaced", type(module).__name__, reason))

    def take(self) -> None:
        """Collects the user's new requests; before the partition also those by compiled modules."""
        found: dict[nn.Module, CompileRequest] = {}
        if not self._is_placed:
            take_compiled(self._root, found)
        else:
            for module in self._modules:
                own = module.__dict__
                if COMPILED_CALL in own or hasattr(own.get("forward"), PLAIN_FORWARD):
                    take_calls((module,), found)
        for module, request in found.items():
            self.request(module, request)

    def settle(self) -> None:
        """Compiles all requested modules. Runs between steps, or without a step."""
        self.take()
        if not (self._is_placed and (self._by_stage or self._requests)):
            return
        hooked = tuple(id(module) for module in self._modules if has_hooks(module))
        now = (num_changes(), hooked, len(self._failed), dict(self._requests))
        if now == self._chosen_for:
            return
        self._chosen_for, self._changes_then = now, num_changes()
        if any(map(is_recorded, self._modules)):
            self._install({})  # for one step; code compiled now would have to be compiled again
            return
        chooser = Chooser(self._here, self._by_stage, self._requests, self._writes, self._failed)
        choice = chooser.choose(self._root)
        self._install(choice.units)
        for left in choice.left:
            self._notes.note(left)
        self._say_units()
        self._tell_alone()

    # ---- of compiled forwards

    def is_settled(self) -> bool:
        """Returns whether wrappers of forwards are the same as when modules were chosen."""
        return self._changes_then == num_changes()

    def choose_anew(self) -> None:
        """Chooses modules again, because wrappers or hooks of a module have changed."""
        self._chosen_for = None
        self.settle()

    def leave(self, unit: Unit, reason: str) -> None:
        """Notes a module that runs in eager mode for now."""
        self._notes.note(Left(unit.name or "(root)", type(unit.module).__name__, reason))
        self._tell_alone()

    def cannot_compile(self, unit: Unit, reason: str, parts_too: bool) -> None:
        """Runs modules like this one in eager mode from now on.

        Args:
            unit: module of which one call was tried.
            reason: error of the compiler.
            parts_too: whether its parts are tried next.
        """
        if parts_too:
            self._failed[type(unit.module)] = reason
            self._chosen_for = None
            self.settle()
        else:
            self._undo.pop(unit.module)()
        self.leave(unit, reason)

    def _install(self, units: dict[nn.Module, Unit]) -> None:
        for module in list(self._undo):
            if self._units.get(module) != units.get(module):
                self._undo.pop(module)()
        for module, unit in units.items():
            if module not in self._undo and self._units.get(module) != unit:
                around = functools.partial(self._around, unit)
                self._undo[module] = wrap_forward(module, WrapperKind.COMPILED, around)
        self._units = units

    def _around(self, unit: Unit, forward: Forward) -> Forward:
        return CompiledForward(unit, forward, self)

    # ---- telling

    def _say_units(self) -> None:
        if self._rank.global_rank != 0:
            return
        kinds = Counter(type(module).__name__ for module in self._units)
        listed = ", ".join(f"{number} x {kind}" for kind, number in kinds.items()) or "no module"
        if self._notes.is_new(listed):
            _log.info("smp: torch.compile compiles %s on this rank", listed)

    def _tell_alone(self) -> None:
        """Logs notes without a pipeline: all ranks then compile what the first one compiles."""
        if self._rank.sizes["pp"] == 1:
            self._tell()

    def exchange_notes(self) -> None:
        """Logs on the first rank of each pipeline what could not be compiled anywhere in it.

        Collective over the pipeline.
        """
        if self._rank.sizes["pp"] == 1:
            return
        for notes in comm.allgather(self._notes.take(), comm.PP_GROUP):
            self._notes.add(notes)
        if self._rank.ranks["pp"] == 0:
            self._tell()

    def _tell(self) -> None:
        """Logs the notes; as a warning on rank 0 alone, since other ranks mostly repeat them."""
        self._notes.write(_log, is_first=self._rank.global_rank == 0)

    def close(self) -> None:
        """Restores the forwards of modules. May be called twice."""
        for undo in self._undo.values():
            undo()
        self._undo.clear()
        self._units, self._is_placed = {}, False
