"""Splits the parts of a model that a plan names, in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from smp.initial.originals import keep_original
from smp.nn import layout as layouts
from smp.nn.layout import Layout
from smp.nn.planned.block import block_class
from smp.nn.planned.embedding import PlannedTableRows
from smp.nn.planned.linear import (
    PlannedColumn,
    PlannedGatheredColumn,
    PlannedHeads,
    PlannedPart,
    PlannedRow,
    PlannedSplitRow,
)
from smp.replacement import plan_sizes, plans
from smp.replacement.plan_sizes import CannotCut, Share, Shares
from smp.tensor_parallel import reading, regions, sharding

_STANDALONE: Mapping[str, tuple[type[PlannedPart], int]] = {
    plans.GATHERED_COLUMN: (PlannedGatheredColumn, 0),
    plans.SPLIT_ROW: (PlannedSplitRow, 1),
    plans.TABLE_ROWS: (PlannedTableRows, 0),
}


@dataclass
class Report:
    """What became of a plan.

    Attributes:
        split: words, by path of what was split.
        left: why parts that the plan names stay whole, by path.
        unused: keys of the plan that name nothing.
    """

    split: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    unused: Sequence[str] = ()


@dataclass
class _Cut:
    """What a module becomes.

    Attributes:
        cls: class it takes.
        dims: by name of a parameter: dim along which it is split, and sizes by rank.
        partial: names of parameters held whole whose gradients are summed over the ranks.
        attributes: further ones of the module.
    """

    cls: type[PlannedPart]
    dims: dict[str, tuple[int, Sequence[int]]]
    partial: frozenset[str] = frozenset()
    attributes: dict[str, Any] = field(default_factory=dict)


def apply_plan(
    root: nn.Module, plan: plans.Plan, prefix: str, taken: Mapping[nn.Module, str]
) -> Report:
    """Splits what a plan names, as far as it can be split.

    Args:
        root: the module that the plan is for.
        plan: checked.
        prefix: of its name in the model, with a dot at the end; for messages.
        taken: modules inside that the plan is not for, and why, as the end of a sentence.
    """
    return _Planned(root, plan, prefix, taken).apply()


class _Planned:
    """One plan and the module that it is for."""

    def __init__(
        self, root: nn.Module, plan: plans.Plan, prefix: str, taken: Mapping[nn.Module, str]
    ) -> None:
        self._root, self._prefix = root, prefix
        self._layout: Layout = layouts.current()
        self._modules = dict(root.named_modules())
        self._taken = {part: why for module, why in taken.items() for part in module.modules()}
        parameters = dict(root.named_parameters())
        matches = plans.match(plan, [*self._modules, *parameters])
        self.report = Report(unused=matches.unused)
        self._words: dict[str, str] = {}
        for path, word in matches.words.items():
            module = self._modules.get(path)
            if module is not None and module in self._taken:
                self.report.left[path] = self._taken[module]
            elif module is None and word not in (plans.PARTIAL, plans.WHOLE):
                self.report.left[path] = "it is a parameter, and no word for modules can be used"
            elif word != plans.WHOLE:
                self._words[path] = word
        self._cuts: dict[str, _Cut] = {}
        self._owners: dict[str, dict[str, Any]] = {}  # attributes to set, by path

    def apply(self) -> Report:
        groups = self._decide_groups()
        self._decide_standalone()
        self._keep_shared_whole()
        groups = {path: group for path, group in groups.items() if self._is_complete(group)}
        groups = self._without_shared(groups)
        blocks = set(plans.outermost(groups).values())
        self._decide_wholes(blocks)
        made: dict[nn.Parameter, nn.Parameter] = {}
        for path, cut in self._cuts.items():
            self._split(path, cut, plans.holder(path, blocks) is not None, made)
        for path in groups:
            for name, value in self._owners.get(path, {}).items():
                if name != "_smp_heads":
                    setattr(self._modules[path], name, value)
        for path in sorted(blocks):
            self._make_block(path)
        return self.report

    # ---- what is split how

    def _decide_groups(self) -> dict[str, plans.Group]:
        found = plans.group({p: w for p, w in self._words.items() if p in self._modules})
        for path in found.alone:
            counterpart = "rows that it feeds" if self._words[path] == plans.COLUMN else "columns"
            self.report.left[path] = f"there are no {counterpart} in the modules around it"
        kept = {}
        for path, group in found.groups.items():
            problem = self._problem_of(group)
            if problem is None:
                try:
                    self._cut_group(path, group)
                    kept[path] = group
                    continue
                except CannotCut as error:
                    problem = str(error)
            for part in (*group.columns, *group.rows):
                self.report.left[part] = problem
        return kept

    def _problem_of(self, group: plans.Group) -> str | None:
        """Why a group cannot be split."""
        for part in self._modules[group.path].modules():
            if part in self._taken:
                return f"a part beside it stays out of the plan: {self._taken[part]}"
        for path in (*group.columns, *group.rows):
            problem = _problem_in(self._modules[path], nn.Linear)
            if problem is not None:
                return f"'{path}' {problem}"
        return None

    def _cut_group(self, path: str, group: plans.Group) -> None:
        owner = self._modules[path]
        columns = {p: self._linear(p).out_features for p in group.columns}
        rows = {p: self._linear(p).in_features for p in group.rows}
        attributes = _numbers_of(owner)
        heads = plan_sizes.heads_of(attributes, columns, next(iter(rows.values())))
        shares = plan_sizes.shares_of(columns, rows, heads, self._layout.num_ranks)
        if heads is not None:
            self._owners[path] = _head_attributes(owner, heads, shares)
        for part, share in shares.columns.items():
            self._cuts[part] = _column(self._linear(part), share)
        for part, share in shares.rows.items():
            sizes = {"_smp_sizes": share.sizes}
            self._cuts[part] = _Cut(PlannedRow, {"weight": (1, share.sizes)}, attributes=sizes)

    def _linear(self, path: str) -> nn.Linear:
        module = self._modules[path]
        assert isinstance(module, nn.Linear)
        return module

    def _decide_standalone(self) -> None:
        for path, word in self._words.items():
            if word not in _STANDALONE or path not in self._modules:
                continue
            cls, dim = _STANDALONE[word]
            module = self._modules[path]
            base = nn.Embedding if cls is PlannedTableRows else nn.Linear
            problem = _problem_in(module, base)
            if problem is None:
                extent = module.weight.shape[dim]
                sizes = sharding.split(extent)
                if sizes[-1] > 0:
                    self._cuts[path] = _standalone(module, cls, dim, sizes)
                    continue
                problem = f"has a size of {extent}, which {len(sizes)} ranks cannot share"
            self.report.left[path] = problem

    def _keep_shared_whole(self) -> None:
        """Parts that share a parameter are split alike, or not at all."""
        holders: dict[Tensor, list[tuple[str, str]]] = {}
        for path, module in self._modules.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    holders.setdefault(parameter, []).append((path, name))
        for places in holders.values():
            if len(places) < 2 or not any(path in self._cuts for path, _ in places):
                continue
            cuts = [(self._cuts[p].dims.get(n) if p in self._cuts else None) for p, n in places]
            table = self._tied_table(places, cuts)
            if table is not None:
                cuts = [cut or table for cut in cuts]
            if any(cut != cuts[0] for cut in cuts) or cuts[0] is None:
                others = ", ".join(f"'{path}.{name}'" for path, name in places)
                for path, _ in places:
                    if self._cuts.pop(path, None) is not None:
                        self.report.left[path] = f"{others} are one parameter, and not split alike"

    def _tied_table(
        self,
        places: Sequence[tuple[str, str]],
        cuts: Sequence[tuple[int, Sequence[int]] | None],
    ) -> tuple[int, Sequence[int]] | None:
        """Splits tables that heads share, as these are; None where that cannot be."""
        known = {(cut[0], tuple(cut[1])) for cut in cuts if cut is not None}
        dim, sizes = next(iter(known))
        if len(known) != 1 or dim != 0:
            return None
        rest = [path for (path, _), cut in zip(places, cuts, strict=True) if cut is None]
        if any(_problem_in(self._modules[path], nn.Embedding) is not None for path in rest):
            return None
        for path in rest:
            self._cuts[path] = _standalone(self._modules[path], PlannedTableRows, 0, sizes)
            self._words[path] = plans.TABLE_ROWS
        return dim, sizes

    def _is_complete(self, group: plans.Group) -> bool:
        parts = (*group.columns, *group.rows)
        if all(path in self._cuts for path in parts):
            return True
        for path in parts:  # a shared parameter has taken one away
            if self._cuts.pop(path, None) is not None:
                self.report.left[path] = "a part beside it stays whole"
        return False

    def _without_shared(self, groups: dict[str, plans.Group]) -> dict[str, plans.Group]:
        """Leaves out groups in blocks with parameters that are used outside of blocks as well.

        Inside, the gradient of a parameter covers the samples of all ranks.
        """
        while True:
            blocks = {self._modules[block] for block in plans.outermost(groups).values()}
            inside: dict[nn.Parameter, set[str | None]] = {}
            places = dict(self._root.named_modules(remove_duplicate=False))
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
                if block is not None and not self._is_cut(parameter)
            }
            if not mixed:
                return groups
            for path in [p for p in groups if plans.holder(p, mixed) is not None]:
                group = groups.pop(path)
                for part in (*group.columns, *group.rows):
                    self._cuts.pop(part, None)
                    self.report.left[part] = "a parameter inside is used outside of it as well"

    def _is_cut(self, parameter: nn.Parameter) -> bool:
        return any(
            self._modules[path]._parameters.get(name) is parameter
            for path, cut in self._cuts.items()
            for name in cut.dims
        )

    # ---- what stays whole inside

    def _decide_wholes(self, blocks: set[str]) -> None:
        """Says that the other parameters in blocks are whole, and what their gradients are."""
        partial = {path for path, word in self._words.items() if word == plans.PARTIAL}
        for path in sorted(partial):
            if plans.holder(path, blocks) is None:
                self.report.left[path] = "it is in no block that is split"
        for name, module in self._modules.items():
            if plans.holder(name, blocks) is None:
                continue
            cut = self._cuts.get(name)
            held = set() if cut is None else cut.partial
            for key, parameter in module._parameters.items():
                if parameter is not None and (cut is None or key not in cut.dims):
                    is_partial = not partial.isdisjoint((name, f"{name}.{key}")) or key in held
                    sharding.mark_whole(parameter, partial=is_partial)
            if name in partial:
                self.report.split[name] = plans.PARTIAL

    # ---- doing it

    def _split(
        self, path: str, cut: _Cut, is_inside: bool, made: dict[nn.Parameter, nn.Parameter]
    ) -> None:
        module = self._modules[path]
        has_own = self._layout.has_own_batches and not is_inside
        before: Any = None
        splits = {}
        for name, (dim, sizes) in cut.dims.items():
            whole = module._parameters.get(name)
            if whole is None:
                continue
            if whole not in made:
                made[whole] = _part_of(whole, dim, sizes)
                sharding.mark_replaced(whole, f"{self._prefix}{path}.{name}")
            if whole.is_meta and before is None:
                before = copy.copy(module)
                before.__dict__["_parameters"] = dict(module._parameters)
            module._parameters[name] = made[whole]
            splits[name] = reading.Split(f"{self._prefix}{path}.{name}", dim, tuple(sizes), has_own)
        if not is_inside and module._parameters.get("bias") is not None and "bias" not in cut.dims:
            sharding.mark_whole(module._parameters["bias"], partial=has_own)
        module.__class__ = _joined_class(type(module), cut.cls)
        module.__dict__.update(
            _smp_layout=self._layout, _smp_inside=is_inside, _smp_splits=splits, **cut.attributes
        )
        if before is not None:
            keep_original(module, before, None)
        self.report.split[path] = self._words[path]

    def _make_block(self, path: str) -> None:
        block = self._modules[path]
        block.__class__ = block_class(type(block))
        block.__dict__.update(
            _smp_layout=self._layout,
            _smp_name=f"{self._prefix}{path}" or "(root)",
            _smp_heads=self._owners.get(path, {}).get("_smp_heads"),
        )


# ---- pieces


def _upwards(path: str) -> list[str]:
    """A path and those of the modules around it."""
    pieces = path.split(".") if path else []
    return [".".join(pieces[:num]) for num in range(len(pieces), -1, -1)]


def _problem_in(module: nn.Module, base: type[nn.Module]) -> str | None:
    """Why a module cannot be split, as the end of a sentence that begins with it."""
    cls = type(module)
    if not isinstance(module, base):
        return f"is a {cls.__name__}; expected {base.__name__}"
    if cls is not base and not _calls_super(cls):
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
        if type(parameter) is not nn.Parameter:
            return f"has a {type(parameter).__name__} as '{name}'"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return f"has a hook on its parameter '{name}'"
    if "weight" not in module._parameters:
        return "has no parameter 'weight'"
    return None


def _calls_super(cls: type[nn.Module]) -> bool:
    """Does the forward of a subclass hand on to that of its base, as ``super().forward(...)``?"""
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


def _joined_class(cls: type[nn.Module], planned: type[PlannedPart]) -> type[nn.Module]:
    """The class that a module takes: what a subclass adds stands around ours."""
    if cls in (nn.Linear, nn.Embedding):
        return planned
    if (cls, planned) not in _joined:
        members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        _joined[cls, planned] = type(cls.__name__, (cls, planned), members)
    return _joined[cls, planned]


_joined: dict[tuple[type[nn.Module], type[PlannedPart]], type[nn.Module]] = {}


def _column(module: nn.Linear, share: Share) -> _Cut:
    if not share.sizes:
        own = share.heads[regions.rank()]
        attributes = {"_smp_sizes": (), "_smp_heads": own, "_smp_unit": share.unit}
        return _Cut(PlannedHeads, {}, frozenset({"weight", "bias"}), attributes)
    dims: dict[str, tuple[int, Sequence[int]]] = {"weight": (0, share.sizes)}
    if module.bias is not None:
        dims["bias"] = (0, share.sizes)
    return _Cut(PlannedColumn, dims, attributes={"_smp_sizes": share.sizes})


def _standalone(module: nn.Module, cls: type[PlannedPart], dim: int, sizes: Sequence[int]) -> _Cut:
    dims: dict[str, tuple[int, Sequence[int]]] = {"weight": (dim, tuple(sizes))}
    if dim == 0 and module._parameters.get("bias") is not None:
        dims["bias"] = (0, tuple(sizes))
    return _Cut(cls, dims, attributes={"_smp_sizes": tuple(sizes)})


def _part_of(whole: nn.Parameter, dim: int, sizes: Sequence[int]) -> nn.Parameter:
    """This rank's part of a parameter, marked."""
    begin, own = sharding.begin_of(sizes), sizes[regions.rank()]
    with torch.no_grad():
        values = whole.detach().narrow(dim, begin, own).clone(memory_format=torch.contiguous_format)
    part = nn.Parameter(values, whole.requires_grad)
    part.__dict__.update(whole.__dict__)
    sharding.mark_split(part, dim, begin, whole.shape[dim])
    return part


def _numbers_of(owner: nn.Module) -> dict[str, int]:
    """Numbers of heads that a module says, or else its configuration."""
    names = (
        "head_dim",
        *plan_sizes.QUERY_NAMES,
        *plan_sizes.KEY_VALUE_NAMES,
        *plan_sizes.GROUP_NAMES,
    )
    own = {name: _number(owner.__dict__.get(name)) for name in names}
    if own["head_dim"] or any(own[name] for name in plan_sizes.QUERY_NAMES):
        config = getattr(owner, "config", None)
        for name in names:
            if not own[name] and name != "head_dim":
                own[name] = _number(getattr(config, name, None))
    return own


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _head_attributes(owner: nn.Module, heads: plan_sizes.Heads, shares: Shares) -> dict[str, Any]:
    """Attributes that say how many heads there are, with those of this rank.

    Raises:
        CannotCut: code takes keys that are shared for granted, in a number that differs here.
    """
    rank = regions.rank()
    made: dict[str, Any] = {"_smp_heads": (shares.queries[rank], heads.queries)}
    for names, before, after in (
        (plan_sizes.QUERY_NAMES, heads.queries, shares.queries[rank]),
        (plan_sizes.KEY_VALUE_NAMES, heads.keys, shares.keys[rank]),
        (plan_sizes.GROUP_NAMES, heads.queries // heads.keys, shares.groups[rank]),
    ):
        for name in names:
            if owner.__dict__.get(name) == before:
                made[name] = after
    knows_groups = any(name in made for name in plan_sizes.GROUP_NAMES)
    changes = any(after != heads.queries // heads.keys for after in shares.groups)
    if changes and not knows_groups:
        raise CannotCut(
            f"has {heads.keys} heads of keys and values, fewer than ranks, and no attribute such "
            f"as {plan_sizes.GROUP_NAMES[0]} that tells how many heads of queries share one"
        )
    return made
