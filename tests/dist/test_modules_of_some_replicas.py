"""A module that only some replicas of sharded parameters run is an error that names it."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Outcome, Pool
from tests.dist.streams import streamed
from tests.dist.test_sharded_gathering import SHARDED, WIDTH, Blocks, batch_of


class Seeing(Blocks):
    """Runs a tower where there are images: in front of the others, among them, or behind."""

    def __init__(self, place: int, sees: bool, dummy: bool) -> None:
        super().__init__()
        self.vision = nn.Linear(WIDTH, WIDTH)
        self.place, self.sees, self.dummy = place, sees, dummy

    def look(self, x: Tensor, place: int) -> Tensor:
        if place != self.place or not (self.sees or self.dummy):
            return x
        seen = self.vision(x if self.sees else torch.zeros(1, WIDTH, dtype=x.dtype))
        return x + (seen.mean() if self.sees else 0 * seen.sum())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(self.look(x, 0))
        for block in self.blocks:
            x = block(x)
        return self.look(self.head(self.look(x, 1)).expand(-1, WIDTH), 2)


def run_where_there_are_images(
    rank: int, place: int, trains: bool, on_device: bool, keys: dict[str, Any], dummy: bool = False
) -> None:
    import smp

    with streamed() if on_device else contextlib.nullcontext():
        smp.init({"ddp": True, "microbatches": 2, **keys})
        model = smp.DistributedModel(Seeing(place, rank == 0, dummy).double())

        @smp.step
        def step(x: Tensor) -> None:
            loss = model(x).pow(2).mean()
            if trains:
                model.backward(loss)

        with torch.set_grad_enabled(trains):
            for number in range(2):
                step(batch_of(rank, number))


WITHOUT_IMAGES = "(gathers the parameters of '[a-z0-9.]+'|has run all that it runs)"


def check_both_are_named(outcomes: list[Outcome]) -> None:
    """Checks that the first two ranks, which compare their calls, name both of them.

    A rank that has not reached its call receives the other rank's call.
    """
    kinds = [outcome.error for outcome in outcomes]
    assert "ValueError" in kinds[:2] and all(kinds)  # errors in a backward are RuntimeError
    for outcome in outcomes[:2]:
        text = outcome.message
        assert re.search(r"global_rank 0 \(pp 0 .*\) gathers the parameters of 'vision'", text)
        assert re.search(rf"global_rank [123] \(pp 0 .*\) {WITHOUT_IMAGES}", text)
        assert "loss = loss + 0 * module(dummy).sum()" in text


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("trains", [False, True], ids=["evaluates", "trains"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_module_that_one_rank_runs_is_named_with_that_of_the_others(
    pool: Pool, place: int, trains: bool, on_device: bool
) -> None:
    keys = {"sharded_data_parallel_degree": 2, **SHARDED}
    outcomes = pool.outcomes(2, run_where_there_are_images, place, trains, on_device, keys)
    check_both_are_named(outcomes)


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_of_four_ranks_two_are_named(pool: Pool, on_device: bool) -> None:
    keys = {"sharded_data_parallel_degree": 4, **SHARDED}
    check_both_are_named(pool.outcomes(4, run_where_there_are_images, 1, True, on_device, keys))


@pytest.mark.parametrize(
    ("keys", "dummy"),
    [
        ({"sharded_data_parallel_degree": 2, **SHARDED}, True),
        ({"shard_optimizer_state": True}, False),
    ],
    ids=["dummy", "sharded state"],
)
def test_what_the_error_advises_helps(pool: Pool, keys: dict[str, Any], dummy: bool) -> None:
    pool.run(2, run_where_there_are_images, 1, True, False, keys, dummy)
