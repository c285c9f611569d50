"""Spreads experts that are modules of their own, in a list or a dictionary."""

from __future__ import annotations

from torch import nn

from smp.nn.listed_experts import Listed, spread_list
from smp.nn.module import DistributedModule
from smp.replacement import plans
from smp.replacement.plan_cuts import Dim, cut_parameters, problem_of_parameter
from smp.replacement.references import References
from smp.tensor_parallel import regions, sharding


def is_list(module: nn.Module) -> bool:
    """Returns whether the children of a module are its experts."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def mixture_of(experts: nn.Module, parent: nn.Module | None) -> nn.Module | None:
    """Returns the module whose forward calls listed experts: the list itself or its parent."""
    return experts if _has_forward(experts) else parent


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def problem_of_list(
    experts: nn.Module, parent: nn.Module | None, references: References
) -> str | None:
    """Returns why the experts of a list cannot be spread, or None if they can.

    Args:
        experts: the list.
        parent: module that holds the list.
        references: references between modules of the model.
    """
    mixture = mixture_of(experts, parent)
    if mixture is None or not _has_forward(mixture):
        return "neither it nor the module that it is in has a forward"
    if "forward" in mixture.__dict__:
        return f"the {type(mixture).__name__} that calls them has a forward set on the instance"
    if isinstance(mixture, DistributedModule):
        return f"the {type(mixture).__name__} that calls them has another list that is spread"
    held = _experts_in(experts)
    if len(held) < regions.size():
        return f"it has {len(held)} experts, which {regions.size()} ranks cannot share"
    if len(set(held.values())) < len(held):
        return "it has one expert twice"
    for key, expert in held.items():
        problem = _problem_of_expert(expert) or references.problem_of(expert)
        if problem is not None:
            return f"expert '{key}': {problem}"
    return None


def _experts_in(experts: nn.Module) -> dict[str, nn.Module]:
    """Returns the children with parameters; a dropout beside the experts belongs to the code."""
    return {
        key: child
        for key, child in experts._modules.items()
        if child is not None and any(True for _ in child.parameters())
    }


def _problem_of_expert(expert: nn.Module) -> str | None:
    if not _has_forward(expert):
        return f"a {type(expert).__name__} has no forward"
    if "forward" in expert.__dict__:
        return "it has a forward of its own, set on the instance"
    hooks = (
        expert._forward_hooks, expert._forward_pre_hooks,
        expert._backward_hooks, expert._backward_pre_hooks,
    )  # fmt: skip
    if any(hooks):
        return "there is a hook on it, which would see rows of one rank only"
    if any(isinstance(part, DistributedModule) for part in expert.modules()):
        return "a part of it is split or spread"
    for name, _ in expert.named_buffers():
        return f"it has a buffer, '{name}', which other ranks would not see change"
    for name, parameter in expert.named_parameters():
        if parameter.dim() == 0 or parameter.shape[0] == 0:
            return f"its parameter '{name}' has shape {list(parameter.shape)}"
        problem = problem_of_parameter(name, parameter)
        if problem is not None:
            return f"it {problem}"
    return None


def spread_listed(
    experts: nn.Module, parent: nn.Module | None, name: str, own_batches: bool
) -> None:
    """Spreads a list for which `problem_of_list` returned None, in place.

    Args:
        experts: the list.
        parent: module that holds the list.
        name: name of the list in the model.
        own_batches: whether each rank has tokens of its own.
    """
    mixture = mixture_of(experts, parent)
    assert mixture is not None
    where = name if mixture is experts else name.rpartition(".")[0]
    held = _experts_in(experts)
    sizes = tuple(sharding.split(len(held)))
    owners = [rank for rank, size in enumerate(sizes) for _ in range(size)]
    for (key, expert), owner in zip(held.items(), owners, strict=True):
        _keep_own(expert, f"{name}.{key}", owner)
    spread_list(mixture, list(held.values()), Listed(where or "(root)", sizes, own_batches))


def _keep_own(expert: nn.Module, name: str, owner: int) -> None:
    """Keeps the parameters of an expert on its rank; on others they are slices without elements."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in list(expert.named_modules()):
        dims = {
            key: Dim(0, tuple(p.shape[0] * (rank == owner) for rank in range(regions.size())))
            for key, p in module._parameters.items()
            if p is not None
        }
        cut_parameters(module, plans.join(name, path) if path else name, dims, made)
