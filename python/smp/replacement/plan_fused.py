"""Computes which features of one matrix of queries, keys and values each rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from smp.replacement.plan_sizes import (
    WIDTH_NAMES,
    Heads,
    Share,
    Shares,
    counts_of,
    shares_of,
)

#: Descriptions of the two orders in messages, by whether a head's features lie together.
ORDERS = {
    True: "each head's query, key and value together (with shared keys: a head of keys after its "
    "queries, and then its values)",
    False: "all queries, then all keys, then all values",
}


@dataclass(frozen=True)
class Sizes:
    """The sizes around a matrix that may make queries, keys and values.

    Attributes:
        column: path of the matrix.
        out: number of its output features.
        rows: number of input features of what it feeds, by path.
        num_ranks: tensor-parallel degree.
    """

    column: str
    out: int
    rows: Mapping[str, int]
    num_ranks: int

    @property
    def width(self) -> int:
        """Returns the number of features of all queries."""
        return next(iter(self.rows.values()))

    @property
    def key_width(self) -> int:
        """Returns the number of features of all keys; 0 if sizes do not fit such a matrix."""
        num, rest = divmod(self.out - self.width, 2)
        fits = num > 0 and rest == 0 and self.width % num == 0 and len(set(self.rows.values())) == 1
        return num if fits else 0

    def heads(self, queries: int) -> Heads | None:
        """Returns the numbers of heads for a number of query heads, or None if it does not fit."""
        if self.key_width == 0 or queries < 1 or self.width % queries:
            return None
        keys, rest = divmod(self.key_width, self.width // queries)
        return Heads(queries, keys) if rest == 0 else None


@dataclass(frozen=True)
class Form:
    """A way to split a matrix of queries, keys and values.

    Attributes:
        heads: numbers of heads.
        by_head: whether the features of a head lie together, see `ORDERS`.
        shares: shares of the ranks, also in the matrix.
        num_packed: number of matrices in the column that are cut alike.
        units: heads of the matrix that each rank computes, in their order, by rank.
        unit: number of features of a head.
        attributes: values by rank of the attributes of the module that are replaced.
    """

    heads: Heads
    by_head: bool
    shares: Shares
    num_packed: int
    units: tuple[tuple[int, ...], ...]
    unit: int
    attributes: Mapping[str, tuple[int, ...]]

    def counts(self) -> list[tuple[int, tuple[int, ...]]]:
        """Returns the numbers that differ by rank: their value for all ranks, and by rank."""
        heads, shares, unit = self.heads, self.shares, self.unit
        own = tuple(unit * num for num in shares.queries)
        keys = tuple(unit * num for num in shares.keys)
        return [
            (heads.queries, shares.queries),
            (heads.keys, shares.keys),
            (heads.queries // heads.keys, shares.groups),
            (unit * heads.queries, own),
            (unit * heads.keys, keys),
            (
                unit * (heads.queries + 2 * heads.keys),
                tuple(q + 2 * k for q, k in zip(own, keys, strict=True)),
            ),
        ]


def form_of(sizes: Sizes, heads: Heads, by_head: bool, attributes: Mapping[str, int]) -> Form:
    """Returns the form of a matrix in one order.

    Args:
        sizes: sizes of the matrix and of what it feeds.
        heads: numbers of heads.
        by_head: order of the matrix, see `ORDERS`.
        attributes: numbers among the attributes of the module; those with known names count.

    Raises:
        CannotCut: there are fewer heads than ranks.
    """
    shares = shares_of({}, sizes.rows, heads, sizes.num_ranks)
    units = tuple(_units(heads, by_head, shares))
    unit = sizes.width // heads.queries
    share, num_packed = Share((), units, unit), 1
    if list(chain(*units)) == list(range(heads.queries + 2 * heads.keys)):
        share = Share(tuple(unit * len(own) for own in units), unit=unit)
    elif not by_head and heads.keys == heads.queries:
        share, num_packed = Share(tuple(unit * num for num in shares.queries), unit=unit), 3
    shares = replace(shares, columns={sizes.column: share})
    known = counts_of(attributes, heads, shares)
    if not by_head:
        known |= {
            name: tuple(unit * num for num in shares.queries)
            for name in WIDTH_NAMES
            if attributes.get(name) == sizes.width
        }
    return Form(heads, by_head, shares, num_packed, units, unit, known)


def _units(heads: Heads, by_head: bool, shares: Shares) -> Iterator[tuple[int, ...]]:
    """Yields the heads of the matrix that each rank computes, in their order."""
    num, per_key = heads.queries, heads.queries // heads.keys
    for rank, keys in enumerate(shares.key_heads):
        begin, each = sum(shares.queries[:rank]), shares.groups[rank]
        own = range(begin, begin + shares.queries[rank])
        if not by_head:
            yield (*own, *(num + key for key in keys), *(num + heads.keys + key for key in keys))
            continue
        units: list[int] = []
        for idx, key in enumerate(keys):
            first = key * (per_key + 2)
            units += [first + query % per_key for query in own[idx * each : (idx + 1) * each]]
            units += [first + per_key, first + per_key + 1]
        yield tuple(units)


def likely_heads(sizes: Sizes, attributes: Mapping[str, int]) -> list[int]:
    """Returns numbers of query heads that attributes of a module may mean, the likeliest first.

    Args:
        sizes: sizes of the matrix and of what it feeds.
        attributes: numbers among the attributes; each may be a number of heads or a size of one.
    """
    width, values = sizes.width, set(attributes.values())
    found = [width // n for n in attributes.values() if n > 0 and width % n == 0]
    found += [n for n in attributes.values() if n > 0]
    fitting = [n for n in dict.fromkeys(found) if sizes.heads(n) is not None]
    return sorted(fitting, key=lambda n: not {n, width // n} <= values)


def forms_of(
    sizes: Sizes,
    queries: Sequence[int],
    orders: Sequence[bool],
    attributes: Mapping[str, int],
    read: Mapping[str, int],
    num_guessed: int,
) -> list[Form]:
    """Returns the forms that a matrix may have, the likeliest first.

    Args:
        sizes: sizes of the matrix and of what it feeds.
        queries: possible numbers of query heads.
        orders: possible orders, see `ORDERS`.
        attributes: numbers among the attributes of the module; those with known names count.
        read: numbers among the attributes that code reads.
        num_guessed: number of these to replace beside those with known names.

    Raises:
        CannotCut: there are fewer heads than ranks.
    """
    fitting = [heads for heads in map(sizes.heads, queries) if heads is not None]
    enough = [heads for heads in fitting if heads.queries >= sizes.num_ranks]
    return [
        made
        for heads in enough or fitting
        for by_head in (orders if heads.keys > 1 else orders[-1:])  # they are the same for one key
        for made in _guessing(form_of(sizes, heads, by_head, attributes), read, num_guessed)
    ]


def _guessing(form: Form, read: Mapping[str, int], num: int) -> Iterator[Form]:
    """Yields a form with further attributes replaced, which may count something that differs."""
    counts = [
        (name, by_rank)
        for name, value in read.items()
        for whole, by_rank in form.counts()
        if name not in form.attributes and value == whole and set(by_rank) != {whole}
    ]
    for chosen in combinations(dict.fromkeys(counts), num):
        if len(dict(chosen)) == num:
            yield replace(form, attributes={**form.attributes, **dict(chosen)})
