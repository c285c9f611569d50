"""Replaces marked modules by distributed ones, including their weights."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

import smp._C as _C
from smp.initial.delay import on_meta
from smp.modules import packed
from smp.nn import huggingface
from smp.nn.conv1d import is_conv1d
from smp.nn.experts import HoldsExperts
from smp.nn.gradient_checkpointing import take_over_checkpointing
from smp.nn.listed_experts import SpreadMixture
from smp.nn.module import DistributedModule
from smp.partition import contexts
from smp.partition.tree import READS_CHILDREN
from smp.replacement.adapters import adapter_in
from smp.replacement.carried import Carried, carried_by
from smp.replacement.experts import spread_experts
from smp.replacement.marks import Mark, is_candidate, mark_of
from smp.replacement.plan_cuts import is_model
from smp.replacement.plan_roots import PlanOf, plan_of, split_by_plan
from smp.replacement.references import References, has_tensors
from smp.replacement.values import Values, take_over_values, values_for
from smp.tensor_parallel import sharding
from smp.tensor_parallel.registry import (
    Arguments,
    Declined,
    Registration,
    Unsupported,
    arguments_of,
    reason_of_class,
    registered_base,
    registration_of,
)
from smp.world.log import first_rank_log

_NEW_WEIGHTS = (
    "gets new weights: it was made while PreTrainedModel.init_weights was switched off, so its "
    "own were never initialised; to keep values, give them by from_pretrained or load_state_dict "
    "before the model is wrapped"
)

_UNKNOWN = Declined(
    "it is a copy, or was made before its class was registered, so the arguments of its "
    "__init__ are not known"
)

_NUM_NAMED = 5  # names in one message


def replace_marked(
    root: nn.Module, device: torch.device, *, tries_plans: bool = True
) -> tuple[nn.Module, list[Registration]]:
    """Replaces the outermost marked modules that have a distributed form, in place.

    Args:
        root: a model; it may be replaced itself.
        device: device on which new values are made.
        tries_plans: whether blocks split by a user's plan check once that the plan fits
            (`smp.nn.planned.trial`).

    Returns:
        the model, and the registrations that were used, each once.
    """
    huggingface.register_available()
    has_experts = spread_experts(root)  # before a plan splits them by features
    replacement = _Replacement(root, device, tries_plans)
    new_root = replacement.visit(root, "")
    if not has_experts:
        replacement.say_if_nothing_is_split(root)
    return new_root, list(replacement.used.values())


class _Replacement:
    """A walk over a model, outermost modules first.

    Args:
        root: the model.
        device: device on which new values are made.
        tries_plans: see `replace_marked`.
    """

    def __init__(self, root: nn.Module, device: torch.device, tries_plans: bool) -> None:
        self._device = device
        self._tries_plans = tries_plans
        self.used: dict[type[nn.Module], Registration] = {}
        self._done: dict[nn.Module, nn.Module] = {}
        self._made: set[nn.Module] = set()  # modules that have replaced others
        self._planned: PlanOf | None = None  # plan of the module that is being walked through
        self.num_planned = 0
        self._declined: dict[type[nn.Module], str] = {}
        self._said: set[tuple[type[nn.Module], str]] = set()
        self._references = References(root)
        self._readers: dict[nn.Module, nn.Module] = {}
        for module in root.modules():
            if isinstance(module, READS_CHILDREN):
                inside = (part for part in module.modules() if part is not module)
                self._readers.update(dict.fromkeys(inside, module))

    def visit(self, module: nn.Module, name: str, around: tuple[nn.Module, ...] = ()) -> nn.Module:
        """Returns the module that replaces ``module``; in most cases ``module`` itself.

        Args:
            module: module of the model.
            name: name of the module in the model.
            around: modules that hold it, nearest first.
        """
        if module in self._done:
            return self._done[module]
        self._done[module] = module
        plan = plan_of(module, around)
        is_part = plan is not None and plan.is_own and self._planned is not None
        if plan is not None and not is_part and self._split_by_plan(module, name, around, plan):
            return module
        if is_candidate(module) and self._may_replace(module) and not self._is_changed(module):
            new = self._distributed_form(module, name, around)
            if isinstance(new, nn.Module):
                self._done[module] = new
                self._made.add(new)
                return new
            self._declined.setdefault(type(module), f"is not distributed: {new.reason}")
            self._say(module, name, f"is not distributed: {new.reason}")
            plan = plan_of(module, around, declined=True) if adapter_in(module) else None
            if plan is not None and self._planned is None:
                if self._split_by_plan(module, name, around, plan):
                    return module
        elif self._is_near_miss(module):
            self._say(module, name, reason_of_class(type(module)))
        before = self._planned
        if before is not None and plan is None and is_model(module):
            self._planned = None  # the plan around it is not for this model
        self._visit_children(module, name, around)
        self._planned = before
        return module

    def _visit_children(self, module: nn.Module, name: str, around: tuple[nn.Module, ...]) -> None:
        for key, child in list(module._modules.items()):
            if child is not None:
                path = f"{name}.{key}" if name else key
                module._modules[key] = self.visit(child, path, (module, *around))

    def _split_by_plan(
        self, module: nn.Module, name: str, around: tuple[nn.Module, ...], plan: PlanOf
    ) -> bool:
        """Splits a module by a plan; forms made for more than a single layer take precedence.

        Returns:
            whether anything is split.
        """
        before, self._planned = self._planned, plan
        if plan.is_own:
            self._visit_children(module, name, around)
        self._planned = before
        taken: dict[nn.Module, str] = {
            part: "it has a distributed form of its own"
            for part in module.modules()
            if isinstance(part, DistributedModule)
            and not isinstance(part, HoldsExperts | SpreadMixture)
        }
        report = split_by_plan(module, name, plan, taken, self._tries_plans)
        self.num_planned += len(report.split)
        is_done = bool(report.split) or not plan.is_own
        if not is_done:
            # Single layers are then tried as without a plan.
            for part in module.modules():
                self._done.pop(part, None)
            self._done[module] = module
        return is_done

    def _is_changed(self, module: nn.Module) -> bool:
        """Returns whether a part was replaced, by the walk before a plan that split nothing."""
        return not self._made.isdisjoint(module.modules())

    def _may_replace(self, module: nn.Module) -> bool:
        """Returns False for single layers that the plan around them does not name."""
        is_single = type(module) in (nn.Linear, nn.Embedding) or is_conv1d(module)
        return self._planned is None or not is_single

    def _is_near_miss(self, module: nn.Module) -> bool:
        """Returns whether the user may have expected a marked module to be split."""
        mark = mark_of(module)
        return (
            mark is not None
            and mark.enabled
            and module not in self._readers
            and bool(module._parameters)
            and registered_base(type(module)) is not None
        )

    def _say(self, module: nn.Module, name: str, what: str) -> None:
        """Logs a warning on rank 0, once per class."""
        if (type(module), what) not in self._said:
            self._said.add((type(module), what))
            first_rank_log.warning("smp: %s ('%s') %s", type(module).__name__, name, what)

    def _distributed_form(
        self, module: nn.Module, name: str, around: Sequence[nn.Module]
    ) -> nn.Module | Declined:
        registration, mark = registration_of(module), mark_of(module)
        assert registration is not None and mark is not None
        problem = self._references.problem_of(module)
        if problem is not None:
            return Declined(problem)
        if module in self._readers:
            return Declined(
                f"the {type(self._readers[module]).__name__} around it reads its parameters "
                "instead of calling it, and has to find them whole"
            )
        adapter = adapter_in(module)
        if adapter is not None:
            return Declined(
                f"it has adapters of PEFT inside, {adapter} for one, which its distributed form "
                "would not have; parts of it without adapters may be distributed"
            )
        weight = packed.name_in(module)
        if weight is not None:
            return Declined(
                f"it has quantized weights inside, {weight} for one, which its distributed form "
                "would not have; parts of it in full precision may be distributed"
            )
        problem = registration.problem_in and registration.problem_in(module, around)
        if problem is not None:
            return Declined(problem)
        arguments = arguments_of(module, around)
        if arguments is None:
            return _UNKNOWN
        made = _construct(module, registration, mark, arguments)
        if isinstance(made, Declined):
            return made
        declined = _take_over(module, made)
        if declined is not None:
            return declined
        carried = carried_by(module, registration, arguments)
        if carried.lost is not None:
            return Declined(f"{carried.lost}, which its distributed form would not have")
        values = values_for(made, module, registration)
        mismatch = _mismatch(values)
        if mismatch and registration.is_complete:
            return Declined(mismatch)
        self._put(module, name, made, registration, carried, values)
        return made

    def _put(
        self,
        module: nn.Module,
        name: str,
        made: nn.Module,
        registration: Registration,
        carried: Carried,
        values: Values,
    ) -> None:
        """Gives a distributed form everything that it takes from the original."""
        is_worth_it = registration.was_initialised is None or registration.was_initialised(module)
        if not is_worth_it and not any(p.is_meta for p in module.parameters()):
            self._say(module, name, _NEW_WEIGHTS)
        mismatch = _mismatch(values)
        if is_worth_it and mismatch:
            self._say(module, name, f"is distributed without some of its values: {mismatch}")
        worthy = values if is_worth_it else None
        take_over_values(module, made, registration, name, worthy, self._device)
        _install_adapter(made, registration)
        if isinstance(made, DistributedModule):
            made.took_place_of(module, name)
        take_over_checkpointing(module, made)
        for key, value in carried.attributes.items():
            made.__dict__.setdefault(key, value)
        for key, parameter in module.named_parameters():
            sharding.mark_replaced(parameter, f"{name}.{key}" if name else key)
        for part in module.modules():
            if has_tensors(part):  # parts without may be in use elsewhere
                part.__dict__["forward"] = functools.partial(_refuse_call, type(module), name)
        self.used[type(module)] = registration

    def say_if_nothing_is_split(self, root: nn.Module) -> None:
        """Warns on rank 0 if tensor parallelism was asked for and nothing is split."""
        marks = ((module, mark_of(module)) for module in root.modules())
        wanted = [module for module, mark in marks if mark is not None and mark.enabled]
        if self.used or self.num_planned or not wanted:
            return
        numbers: dict[type[nn.Module], list[int]] = {}
        for module in wanted:
            numels = [p.numel() for p in module._parameters.values() if p is not None]
            if numels:
                numbers.setdefault(type(module), []).append(sum(numels))
        largest = sorted(numbers.items(), key=lambda item: -sum(item[1]))[:_NUM_NAMED]
        reasons = [
            f"{cls.__name__} ({len(numels)} modules, {sum(numels)} parameters) "
            f"{self._declined.get(cls) or reason_of_class(cls)}"
            for cls, numels in largest
        ]
        first_rank_log.warning(
            "smp: tensor parallelism was asked for %s, and nothing of it is split; each rank of a "
            "tensor-parallel group holds all of it: %s",
            type(root).__name__,
            "; ".join(reasons) or "it has no parameters",
        )


def _mismatch(values: Values) -> str:
    """Returns which values do not match; empty if all do."""
    parts = []
    if values.missing:
        parts.append(f"it has no values for {_some(values.missing)} of its distributed form")
    if values.unused:
        parts.append(f"nothing takes the place of its {_some(values.unused)}")
    return ", and ".join(parts)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_NUM_NAMED])
    return shown if len(names) <= _NUM_NAMED else f"{shown} and {len(names) - _NUM_NAMED} more"


def _refuse_call(cls: type[nn.Module], name: str, *_: Any, **__: Any) -> NoReturn:
    raise RuntimeError(
        f"{_C.rank_prefix()}a {cls.__name__} ('{name}') was called whose place a distributed "
        "module has taken when the model was wrapped; take the module from the wrapped model "
        "instead of keeping it, or leave it whole by smp.set_tensor_parallelism(module, False)"
    )


def _construct(
    module: nn.Module,
    registration: Registration,
    mark: Mark,
    arguments: Arguments,
) -> nn.Module | Declined:
    args, kwargs = tuple(arguments[0]), dict(arguments[1])
    if registration.init_hook is not None:
        translated = registration.init_hook(*args, **kwargs)
        if translated is None:
            return Declined("its init hook declines")
        if isinstance(translated, Declined):
            return translated
        args, kwargs = tuple(translated[0]), dict(translated[1])
    signature = inspect.signature(registration.dist_module)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{_C.rank_prefix()}{type(module).__name__} was registered with "
            f"{registration.dist_module.__name__}{signature}, which does not take what its init "
            f"hook returned, {args} and {kwargs}: {error}"
        ) from error
    for key, value in mark.options.items():
        if key in signature.parameters:
            bound.arguments[key] = value
    try:
        with on_meta():  # _put gives them values
            made = registration.dist_module(*bound.args, **bound.kwargs)
    except Unsupported as error:
        return Declined(str(error))
    return made


def _take_over(module: nn.Module, made: nn.Module) -> Declined | None:
    """Copies dtype, mode, trainability, partition mark and configuration to a new module."""
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if len(dtypes) == 1:
        made.to(dtype=dtypes.pop())
    made.train(module.training)
    frozen = [not p.requires_grad for p in module.parameters()]
    if all(frozen) and frozen:
        made.requires_grad_(False)
    elif any(frozen):
        return Declined(
            "some of its parameters require gradients and some do not; freeze after wrapping"
        )
    partition = contexts.mark_of(module)
    if partition is not None:
        contexts.set_partition(made, partition)
    if hasattr(module, "config"):
        made.config = module.config
    return None


def _adapted_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    adapter = self._smp_adapter(self)  # each call has its own: microbatches take turns
    args, kwargs = adapter.forward_args(*args, **kwargs)
    return adapter.wrap(type(self).forward(self, *args, **kwargs))


def _install_adapter(made: nn.Module, registration: Registration) -> None:
    if registration.adapter is None:
        return
    made._smp_adapter = registration.adapter  # type: ignore[assignment]
    # The method is bound, so that a deep copy has its own.
    made.__dict__["forward"] = types.MethodType(_adapted_forward, made)
