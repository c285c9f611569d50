"""The decisions on how parts of a module are split by a plan."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from smp.initial.originals import keep_original
from smp.nn import layout as layouts
from smp.nn.conv1d import Conv1DPart, conv1d_class, is_conv1d
from smp.nn.experts import HoldsExperts
from smp.nn.layout import Layout
from smp.nn.planned.linear import PlannedColumn, PlannedHeads, PlannedPart
from smp.replacement import plans
from smp.replacement.plan_sizes import Share
from smp.tensor_parallel import regions, sharding


@dataclass
class Report:
    """The outcome of a plan.

    Attributes:
        split: words by path, for the parts that were split.
        left: reasons by path, for parts that the plan names and that stay whole.
        unused: keys of the plan that match nothing.
    """

    split: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    unused: Sequence[str] = ()


@dataclass(frozen=True)
class Dim:
    """The cut of a parameter.

    Attributes:
        dim: dimension that is cut.
        sizes: extents by rank, for each packed matrix.
        num: number of matrices that are packed in the dimension.
    """

    dim: int
    sizes: tuple[int, ...]
    num: int = 1


@dataclass
class NewForm:
    """The new form of a module.

    Attributes:
        make_class: function that returns the new class for the present one.
        dims: cuts by name of the parameter.
        partial: names of parameters held whole whose gradients are summed over the ranks.
        attributes: further attributes of the module.
        is_joined: whether code of the module combines its parameters with split tensors.
    """

    make_class: Callable[[type[nn.Module]], type[nn.Module]]
    dims: dict[str, Dim]
    partial: frozenset[str] = frozenset()
    attributes: dict[str, Any] = field(default_factory=dict)
    is_joined: bool = False


@dataclass
class SplitState:
    """The findings and decisions on a module that is split by a plan.

    Attributes:
        root: module that the plan is for.
        prefix: prefix of its name in the model, with a dot at the end; for messages.
        layout: layout of the model.
        modules: modules by path, each once.
        taken: modules that the plan is not for, with the reason.
        words: words by path of modules and parameters that the plan names.
        cuts: new forms by path of the module.
        owners: attributes with this rank's numbers of heads, by path of a group.
        hints: sentences on words that may be meant instead, by path of a group.
        experts: paths of modules of experts that are cut.
        report: outcome that is logged.
    """

    root: nn.Module
    prefix: str
    layout: Layout
    modules: Mapping[str, nn.Module]
    taken: Mapping[nn.Module, str]
    words: dict[str, str] = field(default_factory=dict)
    cuts: dict[str, NewForm] = field(default_factory=dict)
    owners: dict[str, dict[str, Any]] = field(default_factory=dict)
    hints: dict[str, list[str]] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)
    report: Report = field(default_factory=Report)


def new_state(
    root: nn.Module, plan: plans.Plan, prefix: str, taken: Mapping[nn.Module, str]
) -> SplitState:
    """Returns a state with what a plan names in a module, and without decisions."""
    modules = dict(root.named_modules())
    out = {part: why for module, why in taken.items() for part in module.modules()}
    matches = plans.match(plan, [*modules, *(name for name, _ in root.named_parameters())])
    state = SplitState(root, prefix, layouts.current(), modules, out)
    state.report.unused = matches.unused
    spread = {name for name, module in modules.items() if isinstance(module, HoldsExperts)}
    for path, word in matches.words.items():
        module = modules.get(path)
        if plans.holder(path, spread) is not None:
            continue  # each rank holds some of the experts whole
        if module is not None and module in out:
            state.report.left[path] = out[module]
        elif word not in plans.SILENT:
            state.words[path] = word
    return state


def problem_in(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Returns why a module cannot be split, as a predicate of the module, or None."""
    cls = type(module)
    is_other = base is nn.Linear and is_conv1d(module)
    if not (is_other or isinstance(module, base)):
        return f"is a {cls.__name__}; expected {base.__name__}"
    if cls is not base and not is_other and not _calls_super(cls):
        return f"is a {cls.__name__}, a subclass of {base.__name__} that computes something else"
    if "forward" in module.__dict__:
        return "has a forward of its own, set on the instance"
    if isinstance(module, nn.Embedding) and (
        module.sparse or module.max_norm is not None or module.scale_grad_by_freq
    ):
        return "has an option that needs whole rows of all ranks (sparse, max_norm, frequencies)"
    for name, parameter in module.named_parameters():
        if name not in ("weight", "bias"):
            return f"has a parameter '{name}'"
        problem = problem_of_parameter(name, parameter)
        if problem is not None:
            return problem
    if "weight" not in module._parameters:
        return "has no parameter 'weight'"
    return None


def problem_of_parameter(name: str, parameter: nn.Parameter) -> str | None:
    """Returns why a parameter cannot be cut, as a predicate of its module, or None."""
    if type(parameter) is not nn.Parameter:
        return f"has a {type(parameter).__name__} as '{name}'"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        return f"has a hook on its parameter '{name}'"
    return None


def is_model(module: nn.Module) -> bool:
    """Returns whether a module is a model of transformers, without importing transformers."""
    models = sys.modules.get("transformers.modeling_utils")
    model_cls = getattr(models, "PreTrainedModel", None)
    return model_cls is not None and isinstance(module, model_cls)


def output_head(model: Any) -> nn.Module | None:
    """Returns the module that makes the logits of a model of transformers, if it names one."""
    try:
        head: nn.Module | None = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head


def _calls_super(cls: type[nn.Module]) -> bool:
    """Returns whether the forward of a subclass seems to call ``super().forward(...)``."""
    holders = [c for c in cls.__mro__ if "forward" in c.__dict__]
    if holders[0] in (nn.Linear, nn.Embedding):
        return True
    code = getattr(holders[0].__dict__["forward"], "__code__", None)
    is_direct = len(holders) > 1 and holders[1] in (nn.Linear, nn.Embedding)
    return (
        is_direct
        and code is not None
        and "__class__" in code.co_freevars
        and "forward" in code.co_names
    )


def joined_class(cls: type[nn.Module], planned: type[PlannedPart]) -> type[nn.Module]:
    """Returns the new class of a module; forward of a subclass runs around ours."""
    if cls in (nn.Linear, nn.Embedding):
        return planned
    if (cls, planned) not in _joined:
        bases = (Conv1DPart, planned, cls) if cls is conv1d_class() else (cls, planned)
        members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _joined[cls, planned] = type(cls.__name__, bases, members)
    return _joined[cls, planned]


_joined: dict[tuple[type[nn.Module], type[PlannedPart]], type[nn.Module]] = {}


def behind(planned: type[PlannedPart]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    return functools.partial(joined_class, planned=planned)


def weight_dim(module: nn.Module, dim: int) -> int:
    """Returns the weight's dim of the output features (``dim`` 0) or input features (1)."""
    return 1 - dim if is_conv1d(module) else dim


def column_cut(module: nn.Module, share: Share, num: int) -> NewForm:
    if not share.sizes:
        own = share.heads[regions.rank()]
        attributes = {"_smp_sizes": (), "_smp_heads": own, "_smp_unit": share.unit}
        return NewForm(behind(PlannedHeads), {}, frozenset({"weight", "bias"}), attributes)
    dims = {"weight": Dim(weight_dim(module, 0), share.sizes, num)}
    if module._parameters.get("bias") is not None:
        dims["bias"] = Dim(0, share.sizes, num)
    return NewForm(behind(PlannedColumn), dims, attributes={"_smp_sizes": share.sizes})


def standalone_cut(
    module: nn.Module, cls: type[PlannedPart], dim: int, sizes: tuple[int, ...]
) -> NewForm:
    dims = {"weight": Dim(weight_dim(module, dim), sizes)}
    if dim == 0 and module._parameters.get("bias") is not None:
        dims["bias"] = Dim(0, sizes)
    return NewForm(behind(cls), dims, attributes={"_smp_sizes": sizes})


def cut_parameters(
    module: nn.Module,
    name: str,
    dims: Mapping[str, Dim],
    made: dict[nn.Parameter, nn.Parameter],
) -> None:
    """Replaces parameters of a module by this rank's parts, in place.

    If one has no memory, the module as it was is kept as the source of initial values.

    Args:
        module: module as the user made it.
        name: name of the module in the model.
        dims: cuts by name of the parameter.
        made: parts by whole parameter, to which new ones are added: modules may share parameters.
    """
    wholes = {key: module._parameters[key] for key in dims if key in module._parameters}
    if any(whole is not None and whole.is_meta for whole in wholes.values()):
        original = copy.copy(module)
        original.__dict__["_parameters"] = dict(module._parameters)
        keep_original(module, original, None)
    for key, whole in wholes.items():
        if whole is None:
            continue
        if whole not in made:
            made[whole] = part_of(whole, dims[key])
            sharding.mark_replaced(whole, plans.join(name, key))
        module._parameters[key] = made[whole]


def part_of(whole: nn.Parameter, how: Dim) -> nn.Parameter:
    """Returns this rank's part of a parameter, marked."""
    begin, own = sharding.begin_of(how.sizes), how.sizes[regions.rank()]
    with torch.no_grad():
        apart = whole.detach().unflatten(how.dim, (how.num, -1))
        values = apart.narrow(how.dim + 1, begin, own).flatten(how.dim, how.dim + 1)
        part = nn.Parameter(
            values.clone(memory_format=torch.contiguous_format), whole.requires_grad
        )
    part.__dict__.update(whole.__dict__)
    extent = whole.shape[how.dim]
    if how.num == 1:
        sharding.mark_split(part, how.dim, begin, extent)
    else:
        sharding.mark_packed(part, how.dim, how.num, begin, extent // how.num)
    return part
