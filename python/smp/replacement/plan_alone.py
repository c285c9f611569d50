"""Decides about layers that are split alone, and parameters that several modules share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from smp.nn.planned.embedding import PlannedTableColumns, PlannedTableRows
from smp.nn.planned.head import PlannedHead
from smp.nn.planned.linear import PlannedGatheredColumn, PlannedPart, PlannedSplitRow
from smp.replacement import plans
from smp.replacement.plan_cuts import (
    Dim,
    SplitState,
    is_model,
    output_head,
    problem_in,
    standalone_cut,
    weight_dim,
)
from smp.tensor_parallel import sharding

_STANDALONE: Mapping[str, tuple[type[PlannedPart], int]] = {
    plans.GATHERED_COLUMN: (PlannedGatheredColumn, 0),
    plans.SPLIT_ROW: (PlannedSplitRow, 1),
    plans.TABLE_ROWS: (PlannedTableRows, 0),
    plans.TABLE_COLUMNS: (PlannedTableColumns, 1),
}


def decide_standalone(state: SplitState) -> None:
    for path, word in state.words.items():
        if word not in _STANDALONE or path not in state.modules:
            continue
        cls, dim = _STANDALONE[word]
        module = state.modules[path]
        base = nn.Linear if issubclass(cls, nn.Linear) else nn.Embedding
        problem = problem_in(module, base)
        if problem is None:
            extent = module.get_parameter("weight").shape[weight_dim(module, dim)]
            sizes = sharding.split(extent)
            if sizes[-1] > 0:
                cls = PlannedHead if _is_head(state, path) else cls
                state.cuts[path] = standalone_cut(module, cls, dim, tuple(sizes))
                continue
            problem = f"has a size of {extent}, which {len(sizes)} ranks cannot share"
        state.report.left[path] = problem


def _is_head(state: SplitState, path: str) -> bool:
    """Returns whether the model of transformers around a layer makes its logits with it."""
    place = plans.holder(path, [p for p, module in state.modules.items() if is_model(module)])
    if state.words[path] != plans.GATHERED_COLUMN or place is None:
        return False
    return output_head(state.modules[place]) is state.modules[path]


def keep_shared_whole(state: SplitState) -> None:
    """Leaves parts whole that share a parameter and are not split alike."""
    holders: dict[Tensor, list[tuple[str, str]]] = {}
    for path, module in state.modules.items():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                holders.setdefault(parameter, []).append((path, name))
    for places in holders.values():
        if len(places) < 2 or not any(path in state.cuts for path, _ in places):
            continue
        cuts = [(state.cuts[p].dims.get(n) if p in state.cuts else None) for p, n in places]
        table = _tied_table(state, places, cuts)
        if table is not None:
            cuts = [cut or table for cut in cuts]
        if any(cut != cuts[0] for cut in cuts) or cuts[0] is None:
            others = ", ".join(f"'{path}.{name}'" for path, name in places)
            for path, _ in places:
                if state.cuts.pop(path, None) is not None:
                    state.report.left[path] = f"{others} are one parameter, and not split alike"


def _tied_table(
    state: SplitState,
    places: Sequence[tuple[str, str]],
    cuts: Sequence[Dim | None],
) -> Dim | None:
    """Splits tables that heads share like the heads; returns the cut, or None if impossible."""
    known = {cut for cut in cuts if cut is not None}
    found = next(iter(known))
    if len(known) != 1 or found.dim != 0 or found.num != 1:
        return None
    rest = [path for (path, _), cut in zip(places, cuts, strict=True) if cut is None]
    if any(problem_in(state.modules[path], nn.Embedding) is not None for path in rest):
        return None
    for path in rest:
        state.cuts[path] = standalone_cut(state.modules[path], PlannedTableRows, 0, found.sizes)
        state.words[path] = plans.TABLE_ROWS
    return found


def without_shared(state: SplitState, groups: dict[str, plans.Group]) -> dict[str, plans.Group]:
    """Removes groups in blocks whose parameters are used outside of blocks as well.

    Inside of a block, the gradient of a parameter covers the samples of all ranks.
    """
    while True:
        blocks = {state.modules[block] for block in plans.outermost(groups).values()}
        inside: dict[nn.Parameter, set[str | None]] = {}
        places = dict(state.root.named_modules(remove_duplicate=False))
        for path, module in places.items():
            block = next((p for p in _upwards(path) if places[p] in blocks), None)
            for parameter in module._parameters.values():
                if parameter is not None:
                    inside.setdefault(parameter, set()).add(block)
        mixed = {
            block
            for parameter, found in inside.items()
            if None in found
            for block in found
            if block is not None and not _is_cut(state, parameter)
        }
        if not mixed:
            return groups
        for path in [p for p in groups if plans.holder(p, mixed) is not None]:
            group = groups.pop(path)
            for part in (*group.columns, *group.rows, group.path):
                state.cuts.pop(part, None)
            for part in (*group.columns, *group.rows):
                state.report.left[part] = "a parameter inside is used outside of it as well"


def _is_cut(state: SplitState, parameter: nn.Parameter) -> bool:
    return any(
        state.modules[path]._parameters.get(name) is parameter
        for path, cut in state.cuts.items()
        for name in cut.dims
    )


def _upwards(path: str) -> list[str]:
    """Returns a path and the paths of the modules around it, nearest first."""
    pieces = path.split(".") if path else []
    return [".".join(pieces[:num]) for num in range(len(pieces), -1, -1)]
