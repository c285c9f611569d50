"""Operators draw the same for a batch as for its pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from smp.dropout.by_sample import Drawn, DrawsBySample

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[int], Tensor]] = {
    "randn": lambda n: torch.randn(n, 3),
    "uniform_": lambda n: torch.empty(n, 3).uniform_(2, 3),
    "rand_like": lambda n: torch.rand_like(torch.ones(n, 3)),
    "randint": lambda n: torch.randint(9, (n, 3)),
    "bernoulli": lambda n: torch.ones(n, 3).bernoulli(0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_samples_draw_the_same_in_a_batch_and_in_pieces(name: str) -> None:
    whole, pieces = Drawn(), Drawn()
    with DrawsBySample(range(4), whole, CPU):
        batch = DRAWS[name](4)
    parts = []
    for samples in (range(3), range(3, 4)):
        with DrawsBySample(samples, pieces, CPU):
            parts.append(DRAWS[name](len(samples)))
    assert torch.equal(batch, torch.cat(parts)) and pieces.is_like(whole, 2)
    assert not torch.equal(batch, batch.flip(0))


@pytest.mark.parametrize("name", DRAWS)
def test_one_number_stands_for_all_that_has_no_samples(name: str) -> None:
    drawn = Drawn()
    with DrawsBySample(range(4), drawn, CPU, alike=True):
        batch = DRAWS[name](7)
        scalar = torch.rand([])
    assert batch.unique().numel() == 1 and scalar.dim() == 0 and not drawn.shapes
    with DrawsBySample(range(1), drawn, CPU, alike=True):
        assert torch.equal(DRAWS[name](2), batch[:2])


def test_attention_whose_chance_of_dropout_is_not_given_draws_nothing() -> None:
    drawn, heads = Drawn(), torch.randn(4, 2, 3, 8)
    with DrawsBySample(range(4), drawn, CPU):
        F.scaled_dot_product_attention(heads, heads, heads, torch.zeros(3, 3))
    assert not drawn.shapes


def test_a_permutation_of_another_number_is_not_that_of_the_pieces() -> None:
    whole, pieces = Drawn(), Drawn()
    with DrawsBySample(range(4), whole, CPU, alike=True):
        torch.randperm(12)
    for _ in range(2):
        with DrawsBySample(range(2), pieces, CPU, alike=True):
            torch.randperm(6)
    assert not pieces.is_like(whole, 2)


def test_roundings_move_what_adds_up() -> None:
    x = torch.rand(5, 5) + 1
    x[0, 0] = torch.inf
    meta = torch.empty(5, 5, device="meta")
    with DrawsBySample(range(5), Drawn(), CPU, rounds=1):
        product, view, other = x @ torch.eye(5)[:, 1:], x.view(25), meta @ meta
    assert other.is_meta and torch.equal(view, x.flatten())
    share = (product[1:] / x[1:, 1:] - 1).abs().max()
    assert 0 < share < 4 * torch.finfo(torch.float32).eps
    assert torch.equal(product[0].isfinite(), (x @ torch.eye(5)[:, 1:])[0].isfinite())
