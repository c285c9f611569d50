"""Ranks that read one batch compute the same outside of split layers, with dropout too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.dist.split_training import SplitRun, init_split
from tests.dist.steps import make_optimizer
from tests.harness import own_loss, train_step_of
from tests.reference.split_modules import float64

STEPS = 3
VOCABULARY = 17


class Classifier(nn.Module):
    """Plain dropout before and behind layers that are split."""

    def __init__(self) -> None:
        super().__init__()
        import smp

        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.before = nn.Dropout(0.3)
        self.layers = smp.nn.DistributedTransformer(
            num_layers=3,
            num_attention_heads=4,
            attention_head_size=4,
            hidden_size=12,
            intermediate_size=10,
            attention_dropout_prob=0.2,
            hidden_dropout_prob=0.2,
        )
        self.behind = nn.Dropout(0.3)
        self.head = nn.Linear(12, 5)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.layers((self.before(self.embedding(ids)), None))
        logits = self.head(self.behind(hidden[0] if isinstance(hidden, tuple) else hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten() % 5)


def train(
    rank: int, run: SplitRun, shares_samples: bool
) -> tuple[tuple[int, int], list[float], dict[str, Tensor]]:
    """(batch, stage), the losses, and what the rank holds whole after some steps."""
    import smp
    from smp.tensor_parallel import sharding

    init_split(run)
    torch.manual_seed(100 + rank)  # as scripts do
    with float64():
        model = smp.DistributedModel(Classifier())
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
    train_step = train_step_of(model, own_loss)
    losses: list[float] = []
    batch_idx = smp.rdp_rank() if run.prescaled else smp.dp_rank()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step if shares_samples else 10 * batch_idx + step)
        ids = torch.randint(VOCABULARY, (4, 6), generator=generator)
        losses += [loss.item() for loss in train_step(ids).outputs]
        optimizer.step()
        optimizer.zero_grad()
    held = dict(model.local_named_parameters())
    whole = {n: p.detach().clone() for n, p in held.items() if sharding.interval_of(p) is None}
    assert len(whole) < len(held), "nothing is split"
    place = (batch_idx, smp.pp_rank())
    smp.shutdown()
    return place, losses, whole


def pairs(records: list[Any]) -> list[tuple[Any, Any]]:
    """Ranks of one tensor-parallel group."""
    of_place: dict[Any, list[Any]] = {}
    for place, *rest in records:
        of_place.setdefault(place, []).append(rest)
    return [pair for group in of_place.values() for pair in itertools.pairwise(group)]


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("optimize", ["memory", "speed"])
@pytest.mark.parametrize("layout", [(1, 2, 1), (2, 2, 1), (1, 2, 2)], ids=str)
def test_peers_with_one_batch_stay_equal(
    pool: Pool, layout: tuple[int, int, int], optimize: str
) -> None:
    run = SplitRun("own", *layout, optimize=optimize, prescaled=True)
    records = pool.run(run.world_size, train, run, False)
    found = pairs(records)
    assert len(found) == run.world_size // run.tp
    for (losses, whole), (other_losses, other_whole) in found:
        assert losses == other_losses
        assert whole.keys() == other_whole.keys()
        for name, value in whole.items():
            assert torch.equal(value, other_whole[name]), name


@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_ranks_with_batches_of_their_own_draw_their_own(
    pool: Pool, layout: tuple[int, int, int]
) -> None:
    """The same samples by chance, yet other masks."""
    prescaled = layout == (1, 2, 2)
    run = SplitRun("own", *layout, prescaled=prescaled)
    records = pool.run(run.world_size, train, run, True)
    losses = {place[0]: losses[0] for place, losses, _ in records}
    assert len(losses) == run.num_batches
    assert len(set(losses.values())) == run.num_batches
