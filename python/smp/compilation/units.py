"""Chooses the modules of a model that are compiled, each as a whole. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from torch import nn

from smp.compilation.backend import is_operator
from smp.modules.compiled import CompileRequest
from smp.modules.forwards import WrapperKind, standing_around
from smp.nn import DistributedModule

_HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Unit:
    """A module that is compiled as a whole.

    Attributes:
        module: the module, with all modules in it.
        name: name in the model.
        request: request of the user for it or for a module around it; None: the library chose it.
        is_whole: whether the user has compiled this very module.
    """

    module: nn.Module
    name: str
    request: CompileRequest | None
    is_whole: bool


@dataclass(frozen=True)
class Left:
    """A module that was to be compiled but runs in eager mode.

    Attributes:
        name: name in the model.
        kind: name of its class.
        reason: reason in words.
    """

    name: str
    kind: str
    reason: str


@dataclass
class Choice:
    """The modules of a model that are compiled on this rank, and those that are not."""

    units: dict[nn.Module, Unit] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)


class Chooser:
    """A walk over a model, outermost modules first.

    Args:
        here: modules whose forward may run on this rank.
        by_stage: choose units also where the user has requested nothing.
        requests: requests of the user.
        writes: modules whose attributes have a value per microbatch.
        failed: classes that could not be compiled, with reasons.
    """

    def __init__(
        self,
        here: Set[nn.Module],
        by_stage: bool,
        requests: Mapping[nn.Module, CompileRequest],
        writes: Set[nn.Module],
        failed: Mapping[type[nn.Module], str],
    ) -> None:
        self._here = here
        self._by_stage = by_stage
        self._requests = requests
        self._writes = writes
        self._failed = failed
        self._choice = Choice()
        self._seen: set[nn.Module] = set()

    def choose(self, root: nn.Module) -> Choice:
        """Returns the units of a model.

        A module that the user has compiled is a unit if it is whole on this rank. If not, its parts
        are chosen as the library does it: the largest modules that are whole, and of a list of
        equal blocks each block, so that one compilation serves all of them.
        """
        self._visit(root, "", None)
        inside = {
            part
            for unit in self._choice.units
            for part in unit.modules()
            if part is not unit and part in self._choice.units
        }
        for module in inside:  # a module that is used in two places
            del self._choice.units[module]
        return self._choice

    def _visit(self, module: nn.Module, name: str, above: CompileRequest | None) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        own = self._requests.get(module)
        request = own or above
        if (request is not None or self._by_stage) and module in self._here:
            if isinstance(module, DistributedModule):
                self._leave(module, name, "is made of fused operators and exchanges of smp.nn")
                return
            if self._may_be_unit(module, name, by_user=own is not None):
                unit = Unit(module, name, request, is_whole=own is not None)
                self._choice.units[module] = unit
                return
        for key, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{name}.{key}" if name else key, request)

    def _may_be_unit(self, module: nn.Module, name: str, by_user: bool) -> bool:
        if not _is_called(module):
            return False
        if not by_user and (is_operator(module) or not _has_parameters(module)):
            return False
        inside = [part for part in module.modules() if part is not module]
        if any(map(_is_interrupted, inside)):
            return False
        if not by_user and _has_equal_blocks(module):
            return False
        reason = self._failed.get(type(module)) or self._reason_against(module, inside)
        if reason is not None:
            self._leave(module, name, reason)
        return reason is None

    def _reason_against(self, module: nn.Module, inside: list[nn.Module]) -> str | None:
        if any(has_hooks(part) for part in inside):
            return "hooks are registered on modules inside of it"
        if any(WrapperKind.CHECKS in standing_around(part) for part in inside):
            return "smp.detect_nonfinite looks at the modules inside of it"
        if any(part in self._writes for part in (module, *inside)):
            return "its forward writes attributes, of which each microbatch has its own"
        return None

    def _leave(self, module: nn.Module, name: str, reason: str) -> None:
        self._choice.left.append(Left(name or "(root)", type(module).__name__, reason))


def has_hooks(module: nn.Module) -> bool:
    """Returns whether hooks run around the forward or backward of this module."""
    return any(module.__dict__.get(table) for table in _HOOK_TABLES)


def has_global_hooks() -> bool:
    """Returns whether hooks run around the forward or backward of all modules."""
    return any(getattr(nn.modules.module, f"_global{table}") for table in _HOOK_TABLES)


def is_liftable(module: nn.Module) -> bool:
    """Returns whether a forward has wrappers, all of which may be lifted in a compiled module."""
    around = standing_around(module)
    return bool(around) and all(
        getattr(wrapper, "may_be_lifted", False) for wrapper in around.values()
    )


def is_recorded(module: nn.Module) -> bool:
    """Returns whether the check of the first step records this module."""
    return WrapperKind.RECORD in standing_around(module)


def _is_interrupted(module: nn.Module) -> bool:
    """Returns whether the compiler would find code of the library in this module."""
    if isinstance(module, DistributedModule | nn.modules.lazy.LazyModuleMixin):
        return True
    places = standing_around(module).keys() - {WrapperKind.CHECKS, WrapperKind.COMPILED}
    return bool(places) and not is_liftable(module)


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(
        module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_equal_blocks(module: nn.Module) -> bool:
    """Returns whether there is a list of modules of one class, which share one compilation."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential):
            kinds = Counter(
                type(child)
                for child in part._modules.values()
                if child is not None and not is_operator(child)
            )
            if max(kinds.values(), default=0) > 1:
                return True
    return False
