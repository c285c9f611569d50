"""Decides how columns and the rows that they feed are split, and finds latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from smp.dropout.parts import Share
from smp.nn.planned.linear import PlannedLatent, PlannedRow
from smp.nn.planned.order_trial import whole_numbers
from smp.replacement import plan_sizes, plans
from smp.replacement.plan_cuts import (
    Dim,
    NewForm,
    SplitState,
    behind,
    column_cut,
    problem_in,
    weight_dim,
)
from smp.replacement.plan_orders import (
    features_of,
    find_form,
    number_of,
    numbers_of,
)
from smp.replacement.plan_sizes import CannotCut, Shares
from smp.tensor_parallel import regions

# Names of norms of queries, keys and values in attention.
_NORMS_OF_HEADS = frozenset(
    f"{kind}_{norm}"
    for kind in ("q", "k", "v", "query", "key", "value")
    for norm in ("norm", "layernorm", "layer_norm", "ln")
)


def decide_groups(state: SplitState, is_tried: bool) -> dict[str, plans.Group]:
    """Decides how columns and rows are split.

    Args:
        state: findings on the module, to which the decisions are added.
        is_tried: whether the order of queries, keys and values in one matrix is found by a trial.

    Returns:
        groups that are split, by path.
    """
    found = plans.group({p: w for p, w in state.words.items() if p in state.modules})
    for path in found.alone:
        counterpart = "rows that it feeds" if state.words[path] == plans.COLUMN else "columns"
        state.report.left[path] = f"there are no {counterpart} in the modules around it"
    kept = {}
    handed_on = _problems_of_biases(state, found.groups)
    for path, group in found.groups.items():
        problem = handed_on.get(type(state.modules[path])) or _problem_of(state, group)
        if problem is None:
            try:
                _cut_group(state, path, group, is_tried)
                kept[path] = group
                continue
            except CannotCut as error:
                problem = str(error)
        for part in (*group.columns, *group.rows):
            state.report.left[part] = problem
    return kept


def _problems_of_biases(
    state: SplitState, groups: Mapping[str, plans.Group]
) -> dict[type[nn.Module], str]:
    """Returns the classes of attention that cannot be split because of a bias for each head.

    Layers hand such a bias on to each other, so all of a class are split or none.
    """
    found = {}
    for path in groups:
        for name, module in state.modules[path].named_children():
            if state.words.get(plans.join(path, f"{name}.weight")) != plans.ROW:
                continue
            problem = problem_in(module, nn.Embedding)
            if problem is None and state.layout.has_own_batches:
                problem = "has a bias for each head of all ranks' samples; use prescaled_batch"
            if problem is not None:
                found[type(state.modules[path])] = f"the table '{plans.join(path, name)}' {problem}"
    return found


def _problem_of(state: SplitState, group: plans.Group) -> str | None:
    """Returns why a group cannot be split, or None."""
    for part in state.modules[group.path].modules():
        if part in state.taken:
            return f"a part beside it stays out of the plan: {state.taken[part]}"
    for path, word in state.words.items():
        is_own = word == plans.LATENT and plans.holder(path, (group.path,)) is not None
        if is_own and _direct_features(state.modules[group.path]) == 0:
            return (
                f"'{path}' is {plans.LATENT}, and neither the module around it nor its "
                "configuration has qk_rope_head_dim, which says how many features go to the heads"
            )
    for path in (*group.columns, *group.rows):
        problem = problem_in(state.modules[path], nn.Linear)
        if problem is not None:
            return f"'{path}' {problem}"
    return None


@dataclass(frozen=True)
class _GroupCut:
    """The cut of a group.

    Attributes:
        heads: heads of attention; None without attention.
        shares: shares of the ranks.
        num_packed: number of matrices that are packed in a column, by path.
        counts: values by rank of attributes that count heads.
    """

    heads: plan_sizes.Heads | None
    shares: Shares
    num_packed: Mapping[str, int]
    counts: Mapping[str, tuple[int, ...]]


def _cut_group(state: SplitState, path: str, group: plans.Group, is_tried: bool) -> None:
    rows = {p: features_of(state, p, 1) for p in group.rows}
    form = find_form(state, path, group, rows, is_tried)
    if form is None:
        cut = _cut_of(state, path, group, rows)
    else:
        packed = dict.fromkeys(group.columns, form.num_packed)
        cut = _GroupCut(form.heads, form.shares, packed, form.attributes)
    shares, rank = cut.shares, regions.rank()
    for part, share in shares.columns.items():
        state.cuts[part] = column_cut(state.modules[part], share, cut.num_packed[part])
        if cut.heads is not None:
            own = Share.of(shares.queries, rank)
            state.cuts[part].attributes["_smp_query_heads"] = own
    for part, share in shares.rows.items():
        sizes = {"_smp_sizes": share.sizes}
        dims = {"weight": Dim(weight_dim(state.modules[part], 1), share.sizes)}
        state.cuts[part] = NewForm(behind(PlannedRow), dims, attributes=sizes)
    if cut.heads is not None:
        counts = {name: by_rank[rank] for name, by_rank in cut.counts.items()}
        state.owners[path] = {"_smp_heads": (shares.queries[rank], cut.heads.queries), **counts}
        _cut_by_heads(state, path, cut.heads, shares)
        _sum_norms(state, path, {share.unit for share in shares.columns.values()})


def _cut_of(state: SplitState, path: str, group: plans.Group, rows: Mapping[str, int]) -> _GroupCut:
    """Returns the cut of a group whose columns are split one by one, by heads or evenly."""
    num = {p: plans.NUM_PACKED.get(state.words[p], 1) for p in group.columns}
    columns = {p: features_of(state, p, 0) // num[p] for p in group.columns}
    owner = state.modules[path]
    heads = plan_sizes.heads_of(numbers_of(owner), columns, next(iter(rows.values())))
    state.hints[path] = [_hint(state, p, rows) for p in columns if _is_thrice(state, p, rows)]
    shares = plan_sizes.shares_of(columns, rows, heads, state.layout.num_ranks)
    if heads is None:
        return _GroupCut(None, shares, num, {})
    counts = plan_sizes.counts_of(whole_numbers(owner), heads, shares)
    plan_sizes.check_groups(counts, heads, shares)
    if any(state.words[p] == plans.PACKED_COLUMN for p in group.columns):
        raise CannotCut("has packed columns in attention, whose order is not known")
    return _GroupCut(heads, shares, num, counts)


def _is_thrice(state: SplitState, column: str, rows: Mapping[str, int]) -> bool:
    """Returns whether a column makes three times the features that a row takes."""
    is_plain = state.words[column] == plans.COLUMN
    return is_plain and features_of(state, column, 0) == 3 * next(iter(rows.values()))


def _hint(state: SplitState, column: str, rows: Mapping[str, int]) -> str:
    row, width = next(iter(rows.items()))
    return (
        f"'{state.prefix}{column}' is {plans.COLUMN} and makes {3 * width} features, three times "
        f"those that '{state.prefix}{row}' takes: if they are all queries, then all keys, then all "
        f"values, its word is {plans.QKV_COLUMN}."
    )


def _cut_by_heads(state: SplitState, path: str, heads: plan_sizes.Heads, shares: Shares) -> None:
    """Cuts parameters that have the same number of elements for each head.

    They are those of attention itself, and those of tables in it, such as T5's, which hold a bias
    for each distance and head.
    """
    for name, module in state.modules[path].named_children():
        if isinstance(module, nn.Embedding):
            dims = _dims_by_heads(state, plans.join(path, name), plans.ROW, heads, shares)
            if dims:
                state.cuts[plans.join(path, name)] = NewForm(_same_class, dims)
                state.owners[path]["_smp_has_bias"] = True
    dims = _dims_by_heads(state, path, plans.COLUMN, heads, shares)
    if dims:
        state.cuts[path] = NewForm(_same_class, dims, is_joined=True)


def _dims_by_heads(
    state: SplitState, path: str, word: str, heads: plan_sizes.Heads, shares: Shares
) -> dict[str, Dim]:
    """Returns the cuts of a module's own parameters that have a word: columns 0, rows -1."""
    dims = {}
    for name, parameter in state.modules[path]._parameters.items():
        own = plans.join(path, name)
        if parameter is None or state.words.get(own) != word:
            continue
        dim = 0 if word == plans.COLUMN else parameter.dim() - 1
        if parameter.shape[dim] % heads.queries:
            raise CannotCut(
                f"has {parameter.shape[dim]} elements in '{own}', which are not those of "
                f"{heads.queries} heads"
            )
        unit = parameter.shape[dim] // heads.queries
        dims[name] = Dim(dim, tuple(unit * n for n in shares.queries))
    return dims


def _sum_norms(state: SplitState, path: str, units: set[int]) -> None:
    """Adds the norms of heads to the plan; they see own heads only, and plans may omit them."""
    for name, module in state.modules[path].named_children():
        own = plans.join(path, name)
        shapes = {tuple(parameter.shape) for parameter in module.parameters()}
        if name in _NORMS_OF_HEADS and shapes and shapes <= {(unit,) for unit in units}:
            state.words.setdefault(own, plans.PARTIAL)


def _same_class(cls: type[nn.Module]) -> type[nn.Module]:
    return cls


def is_complete(state: SplitState, group: plans.Group) -> bool:
    parts = (*group.columns, *group.rows)
    if all(path in state.cuts for path in parts):
        return True
    for path in (*parts, group.path):  # a part that shares a parameter was left whole
        if state.cuts.pop(path, None) is not None:
            state.report.left[path] = "a part beside it stays whole"
    return False


def decide_latent(state: SplitState, groups: Mapping[str, plans.Group]) -> None:
    """Cuts projections of latent attention whose surrounding group is split."""
    for path, word in state.words.items():
        if word != plans.LATENT:
            continue
        place = plans.holder(path, groups)
        module = state.modules.get(path)
        problem = "is a parameter" if module is None else problem_in(module, nn.Linear)
        if place is None:
            problem = "it is in no block that is split"
        if problem is None and place is not None:
            num = _direct_features(state.modules[place])
            if num > 0:
                attributes = {"_smp_sizes": (), "_smp_num_direct": num}
                state.cuts[path] = NewForm(behind(PlannedLatent), {}, attributes=attributes)
                continue
            problem = "nothing tells how many features go to the heads"
        state.report.left[path] = str(problem)


def _direct_features(owner: nn.Module) -> int:
    """Returns how many features of latent attention go to the heads directly; 0 if unknown."""
    own = number_of(owner.__dict__.get("qk_rope_head_dim"))
    return own or number_of(getattr(getattr(owner, "config", None), "qk_rope_head_dim", None))
