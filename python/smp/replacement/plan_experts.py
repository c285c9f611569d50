"""Decides how experts, and other modules whose results are summed, are split."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping

from torch import nn

from smp.nn.module import class_in_front
from smp.nn.planned.experts import PlannedIdentity, PlannedTerm
from smp.replacement import plans
from smp.replacement.plan_cuts import Dim, NewForm, SplitState
from smp.replacement.plan_sizes import CannotCut
from smp.tensor_parallel import sharding

# By word of a parameter of experts: the dim from the end, and the number of packed matrices.
_EXPERT_DIMS: Mapping[str, tuple[int, int]] = {
    plans.COLUMN: (2, 1),
    plans.PACKED_COLUMN: (2, 2),
    plans.ROW: (1, 1),
    plans.PACKED_ROW: (1, 2),
}


def decide_experts(state: SplitState) -> None:
    """Cuts experts with three-dimensional parameters, and modules that are summed like them."""
    for path, word in state.words.items():
        if word in (plans.EXPERTS, plans.SUMMED) and path in state.modules:
            try:
                _cut_experts(state, path)
            except CannotCut as error:
                state.report.left[path] = str(error)
                for key in state.modules[path]._parameters:
                    state.report.left[plans.join(path, key)] = "its experts stay whole"


def _cut_experts(state: SplitState, path: str) -> None:
    """Cuts each expert by features.

    Raises:
        CannotCut: its parameters cannot be cut by features.
    """
    module = state.modules[path]
    if state.layout.has_own_batches and state.words[path] == plans.EXPERTS:
        if _takes_rows_only(module):
            raise CannotCut(
                "is called with rows in the order of experts, which samples of all ranks "
                "would not be in; use prescaled_batch"
            )
    dims: dict[str, Dim] = {}
    for name, parameter in module.named_parameters():
        word = state.words.get(plans.join(path, name), "")
        if "." in name or word not in _EXPERT_DIMS:
            raise CannotCut(f"the plan does not say how its parameter '{name}' is split")
        from_end, num = _EXPERT_DIMS[word]
        dim = max(parameter.dim() - from_end, 0)
        if parameter.shape[dim] % num:
            raise CannotCut(f"has an odd size of {parameter.shape[dim]} in '{name}'")
        sizes = sharding.split(parameter.shape[dim] // num)
        if sizes[-1] == 0:
            raise CannotCut(f"has {sum(sizes)} features in '{name}', fewer than ranks")
        dims[name] = Dim(dim, tuple(sizes), num)
    widths = {sum(cut.sizes) for cut in dims.values()}
    if len(dims) < 2 or len(widths) > 1:
        # A plan may forget that two matrices are packed in one.
        raise CannotCut(
            f"has parameters that are cut in sizes {sorted(widths)}: which features belong "
            "together cannot be told"
        )
    state.cuts[path] = NewForm(
        functools.partial(class_in_front, PlannedTerm),
        dims,
        attributes={"_smp_word": state.words[path]},
    )
    state.experts.add(path)
    state.report.split.update(
        {plans.join(path, name): state.words[plans.join(path, name)] for name in dims}
    )
    for name, _ in module.named_modules():
        if state.words.get(plans.join(path, name)) == plans.IDENTITY:
            state.cuts[plans.join(path, name)] = NewForm(
                functools.partial(class_in_front, PlannedIdentity), {}
            )


def _takes_rows_only(experts: nn.Module) -> bool:
    """Returns whether forward takes only rows, so that their order determines the experts."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY)
    found = inspect.signature(type(experts).forward).parameters.values()
    return all(p.kind in kinds for p in found) and len(found) <= 2
