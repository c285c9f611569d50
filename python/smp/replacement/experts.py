"""Spreads the experts of marked modules over the tensor-parallel ranks, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

import smp._C as _C
from smp.nn import layout as layouts
from smp.nn.experts import HoldsExperts, Spread, spread_experts_of
from smp.replacement import plans
from smp.replacement.experts_list import is_list, mixture_of, problem_of_list, spread_listed
from smp.replacement.marks import is_candidate, mark_of
from smp.replacement.plan_cuts import Dim, cut_parameters, is_model, problem_of_parameter
from smp.replacement.references import References
from smp.tensor_parallel import regions, sharding
from smp.world.log import first_rank_log


@dataclass(frozen=True)
class _Found:
    """A module of experts that a plan names.

    Attributes:
        name: name in the model.
        parent: module that holds it; None if it is the model.
        is_own: True if transformers gave the plan, False if the user did.
    """

    name: str
    module: nn.Module
    parent: nn.Module | None
    named: plans.Named
    is_own: bool


def spread_experts(root: nn.Module) -> bool:
    """Spreads the experts of marked modules that the model's or the user's plan names.

    Nothing happens where ``expert_parallel_degree`` is 1.

    Args:
        root: a model.

    Returns:
        whether any experts were spread.

    Raises:
        ValueError: a plan of the user's names experts that cannot be spread.
    """
    layout = layouts.current()
    if not layout.spreads_experts:
        return False
    references = References(root)
    replaced = _to_be_replaced(root)
    num_spread = 0
    for found in list(_experts_in(root)):
        module, name = found.module, found.name
        problem = "a module around it has a distributed form" if module in replaced else None
        problem = problem or references.problem_of(module)
        if is_list(module):
            problem = problem or problem_of_list(module, found.parent, references)
        else:
            problem = problem or _problem_of(module, found.named)
        if problem is None:
            if is_list(module):
                spread_listed(module, found.parent, name, layout.has_own_batches)
            else:
                _spread(module, name, found.named, layout.has_own_batches)
            num_spread += 1
        elif found.is_own:
            first_rank_log.warning(
                "smp: the experts of %s ('%s') are not spread: %s",
                type(module).__name__, name, problem,
            )  # fmt: skip
        else:
            raise ValueError(
                f"{_C.rank_prefix()}the plan of tensor parallelism spreads the experts of "
                f"{type(module).__name__} '{name}', which cannot be spread: {problem}; leave them "
                "out of the plan"
            )
    if not num_spread:
        first_rank_log.warning(
            "smp: expert_parallel_degree is %d, and no experts of %s are spread: no marked module "
            "of it is named as experts by a plan, its configuration's (base_model_ep_plan) or one "
            "that was given; each rank of a tensor-parallel group holds all of them, or a part of "
            "each",
            layout.num_ranks, type(root).__name__,
        )  # fmt: skip
    return num_spread > 0


def _to_be_replaced(root: nn.Module) -> set[nn.Module]:
    """Returns the modules that may be replaced, with all their parts."""
    return {
        part
        for module in root.modules()
        if is_candidate(module) and type(module) not in (nn.Linear, nn.Embedding)
        for part in module.modules()
    }


def _experts_in(root: nn.Module) -> Iterator[_Found]:
    """Yields the modules of experts that plans name, each once."""
    seen: set[nn.Module] = set()
    above: dict[nn.Module, nn.Module] = {
        child: module for module in root.modules() for child in module.children()
    }
    for name, module in root.named_modules():
        plan, is_own = _plan_of(module, above.get(module))
        if not plan:
            continue
        inside = dict(module.named_modules())
        paths = [*inside, *(key for key, _ in module.named_parameters())]
        for path, named in plans.named_experts(plan, paths).items():
            part = inside.get(path)
            if part is None or part in seen or isinstance(part, HoldsExperts):
                continue
            mark = mark_of(part)
            if mark is None or not mark.enabled or (is_own and mark.plan is not None):
                continue
            if not is_own and mark is not mark_of(module):
                continue
            parent = above.get(part)
            if is_list(part) and mixture_of(part, parent) is parent and parent is not None:
                if mark_of(parent) is not mark:
                    continue
            seen.add(part)
            full = ".".join(piece for piece in (name, path) if piece)
            yield _Found(full, part, parent, named, is_own)


def _plan_of(module: nn.Module, parent: nn.Module | None) -> tuple[Mapping[str, str] | None, bool]:
    """Returns the plan for the experts in a module, and whether the plan is the model's own.

    Args:
        module: module of a model.
        parent: module that holds it, if any.
    """
    mark = mark_of(module)
    if mark is not None and mark.plan is not None:
        is_outermost = parent is None or mark_of(parent) is not mark
        return (mark.plan if mark.enabled and is_outermost else None), False
    if not is_model(module):
        return None, True
    prefix = module.base_model_prefix
    if prefix and prefix in module._modules:
        return None, True  # the base model in it has the plan
    plan = getattr(module.config, "base_model_ep_plan", None)
    return (plan if isinstance(plan, Mapping) else None), True


def _problem_of(module: nn.Module, named: plans.Named) -> str | None:
    """Returns why the experts of a module cannot be spread, or None if they can."""
    if "forward" in module.__dict__:
        return "it has a forward of its own, set on the instance"
    each = {name: p for name, p in module.named_parameters() if name in named.each}
    if not each:
        return "the plan names no parameters with a slice for each expert"
    numbers = {parameter.shape[0] for parameter in each.values() if parameter.dim() > 0}
    if len(numbers) != 1 or any(parameter.dim() == 0 for parameter in each.values()):
        return f"its parameters have different numbers of experts in dim 0, {sorted(numbers)}"
    number = numbers.pop()
    if module.__dict__.get("num_experts", number) != number:
        return f"it has {module.__dict__['num_experts']} experts, its parameters {number}"
    if number < regions.size():
        return f"it has {number} experts, which {regions.size()} ranks cannot share"
    for name, parameter in module.named_parameters():
        problem = problem_of_parameter(name, parameter)
        if problem is not None:
            return f"it {problem}"
        if name not in each and not {name, name.rpartition(".")[0]} & named.common:
            return f"the plan does not say how its parameter '{name}' is split"
    return None


def _spread(module: nn.Module, name: str, named: plans.Named, own_batches: bool) -> None:
    each = sorted(named.each & module._parameters.keys())
    whole = module._parameters[each[0]]
    assert whole is not None
    sizes = tuple(sharding.split(whole.shape[0]))
    for key, parameter in module.named_parameters():
        if key not in each:  # it is applied only to the tokens of this rank's experts
            sharding.mark_whole(parameter, partial=True)
    cut_parameters(module, name, {key: Dim(0, sizes) for key in each}, {})
    spread_experts_of(module, Spread(name, sizes, own_batches))
