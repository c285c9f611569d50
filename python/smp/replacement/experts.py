"""Spreads the experts of marked modules over the tensor-parallel ranks, in place."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from smp.initial.originals import keep_original
from smp.nn import layout as layouts
from smp.nn.experts import Spread, SpreadExperts, spread
from smp.nn.planned.block import PlannedBlock
from smp.replacement.experts_plan import Named, named_experts
from smp.replacement.marks import mark_of
from smp.replacement.references import References
from smp.tensor_parallel import regions, sharding
from smp.world.log import first_rank_log


@dataclass
class Report:
    """What was done to the experts of a model.

    Attributes:
        spread: names of modules whose experts are spread.
        left: why others are not, by name.
    """

    spread: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)


def spread_experts(root: nn.Module) -> Report:
    """Spreads the experts of marked modules that a plan names.

    Nothing happens where ``expert_parallel_degree`` is 1.

    Args:
        root: a model.
    """
    report = Report()
    layout = layouts.current()
    if not layout.spreads_experts:
        return report
    references = References(root)
    common = _in_blocks(root)
    for name, module, named in list(_experts_in(root)):
        mark = mark_of(module)
        if mark is None or not mark.enabled or isinstance(module, SpreadExperts):
            continue
        problem = references.problem_of(module) or _problem_of(module, named)
        if problem is not None:
            report.left[name] = problem
            first_rank_log.warning(
                "smp: the experts of %s ('%s') are not spread: %s",
                type(module).__name__, name, problem,
            )  # fmt: skip
            continue
        _spread(module, name, named, layout.has_own_batches and module not in common)
        report.spread.append(name)
    if not report.spread:
        first_rank_log.warning(
            "smp: expert_parallel_degree is %d, and no experts of %s are spread: no marked module "
            "of it is named as experts by a plan (base_model_ep_plan of a configuration); each "
            "rank of a tensor-parallel group holds all of them",
            layout.num_ranks, type(root).__name__,
        )  # fmt: skip
    return report


def _in_blocks(root: nn.Module) -> set[nn.Module]:
    """Modules in blocks of a plan, where all ranks have the samples of all."""
    blocks = (module for module in root.modules() if isinstance(module, PlannedBlock))
    return {part for block in blocks for part in block.modules()}


def _experts_in(root: nn.Module) -> Iterator[tuple[str, nn.Module, Named]]:
    """Names, modules and what the plans around them say; each module once."""
    seen: set[nn.Module] = set()
    for name, module in root.named_modules():
        plan = _plan_of(module)
        if not plan:
            continue
        inside = dict(module.named_modules())
        paths = [*inside, *(key for key, _ in module.named_parameters())]
        for path, named in named_experts(plan, paths).items():
            if inside[path] not in seen:
                seen.add(inside[path])
                yield ".".join(part for part in (name, path) if part), inside[path], named


def _plan_of(module: nn.Module) -> Mapping[str, str] | None:
    """The plan that the configuration of a base model of transformers has for its experts."""
    models = sys.modules.get("transformers.modeling_utils")
    if models is None or not isinstance(module, models.PreTrainedModel):
        return None
    prefix = module.base_model_prefix
    if prefix and prefix in module._modules:
        return None  # the base model in it has the plan
    plan = getattr(module.config, "base_model_ep_plan", None)
    return plan if isinstance(plan, Mapping) else None


def _problem_of(module: nn.Module, named: Named) -> str | None:
    """Why the experts of a module cannot be spread; None if they can."""
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
        if type(parameter) is not nn.Parameter:
            return f"its parameter '{name}' is a {type(parameter).__name__}"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"there is a hook on its parameter '{name}'"
        if name not in each and not {name, name.rpartition(".")[0]} & named.common:
            return f"the plan does not say how its parameter '{name}' is split"
    return None


def _spread(module: nn.Module, name: str, named: Named, own_batches: bool) -> None:
    each = sorted(named.each & module._parameters.keys())
    whole = module._parameters[each[0]]
    assert whole is not None
    sizes = tuple(sharding.split(whole.shape[0]))
    how = Spread(name, sizes, own_batches)
    original = copy.copy(module)
    original.__dict__["_parameters"] = dict(module._parameters)
    is_meta = False
    for key in each:
        parameter = module._parameters[key]
        assert parameter is not None
        is_meta = is_meta or parameter.is_meta
        module._parameters[key] = _own_part(parameter, how)
        sharding.mark_replaced(parameter, f"{name}.{key}")
    for key, parameter in module.named_parameters():
        if key not in each:  # applied to the tokens of the experts of this rank only
            sharding.mark_whole(parameter, partial=True)
    spread(module, how)
    if is_meta:
        keep_original(module, original, None)


def _own_part(whole: nn.Parameter, how: Spread) -> nn.Parameter:
    """The experts of this rank, marked."""
    with torch.no_grad():
        values = whole.detach().narrow(0, how.begin, how.num_own).clone()
    part = nn.Parameter(values, whole.requires_grad)
    for key, value in whole.__dict__.items():
        part.__dict__[key] = value
    sharding.mark_split(part, 0, how.begin, whole.shape[0])
    return part
