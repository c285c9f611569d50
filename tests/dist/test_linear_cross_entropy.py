"""`smp.nn.functional.linear_cross_entropy` with a vocabulary that is split over ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import smp
from smp.nn.functional import linear_cross_entropy
from smp.tensor_parallel import regions, sharding
from tests.dist.pool import Pool, RankFailure
from tests.reference import linear_cross_entropy as plain
from tests.reference.linear_cross_entropy import options_of, problem

#: not a multiple of 2 or 4
VOCABULARY, SHAPE = 31, (3, 5)
OPTIONS = ("label_smoothing", "z_loss", "class_weights", "token_weights")
SETS = [names for num in range(5) for names in itertools.combinations(OPTIONS, num)]
REDUCTIONS = ("mean", "sum", "none")


def given() -> dict[str, Any]:
    return problem(*SHAPE, vocabulary=VOCABULARY, with_bias=True)


def upstream(loss: Tensor) -> Tensor:
    """Returns gradients that are not the same for all tokens."""
    return torch.linspace(0.5, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)


def whole(**options: Any) -> dict[str, Tensor]:
    values = given()
    loss = plain.linear_cross_entropy(**values, **options)
    loss.backward(upstream(loss))
    return {"loss": loss.detach(), **{k: v.grad for k, v in values.items() if k != "labels"}}


def split_losses(rank: int, size: int) -> list[dict[str, Tensor]]:
    """Computes losses of all options on a part of the vocabulary."""
    smp.init({"tensor_parallel_degree": size, "ddp": True})
    sizes = sharding.split(VOCABULARY)
    begin = sharding.begin_of(sizes)
    found = []
    for names, reduction, recompute in itertools.product(SETS, REDUCTIONS, (False, True)):
        values = given()
        leaves = {"hidden": values["hidden"].detach().requires_grad_()}
        for name in ("weight", "bias"):
            part = values[name].detach().narrow(0, begin, sizes[rank]).clone()
            leaves[name] = part.requires_grad_()
        loss = linear_cross_entropy(
            regions.copy(leaves["hidden"]),
            leaves["weight"],
            values["labels"],
            bias=leaves["bias"],
            **options_of(names, SHAPE, VOCABULARY),
            reduction=reduction,
            recompute=recompute,
            begin=begin,
            vocab_size=VOCABULARY,
            chunk_bytes=4 * 8 * VOCABULARY // size,
        )
        loss.backward(upstream(loss))
        found.append({"loss": loss.detach(), **{k: v.grad for k, v in leaves.items()}})
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_losses_of_a_split_vocabulary_equal_whole_logits(pool: Pool, size: int) -> None:
    ranks = pool.run(size, split_losses, size)
    cases = itertools.product(SETS, REDUCTIONS, (False, True))
    for number, (names, reduction, _) in enumerate(cases):
        want = whole(**options_of(names, SHAPE, VOCABULARY), reduction=reduction)
        assert float(want["weight"].abs().max()) > 0
        own = [found[number] for found in ranks]
        for name in ("loss", "hidden"):
            for one in own:
                torch.testing.assert_close(one[name], want[name], rtol=1e-12, atol=1e-13)
        for name in ("weight", "bias"):
            joined = torch.cat([one[name] for one in own])
            torch.testing.assert_close(joined, want[name], rtol=1e-12, atol=1e-13)


def far_apart(rank: int) -> float:
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    # The exponentials of rank 0 are 0 beside those of rank 1, and the target's logit is there.
    weight = torch.full((2, 1), -400.0 if rank == 0 else 400.0)
    loss = linear_cross_entropy(
        torch.ones(1, 1), weight, torch.tensor([1]), begin=2 * rank, vocab_size=4
    )
    return float(loss)


def test_logits_of_ranks_may_be_far_apart(pool: Pool) -> None:
    want = float(torch.log(torch.tensor(2.0))) + 800
    assert pool.run(2, far_apart) == pytest.approx([want, want])


def out_of_bounds(rank: int) -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    linear_cross_entropy(
        torch.ones(1, 1), torch.ones(2, 1), torch.tensor([0]), begin=3 * rank, vocab_size=4
    )


def test_a_part_outside_of_the_vocabulary_is_an_error(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="entries 3 to 5 are not within the vocabulary of 4"):
        pool.run(2, out_of_bounds)
