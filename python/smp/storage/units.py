"""Plans which sharded parameters are gathered together, and for which modules. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        name: name of the module, or of the first one of several that share the parameters.
        parameters: parameters in the order of the model, each in one unit only.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]


@dataclass(frozen=True)
class UnitPlan:
    """The units of a model.

    Attributes:
        units: units in the order of the model.
        needs: positions of the units that are held while the forward of a module runs. Modules
            without units of their own are included if their forward may read parameters of modules
            below them.
    """

    units: tuple[Unit, ...]
    needs: dict[nn.Module, tuple[int, ...]]


def _always(_: nn.Module) -> bool:
    return True


def plan_units(
    root: nn.Module,
    is_sharded: Callable[[Tensor], bool],
    runs_here: Callable[[nn.Module], bool] = _always,
) -> UnitPlan:
    """Forms units out of the parameters of a model.

    A *block*, an element of a ``ModuleList`` or ``Sequential``, is one unit with all parameters in
    it. Outside of blocks each module is a unit of its direct parameters. A block whose forward
    another
    pipeline rank runs does not count: only parts of it are called here. Parameters that several of
    these share are a unit of their own, which each of them needs.

    Args:
        root: the model.
        is_sharded: returns whether a parameter counts; the plan does not depend on values.
        runs_here: returns whether this rank runs the forward of a module.
    """
    users: dict[nn.Parameter, dict[nn.Module, str]] = {}
    runs: dict[nn.Module, str] = {}  # modules with units
    for name, module, user, user_name in _users(root, runs_here):
        if user is module and _may_read(module):
            runs.setdefault(module, name)
        for parameter in module._parameters.values():
            if parameter is not None and is_sharded(parameter):
                users.setdefault(parameter, {}).setdefault(user, user_name)
    by_users: dict[tuple[nn.Module, ...], list[nn.Parameter]] = {}
    for parameter, its_users in users.items():
        by_users.setdefault(tuple(its_users), []).append(parameter)
    units: list[Unit] = []
    needs: dict[nn.Module, tuple[int, ...]] = dict.fromkeys(runs, ())
    for modules, parameters in by_users.items():
        first = users[parameters[0]]
        units.append(Unit(next(iter(first.values())) or "(root)", tuple(parameters)))
        for module in modules:
            if module in needs:  # other modules only hold them, as a ParameterList does
                needs[module] = (*needs[module], len(units) - 1)
    return UnitPlan(tuple(units), needs)


def _users(
    root: nn.Module, runs_here: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module, nn.Module, str]]:
    """Yields each module with its name, and its block (or itself) with its name."""
    blocks = {block: name for block, name in find_blocks(root) if runs_here(block)}
    inside: dict[nn.Module, tuple[nn.Module, str]] = {}
    for block, name in blocks.items():
        for module in block.modules():
            inside.setdefault(module, (block, name))
    for name, module in root.named_modules():
        user, user_name = inside.get(module, (module, name))
        yield name, module, user, user_name


def find_blocks(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yields the outermost elements of lists and sequences, with their names.

    A module with more than half of the model's parameters is no block: in a list of an encoder
    and a head the layers of the encoder are blocks.
    """
    half = sum(p.numel() for p in root.parameters()) / 2
    yield from _blocks_below(root, "", half)


def _blocks_below(module: nn.Module, name: str, half: float) -> Iterator[tuple[nn.Module, str]]:
    for key, child in module.named_children():
        child_name = f"{name}.{key}" if name else key
        is_block = _is_list(module) and not _is_list(child)
        if is_block and sum(p.numel() for p in child.parameters()) <= half:
            yield child, child_name
        else:
            yield from _blocks_below(child, child_name, half)


def _is_list(module: nn.Module) -> bool:
    # A list with parameters of its own (parametrizations have them) is more than a list.
    return isinstance(module, nn.ModuleList | nn.Sequential) and not module._parameters


def _may_read(module: nn.Module) -> bool:
    has_forward = type(module).forward is not nn.Module.forward
    return has_forward and next(module.parameters(), None) is not None
