"""Splits the parts of a model that a plan names, in place."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from smp.nn.conv1d import is_linear
from smp.nn.experts import HoldsExperts
from smp.nn.planned.block import block_class
from smp.nn.planned.linear import PlannedPart
from smp.nn.planned.trial import Trial
from smp.nn.planned.whole_gradients import WholeGradients
from smp.replacement import plans
from smp.replacement.plan_adapters import decide_adapters, find_adapters
from smp.replacement.plan_alone import decide_standalone, keep_shared_whole, without_shared
from smp.replacement.plan_cuts import NewForm, Report, SplitState, cut_parameters, new_state
from smp.replacement.plan_exceptions import ACTIVATIONS
from smp.replacement.plan_experts import decide_experts
from smp.replacement.plan_groups import decide_groups, decide_latent, is_complete
from smp.tensor_parallel import reading, sharding


def apply_plan(
    root: nn.Module,
    plan: plans.Plan,
    prefix: str,
    taken: Mapping[nn.Module, str],
    is_tried: bool = False,
) -> Report:
    """Splits the parts that a plan names, as far as they can be split.

    Args:
        root: module that the plan is for.
        plan: words by path, checked.
        prefix: prefix of its name in the model, with a dot at the end; for messages.
        taken: modules inside that the plan is not for, with the reason as the end of a sentence.
        is_tried: whether blocks check before their first run that the plan fits their code.
    """
    state = new_state(root, plan, prefix, taken)
    adapters = find_adapters(state)
    groups = decide_groups(state, is_tried)
    decide_standalone(state)
    decide_experts(state)
    keep_shared_whole(state)
    groups = {path: group for path, group in groups.items() if is_complete(state, group)}
    groups = without_shared(state, groups)
    decide_latent(state, groups)
    decide_adapters(state, adapters)
    _tell_rest(state)
    blocks = set(plans.outermost(groups).values())
    _mark_wholes(state, blocks | state.experts)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, cut in state.cuts.items():
        _split(state, path, cut, plans.holder(path, blocks) is not None, made)
    trials = {path: _trial_of(state, path, groups) if is_tried else None for path in blocks}
    for path in groups:
        for name, value in state.owners.get(path, {}).items():
            if not name.startswith("_smp_"):
                setattr(state.modules[path], name, value)
    for path in sorted(blocks):
        _make_block(state, path, trials[path])
    return state.report


def _trial_of(state: SplitState, block: str, groups: Mapping[str, plans.Group]) -> Trial:
    """Returns the trial of a block, while its groups still have the numbers of the whole."""
    inside = [path for path in groups if plans.holder(path, (block,)) is not None]
    wholes = {
        path.removeprefix(block).removeprefix("."): {
            name: state.modules[path].__dict__[name]
            for name in state.owners.get(path, {})
            if not name.startswith("_smp_")
        }
        for path in inside
    }
    return Trial(wholes, [hint for path in inside for hint in state.hints.get(path, ())])


def _tell_rest(state: SplitState) -> None:
    """Reports the parameters that the plan names and no decision has covered."""
    cut = {plans.join(path, name) for path, c in state.cuts.items() for name in c.dims}
    for path, word in state.words.items():
        is_known = path in state.modules or path in cut or path in state.report.left
        if not is_known and word != plans.PARTIAL:
            state.report.left[path] = "it is a parameter of a module that is not split"
        if word in (plans.IDENTITY, plans.PACKED_ROW) and path in state.modules:
            if path not in state.cuts:
                state.report.left[path] = "it is in no experts that are split"


def _mark_wholes(state: SplitState, blocks: set[str]) -> None:
    """Marks the other parameters in blocks as whole, and whether their gradients are partial."""
    partial = {path for path, word in state.words.items() if word == plans.PARTIAL}
    for path in sorted(partial):
        if plans.holder(path, blocks) is None:
            state.report.left[path] = "it is in no block that is split"
    spread = {n for n, module in state.modules.items() if isinstance(module, HoldsExperts)}
    for name, module in state.modules.items():
        if plans.holder(name, blocks) is None or plans.holder(name, spread) is not None:
            continue
        cut = state.cuts.get(name)
        held = set() if cut is None else set(cut.partial)
        if name.rpartition(".")[2] in ACTIVATIONS:
            held |= module._parameters.keys()
        for key, parameter in module._parameters.items():
            if parameter is not None and (cut is None or key not in cut.dims):
                is_partial = not partial.isdisjoint((name, plans.join(name, key))) or key in held
                sharding.mark_whole(parameter, partial=is_partial)
        if name in partial:
            state.report.split[name] = plans.PARTIAL


def _split(
    state: SplitState,
    path: str,
    cut: NewForm,
    is_inside: bool,
    made: dict[nn.Parameter, nn.Parameter],
) -> None:
    module = state.modules[path]
    has_own = state.layout.has_own_batches and not is_inside
    cut_parameters(module, f"{state.prefix}{path}".removesuffix("."), cut.dims, made)
    splits = {}
    for name, how in cut.dims.items():
        part = module._parameters.get(name)
        if part is None:
            continue
        if cut.is_joined:
            sharding.mark_joined(part)
        own = f"{state.prefix}{plans.join(path, name)}"
        splits[name] = reading.Split(own, how.dim, how.sizes, has_own, how.num)
    bias = module._parameters.get("bias")
    is_part = is_linear(module)
    if not is_inside and is_part and bias is not None and "bias" not in cut.dims:
        sharding.mark_whole(bias, partial=has_own)
    module.__class__ = cut.make_class(type(module))
    if isinstance(module, PlannedPart):
        module.__dict__["_smp_splits"] = splits
    module.__dict__.update(
        _smp_layout=state.layout,
        _smp_inside=is_inside,
        _smp_name=f"{state.prefix}{path}",
        **cut.attributes,
    )
    if path in state.words:
        state.report.split[path] = state.words[path]


def _make_block(state: SplitState, path: str, trial: Trial | None) -> None:
    block = state.modules[path]
    for part in block.modules():
        if isinstance(part, HoldsExperts):
            part.get_common_tokens()  # in a block, all ranks have the tokens of all samples
    block.__class__ = block_class(type(block))
    block.__dict__.update(
        _smp_layout=state.layout,
        _smp_name=f"{state.prefix}{path}" or "(root)",
        _smp_heads=state.owners.get(path, {}).get("_smp_heads"),
        _smp_has_bias=state.owners.get(path, {}).get("_smp_has_bias", False),
        _smp_trial=trial,
        _smp_whole_gradients=WholeGradients(
            [
                (f"{state.prefix}{plans.join(path, name)}", parameter)
                for name, parameter in block.named_parameters()
                if sharding.is_complete(parameter)
            ]
        ),
    )
