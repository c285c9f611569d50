"""Computes how columns and the rows that they feed are cut: evenly, or by heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from smp.tensor_parallel.sharding import split

KEY_NAMES = frozenset(
    {"k_proj", "v_proj", "k", "v", "key", "value", "key_proj", "value_proj", "to_k", "to_v"}
)
QUERY_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
SIZE_NAMES = ("head_dim", "head_size")
KEY_VALUE_NAMES = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
WIDTH_NAMES = ("split_size", "attn_dim")  # features of all heads together
GROUP_NAMES = ("num_key_value_groups", "num_kv_groups", "n_rep")


@dataclass(frozen=True)
class Heads:
    """The numbers of heads of attention.

    Attributes:
        queries, keys: number of heads.
    """

    queries: int
    keys: int


@dataclass(frozen=True)
class Share:
    """The shares of the ranks in a dim.

    Attributes:
        sizes: extents by rank; empty where all ranks hold it whole.
        heads: heads that each rank computes of a dim held whole, by rank.
        unit: number of features of one head.
    """

    sizes: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...] = ()
    unit: int = 1


@dataclass(frozen=True)
class Shares:
    """The shares of the ranks in a group.

    Attributes:
        columns, rows: shares by path.
        queries, keys: number of heads by rank; empty without attention.
        groups: number of heads of queries for each head of keys, by rank.
        key_heads: heads of keys that each rank computes, by rank.
    """

    columns: Mapping[str, Share]
    rows: Mapping[str, Share]
    queries: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    key_heads: tuple[tuple[int, ...], ...] = ()


class CannotCut(ValueError):
    """The sizes of a group cannot be cut; the text says why, as the end of a sentence."""


def heads_of(
    attributes: Mapping[str, int], columns: Mapping[str, int], in_features: int
) -> Heads | None:
    """Returns the heads of attention, as far as a module and its sizes show them.

    Args:
        attributes: numbers from the attributes of the module or from its configuration.
        columns: number of output features, by path.
        in_features: number of input features of the row.

    Returns:
        None if the module is no attention.
    """
    known = [attributes[name] for name in QUERY_NAMES if attributes.get(name, 0) > 0]
    size = next((attributes[name] for name in SIZE_NAMES if attributes.get(name, 0) > 0), 0)
    queries = next((n for n in known if in_features % n == 0), 0)
    if queries == 0 and size > 0 and in_features % size == 0:
        queries = in_features // size
    if queries == 0:
        return None
    return Heads(queries, _key_heads(attributes, columns, queries, in_features // queries))


def _key_heads(
    attributes: Mapping[str, int], columns: Mapping[str, int], queries: int, size: int
) -> int:
    out = next((n for path, n in columns.items() if is_key(path)), None)
    groups = [attributes[name] for name in GROUP_NAMES if attributes.get(name, 0) > 0]
    if groups and queries % groups[0] == 0:
        return queries // groups[0]
    if out is None:
        return queries
    told = [attributes[name] for name in KEY_VALUE_NAMES if attributes.get(name, 0) > 0]
    fitting = [n for n in told if out % n == 0 and queries % n == 0]
    if fitting:
        return fitting[0]
    return out // size if out % size == 0 and out >= size else queries


def is_key(path: str) -> bool:
    """Returns whether a column makes keys or values, by its name."""
    return any(part in KEY_NAMES for part in path.split(".")[-2:])


def shares_of(
    columns: Mapping[str, int], rows: Mapping[str, int], heads: Heads | None, num_ranks: int
) -> Shares:
    """Returns the shares of the ranks in a group.

    Args:
        columns: number of output features, by path.
        rows: number of input features, by path.
        heads: heads of attention; None cuts features as evenly as possible.
        num_ranks: tensor-parallel degree.

    Raises:
        CannotCut: a rank would get nothing, or sizes do not match.
    """
    if heads is None:
        return _even(columns, rows, num_ranks)
    if heads.queries < num_ranks:
        raise CannotCut(f"has {heads.queries} heads, which {num_ranks} ranks cannot share")
    if heads.queries % heads.keys:
        raise CannotCut(f"has {heads.queries} heads of queries for {heads.keys} of keys and values")
    per_key = heads.queries // heads.keys
    is_shared = heads.keys < num_ranks  # several ranks compute one head of keys
    if is_shared:
        queries = split(heads.queries, num_ranks)
    else:
        queries = [n * per_key for n in split(heads.keys, num_ranks)]
    begins = [sum(queries[:rank]) for rank in range(num_ranks)]
    key_heads = tuple(
        _heads_for(begin, n, per_key) for begin, n in zip(begins, queries, strict=True)
    )
    keys = [len(own) for own in key_heads]
    groups = [n // own for n, own in zip(queries, keys, strict=True)]
    made = {}
    for path, out in columns.items():
        count = heads.keys if is_key(path) else heads.queries
        if out % count:
            raise CannotCut(f"has {out} features in '{path}', which are not {count} heads")
        unit = out // count
        if is_key(path) and is_shared:
            made[path] = Share((), key_heads, unit)
        else:
            sizes = keys if is_key(path) else queries
            made[path] = Share(tuple(n * unit for n in sizes), unit=unit)
    taken = {}
    for path, num in rows.items():
        if num % heads.queries:
            raise CannotCut(f"takes {num} features in '{path}', not those of {heads.queries} heads")
        unit = num // heads.queries
        taken[path] = Share(tuple(n * unit for n in queries), unit=unit)
    return Shares(made, taken, tuple(queries), tuple(keys), tuple(groups), key_heads)


def _heads_for(begin: int, num: int, per_key: int) -> tuple[int, ...]:
    """Returns the key head of each of some query heads, deduplicated if all serve equally many."""
    every = [head // per_key for head in range(begin, begin + num)]
    distinct = sorted(set(every))
    each = {every.count(head) for head in distinct}
    return tuple(distinct) if len(each) == 1 else tuple(every)


def counts_of(
    attributes: Mapping[str, int], heads: Heads, shares: Shares
) -> dict[str, tuple[int, ...]]:
    """Returns the values by rank of attributes that count heads.

    Args:
        attributes: numbers among the attributes of a module.
        heads: numbers of heads of all ranks.
        shares: shares of the ranks.
    """
    return {
        name: by_rank
        for names, whole, by_rank in (
            (QUERY_NAMES, heads.queries, shares.queries),
            (KEY_VALUE_NAMES, heads.keys, shares.keys),
            (GROUP_NAMES, heads.queries // heads.keys, shares.groups),
        )
        for name in names
        if attributes.get(name) == whole
    }


def check_groups(counts: Iterable[str], heads: Heads, shares: Shares) -> None:
    """Raises CannotCut if code uses a number of queries for each key that differs by rank.

    Args:
        counts: names of the attributes that get this rank's numbers.
        heads, shares: the same as in `counts_of`.
    """
    changes = any(after != heads.queries // heads.keys for after in shares.groups)
    if changes and not any(name in GROUP_NAMES for name in counts):
        raise CannotCut(
            f"has {heads.keys} heads of keys and values, fewer than ranks, and no attribute such "
            f"as {GROUP_NAMES[0]} that tells how many heads of queries share one"
        )


def _even(columns: Mapping[str, int], rows: Mapping[str, int], num_ranks: int) -> Shares:
    for path, num in rows.items():
        if num < num_ranks:
            raise CannotCut(f"has {num} features in '{path}', which {num_ranks} ranks cannot share")
    taken = {path: Share(tuple(split(num, num_ranks))) for path, num in rows.items()}
    widths = set(rows.values())
    for path, out in columns.items():
        if out not in widths:
            raise CannotCut(
                f"has {out} features in '{path}', and what they feed takes {_some(widths)}: which "
                "ones belong together cannot be told"
            )
    return Shares({p: Share(tuple(split(n, num_ranks))) for p, n in columns.items()}, taken)


def _some(numbers: Sequence[int] | set[int]) -> str:
    return " or ".join(str(number) for number in sorted(numbers))
