"""Plans of tensor parallelism: they name the parts of a model and how each is split.

A plan is a dict of words by path, as in transformers' configurations. All words but one, and their
meanings, are those of ``transformers/distributed/tensor_parallel.py`` (Apache-2.0); see
docs/design/plans.md. Everything here works on names alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Plan = Mapping[str, str]

COLUMN, ROW = "colwise", "rowwise"
GATHERED_COLUMN, SPLIT_ROW = "colwise_gather_output", "rowwise_split_input"
PARTIAL = "replicated_with_grad_allreduce"
TABLE_ROWS, TABLE_COLUMNS = "embedding_rowwise", "embedding_colwise"
PACKED_COLUMN, PACKED_ROW = "packed_colwise", "packed_rowwise"
#: A word of ours: all queries, then all keys, then all values.
QKV_COLUMN = "qkv_colwise"
EXPERTS, IDENTITY = "moe_tp_experts", "moe_identity_expert"
LATENT = "mla_kv_a_proj"
SUMMED = "all_reduce"
WHOLE, LOCAL = "replicate", "local_params"
#: Words for modules of experts and for parameters with a slice for each, see `named_experts`.
SPREAD, EACH = "ep_dispatch_experts", "grouped_gemm"
#: Words that are synonyms of words above.
_SAME = {"colwise_rep": GATHERED_COLUMN, "rowwise_rep": SPLIT_ROW}
WORDS = frozenset(
    {COLUMN, ROW, GATHERED_COLUMN, SPLIT_ROW, PARTIAL, TABLE_ROWS, TABLE_COLUMNS, PACKED_COLUMN}
    | {QKV_COLUMN, PACKED_ROW, EXPERTS, IDENTITY, LATENT, SUMMED, WHOLE, LOCAL, SPREAD, EACH}
)
#: Words without an effect of their own here.
SILENT = frozenset({WHOLE, LOCAL, SPREAD, EACH})
_COLUMNS = frozenset({COLUMN, PACKED_COLUMN, QKV_COLUMN})
#: Number of matrices that are packed in one layer, by word.
NUM_PACKED = {PACKED_COLUMN: 2, QKV_COLUMN: 3}


class UnknownWord(ValueError):
    """A plan has an unknown word; the text lists the known ones."""


def check_plan(plan: object) -> dict[str, str]:
    """Returns a plan with synonyms replaced.

    Raises:
        UnknownWord: a word is unknown.
        ValueError: the plan is no dict of strings.
    """
    if not isinstance(plan, Mapping) or not all(
        isinstance(key, str) and isinstance(word, str) for key, word in plan.items()
    ):
        raise ValueError(
            f"a plan of tensor parallelism is a dict of paths and words, as {{'layers.*.up': "
            f"'{COLUMN}'}}; got {plan!r}"
        )
    known = WORDS | _SAME.keys()
    checked: dict[str, str] = {}
    for key, word in plan.items():
        checked[key] = _SAME[word] if word in _SAME else word
        if word not in known:
            near = difflib.get_close_matches(word, sorted(known), n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise UnknownWord(
                f"the plan says '{word}' of '{key}', which is no word of a plan that is known; "
                f"{hint}The words are {', '.join(sorted(known))}"
            )
    return checked


@dataclass(frozen=True)
class MatchedWords:
    """The words of a plan for the parts of a model.

    Attributes:
        words: words by path of a module or parameter.
        unused: keys of the plan that match nothing.
    """

    words: Mapping[str, str]
    unused: Sequence[str] = ()


def match(plan: Plan, paths: Iterable[str]) -> MatchedWords:
    """Finds the parts that a plan names.

    ``*`` in a key matches one component of a path, usually a number. If several keys match a part,
    the key with the most components other than ``*`` counts, and of equal ones the last.

    Args:
        plan: words by key, checked.
        paths: paths of modules and parameters, relative to the module that the plan is for.
    """
    by_length: dict[int, list[tuple[int, int, tuple[str, ...], str]]] = {}
    for place, key in enumerate(plan):
        components = tuple(key.split("."))
        num_named = sum(component != "*" for component in components)
        by_length.setdefault(len(components), []).append((num_named, place, components, key))
    for keys in by_length.values():
        keys.sort(reverse=True)
    words: dict[str, str] = {}
    used: set[str] = set()
    for path in paths:
        own = path.split(".")
        fitting = [
            key
            for _, _, components, key in by_length.get(len(own), ())
            if all(c in ("*", o) for c, o in zip(components, own, strict=True))
        ]
        if fitting:
            words[path] = plan[fitting[0]]
            used.update(fitting)
    return MatchedWords(words, tuple(key for key in plan if key not in used))


@dataclass
class Group:
    """A set of columns and the rows that they feed.

    Attributes:
        path: path of the smallest module that holds them all.
        columns, rows: paths of layers.
    """

    path: str
    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Groups:
    """The groups of columns and rows in a model.

    Attributes:
        groups: groups by path.
        alone: columns without a row and rows without columns, which cannot be split.
    """

    groups: Mapping[str, Group]
    alone: Sequence[str]


def group(words: Mapping[str, str]) -> Groups:
    """Finds which columns feed which rows.

    A row belongs to the smallest module around it that holds columns. A column belongs to the rows
    of the smallest module around it that holds rows. These may differ, as for a row in a module of
    its own with a gate beside it; then columns outside belong to the only group in that module.

    Args:
        words: words by path of a module; words other than columns and rows are ignored.
    """
    columns = [path for path, word in words.items() if word in _COLUMNS]
    rows = [path for path, word in words.items() if word == ROW]
    with_columns = {place for path in columns for place in _around(path)}
    homes = {row: next((p for p in _around(row) if p in with_columns), None) for row in rows}
    held: dict[str, list[str]] = {}  # homes of rows, by each module around the rows
    for row, home in homes.items():
        for place in _around(row):
            if home is not None and home not in held.setdefault(place, []):
                held[place].append(home)
    found: dict[str, Group] = {}
    alone = []
    for column in columns:
        near = next((place for place in _around(column) if place in held), None)
        fitting = [] if near is None else held[near]
        home = near if near in fitting else fitting[0] if len(fitting) == 1 else None
        if near is None or home is None:
            alone.append(column)
            continue
        own = found.setdefault(home, Group(home))
        own.columns.append(column)
        if holder(own.path, (near,)) is not None:
            own.path = near  # it is wider than the home of its rows
    for row, home in homes.items():
        if home in found:
            found[home].rows.append(row)
        else:
            alone.append(row)
    return Groups({one.path: one for one in found.values()}, tuple(alone))


@dataclass
class Named:
    """A module of experts that a plan names.

    Attributes:
        each: names of parameters with a slice for each expert; empty if the plan names none.
        common: names of parameters, and of modules inside, that all experts use.
    """

    each: set[str] = field(default_factory=set)
    common: set[str] = field(default_factory=set)


def named_experts(plan: Plan, paths: Iterable[str]) -> dict[str, Named]:
    """Returns the modules of experts that are to be spread, by path.

    Args:
        plan: words by path, ``*`` for one component.
        paths: paths of modules and parameters, relative to the module that the plan is for.
    """
    words = match(plan, paths).words
    found = {path: Named() for path, word in words.items() if word == SPREAD}
    for path, word in words.items():
        home, _, name = path.rpartition(".")
        if home in found and word == EACH:
            found[home].each.add(name)
        if home in found and word == PARTIAL:
            found[home].common.add(name)
    return found


def _around(path: str) -> Iterator[str]:
    """Yields the paths of the modules around a path, nearest first; "" is the root."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def join(path: str, name: str) -> str:
    """Returns the path of a part of a module; "" is the root."""
    return f"{path}.{name}" if path else name


def holder(path: str, places: Container[str]) -> str | None:
    """Returns the path itself or the nearest path around it among ``places``, or None."""
    return next((place for place in (path, *_around(path)) if place in places), None)


def outermost(paths: Iterable[str]) -> dict[str, str]:
    """Maps each path to the outermost of the paths that is or holds it."""
    every = set(paths)
    return {
        path: [place for place in (path, *_around(path)) if place in every][-1]
        for path in sorted(every)
    }
