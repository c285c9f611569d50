"""Chooses the modules that are split by the user's or their own plan, and logs the outcome."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

import smp._C as _C
from smp.nn import layout as layouts
from smp.nn.planned.head import PlannedHead, hand_out_whole
from smp.nn.planned.masks import agree_on_masks
from smp.replacement import plans
from smp.replacement.family_plans import PLANS
from smp.replacement.marks import Mark, mark_of
from smp.replacement.plan_adapters import is_adapted
from smp.replacement.plan_cuts import Report, is_model, output_head
from smp.replacement.plan_exceptions import unfit_parts
from smp.replacement.planned import apply_plan
from smp.tensor_parallel import regions
from smp.tensor_parallel.registry import registration_of
from smp.world.log import first_rank_log

# A plan counts if it has one of these words: many models name no more than their head.
_OF_LAYERS = frozenset({plans.COLUMN, plans.ROW, plans.SPLIT_ROW})


@dataclass(frozen=True)
class PlanOf:
    """A plan for a module.

    Attributes:
        plan: words by path, checked.
        is_own: True if transformers or this library has the plan, False if the user gave it.
    """

    plan: Mapping[str, str]
    is_own: bool


def plan_of(
    module: nn.Module, around: Sequence[nn.Module], declined: bool = False
) -> PlanOf | None:
    """Returns the plan that a module of a model is to be split by, or None.

    Args:
        module: module of a model.
        around: modules that hold it, nearest first.
        declined: whether its class has a distributed form that this module cannot have.
    """
    mark = mark_of(module)
    if mark is None or not mark.enabled or regions.size() == 1:
        return None
    if mark.plan is not None:
        is_outermost = not around or mark_of(around[0]) is not mark
        return PlanOf(mark.plan, False) if is_outermost else None
    own = _own_plan(module)
    if own is None or (registration_of(module) is not None and not declined):
        return None
    try:
        plan = plans.check_plan(own)
    except ValueError as error:
        first_rank_log.warning("smp: %s has a plan, which is not used: %s", _kind(module), error)
        return None
    return PlanOf(plan, True) if _OF_LAYERS & set(plan.values()) else None


def _own_plan(module: nn.Module) -> Mapping[str, str] | None:
    """Returns the plan that transformers gives for a model, or else we, or None."""
    if not is_model(module):
        return None
    return getattr(module, "_tp_plan", None) or PLANS.get(type(module).__name__)


def stays_out(root_mark: Mark | None, module: nn.Module) -> str | None:
    """Returns why a plan does not cover a part of its module, or None if it does."""
    mark = mark_of(module)
    if mark is root_mark or (mark is not None and mark.enabled and mark.plan is None):
        return None
    if mark is None or not mark.enabled:
        return "it is not marked to be split"
    return "it has a plan of its own"


def split_by_plan(
    module: nn.Module, name: str, found: PlanOf, taken: Mapping[nn.Module, str], tries: bool
) -> Report:
    """Splits a module by its plan, and logs the outcome.

    Args:
        module: module that the plan is for.
        name: name of the module in the model.
        found: plan of the module.
        taken: parts that the plan is not for, with the reason.
        tries: whether blocks check once that a plan of the user's fits.

    Raises:
        ValueError: a plan of the user's names parts that do not exist or cannot be split.
    """
    prefix = f"{name}." if name else ""
    left_out = {**taken, **(unfit_parts(module) if found.is_own else {})}
    root_mark = mark_of(module)
    adapted = {part for m in module.modules() if is_adapted(m) for part in m.modules()}
    for part in module.modules():
        why = None if part in adapted and mark_of(part) is None else stays_out(root_mark, part)
        if why is not None:
            left_out.setdefault(part, why)
    # The plans of transformers for its own models are tried in tests/zoo.
    report = apply_plan(module, found.plan, prefix, left_out, tries and not found.is_own)
    if not found.is_own:
        _refuse_rest(module, report)
    if report.split and layouts.current().has_own_batches:
        agree_on_masks(module)
    for part in module.modules():
        if is_model(part) and isinstance(output_head(part), PlannedHead):
            hand_out_whole(part)
    _say(module, name, found, report)
    return report


def _refuse_rest(module: nn.Module, report: Report) -> None:
    """Raises ValueError if anything that a user's plan names was not split."""
    if report.unused:
        raise ValueError(
            f"{_C.rank_prefix()}the plan of tensor parallelism names {_some(report.unused)}, which "
            f"is in no {_kind(module)}: names are relative to it, as named_modules() has them"
        )
    if report.left:
        path, why = next(iter(report.left.items()))
        raise ValueError(
            f"{_C.rank_prefix()}the plan of tensor parallelism splits '{path}' of a "
            f"{_kind(module)}, which cannot be split: {why}; leave it out of the plan"
        )


def _say(module: nn.Module, name: str, found: PlanOf, report: Report) -> None:
    place = f" ('{name}')" if name else ""
    whose = "its own" if found.is_own else "the given"
    if report.split:
        first_rank_log.info(
            "smp: %s%s is split by %s plan: %s", _kind(module), place, whose, _list(report.split)
        )
    if report.left:
        first_rank_log.warning(
            "smp: %s%s: parts of %s plan stay whole on each rank: %s",
            _kind(module),
            place,
            whose,
            _list(report.left),
        )


def _list(said: Mapping[str, str]) -> str:
    """Returns ``path: what`` entries with numbered layers joined."""
    numbers: dict[tuple[str, str], int] = {}
    for path, what in said.items():
        key = (re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path), what)
        numbers[key] = numbers.get(key, 0) + 1
    return "; ".join(
        f"{path}: {what}" + (f" ({number}x)" if number > 1 else "")
        for (path, what), number in numbers.items()
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:5])


def _kind(module: nn.Module) -> str:
    return type(module).__name__
