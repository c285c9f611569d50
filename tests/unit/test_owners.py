"""Owners of tensors: a balanced choice, with few elements to send, the same on all ranks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp.optim.owners import Candidate, choose_owners
from smp.tensor_parallel.parts import Part

#: Matrices of a block of a transformer with hidden size h, and its vectors.
HIDDEN = 64


def block(hidden: int) -> list[tuple[int, ...]]:
    matrices = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)]
    return [*matrices, (3 * hidden,), (4 * hidden,), *[(hidden,)] * 6]


def shared(shapes: list[tuple[int, ...]], num_ranks: int) -> list[Candidate]:
    """Candidates that all ranks hold in equal parts."""
    return [
        Candidate(
            shape, 4, tuple(Part.share(shape, r, num_ranks).flat_numel for r in range(num_ranks))
        )
        for shape in shapes
    ]


def loads(tensors: list[Candidate], owners: list[int], num_ranks: int) -> tuple[float, float]:
    """Largest shares of a rank of all costs and all bytes, relative to equal ones."""
    result = []
    for numbers in ([t.cost for t in tensors], [t.num_bytes for t in tensors]):
        sums = [0] * num_ranks
        for number, owner in zip(numbers, owners, strict=True):
            sums[owner] += number
        result.append(max(sums) * num_ranks / sum(numbers))
    return result[0], result[1]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_costs_and_bytes_are_balanced(num_ranks: int) -> None:
    tensors = shared(block(HIDDEN) * 12, num_ranks)
    owners = choose_owners(tensors, num_ranks)
    assert set(owners) == set(range(num_ranks))
    cost, size = loads(tensors, owners, num_ranks)
    assert cost <= 1.1 and size <= 1.1


def test_a_matrix_costs_more_than_a_vector_of_its_size() -> None:
    matrix, vector = Candidate((8, 8), 4, (32, 32)), Candidate((64,), 4, (32, 32))
    assert matrix.num_bytes == vector.num_bytes and matrix.cost == 8 * vector.cost
    assert Candidate((4, 2, 8), 4, (64,)).cost == Candidate((4, 16), 4, (64,)).cost
    # Bytes are equal, so that costs decide: two matrices are on different ranks.
    owners = choose_owners([matrix, vector, matrix, vector], 2)
    assert owners[0] != owners[2] and owners[1] != owners[3]


def test_the_rank_that_holds_a_tensor_gets_it_if_that_is_fair() -> None:
    held = [(64, 0), (0, 64), (0, 64), (64, 0)]
    tensors = [Candidate((8, 8), 4, each) for each in held]
    assert choose_owners(tensors, 2) == [0, 1, 1, 0]
    # One rank holds everything: the other one gets its share all the same.
    unfair = [Candidate((8, 8), 4, (64, 0))] * 4
    assert sorted(choose_owners(unfair, 2)) == [0, 0, 1, 1]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(0, 12),
)
def test_owners_stay(shapes: list[tuple[int, ...]], num_ranks: int, num_known: int) -> None:
    tensors = shared(shapes, num_ranks)
    first = choose_owners(tensors[:num_known], num_ranks)
    known = [
        Candidate(t.shape, t.itemsize, t.held, owner)
        for t, owner in itertools.zip_longest(tensors, first)
    ]
    owners = choose_owners(known, num_ranks)
    assert owners[: len(first)] == first
    assert all(0 <= owner < num_ranks for owner in owners)
