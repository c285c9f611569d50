"""Modules that share state besides arguments and results share it across ranks as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist import stack_training
from tests.dist.pool import Pool
from tests.dist.stack_training import (
    MICROBATCHES,
    STEPS,
    assert_remote,
    assert_trained_as_alone,
)
from tests.harness import own_loss, train_step_of
from tests.reference import shared_state


def train(
    rank: int, case: str, pp: int, config: dict[str, Any], checkpoints: bool = False
) -> dict[str, Any]:
    import smp

    plain = shared_state.make(case)
    class_of = {name: type(module) for name, module in plain.named_modules()}
    model, result = stack_training.train(plain, pp, config, checkpoints)
    state = model.state_dict()
    result["state"] = {name.removeprefix("module."): t.clone() for name, t in state.items()}
    result["calls"] = smp.metrics.server_stats()["remote_calls"]
    smp.shutdown()  # leaves the modules as they were
    assert {name: type(module) for name, module in plain.named_modules()} == class_of
    return result


@pytest.mark.sample(keep=6)
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("case", shared_state.CASES)
def test_modules_share_state_as_in_one_process(pool: Pool, case: str, pp: int) -> None:
    ranks: list[dict[str, Any]] = pool.run(pp, train, case, pp, {})
    assert_remote(ranks)
    assert_equal_to_one_process(case, ranks)


def assert_equal_to_one_process(case: str, ranks: list[dict[str, Any]]) -> None:
    expected = shared_state.train_alone(case, STEPS, MICROBATCHES)
    assert_trained_as_alone(ranks, expected)
    for rank in ranks:
        for name, value in rank["state"].items():
            torch.testing.assert_close(value, expected["state"][name], rtol=1e-9, atol=1e-12)


# State that checkpointed layers leave behind is made in a run without gradients. These cases carry
# tensors with gradients, and lists of numbers, from one checkpoint to the next, or into it
# (docs/limits.md).
NOT_CHECKPOINTED = (
    "StateOnSelf",
    "StateCleared",
    "LeftForSecondCall",
    "SharedList",
    "NotesEmptied",
)


@pytest.mark.sample(keep=9)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    "case", [case for case in shared_state.CASES if case not in NOT_CHECKPOINTED]
)
def test_checkpointed_modules_share_state(pool: Pool, case: str, pp: int) -> None:
    assert_equal_to_one_process(case, pool.run(pp, train, case, pp, {}, True))


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize(
    "case", ["StateOnSelf", "FeaturesOfRoot", "AuxByAttribute", "LeftForSecondCall"]
)
@pytest.mark.parametrize(
    "config",
    [
        {"pipeline": "simple"},
        {"pipeline": "zero_bubble"},
        {"pipeline": "virtual_interleaved", "virtual_stages": 2},
    ],
    ids=lambda config: next(iter(config.values())),
)
def test_state_is_shared_under_every_schedule(
    pool: Pool, case: str, config: dict[str, Any]
) -> None:
    assert_equal_to_one_process(case, pool.run(2, train, case, 2, config))


@pytest.mark.parametrize("pp", [1, 2])
def test_state_with_a_graph_from_one_checkpoint_to_the_next_is_refused(pool: Pool, pp: int) -> None:
    outcomes = pool.outcomes(pp, train, "StateOnSelf", pp, {}, True)
    assert all(outcome.error for outcome in outcomes)
    assert any("left by an earlier call" in outcome.message for outcome in outcomes)


def train_two(rank: int, first: str, second: str, config: dict[str, Any]) -> None:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, **config})
    models = [smp.DistributedModel(shared_state.make(case)) for case in (first, second)]

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = sum(model(x) for model in models)
        models[0].backward(loss)
        return loss

    train_step(shared_state.batch(0))


def test_a_second_model_that_needs_order_is_refused_where_microbatches_overlap(pool: Pool) -> None:
    outcomes = pool.outcomes(2, train_two, "AuxByAttribute", "FeaturesOfRoot", {})
    assert all("set active_microbatches=1" in outcome.message for outcome in outcomes)
    pool.run(2, train_two, "AuxByAttribute", "FeaturesOfRoot", {"active_microbatches": 1})


class ReadsWeight(nn.Module):
    """Computes with the weight of a child that it does not call, or that it calls with others."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "read":
            return (x @ self.second.weight + self.second(x)).square().mean()
        others = {name: torch.ones_like(p) for name, p in self.second.named_parameters()}
        return torch.func.functional_call(self.second, others, x).square().mean()


class Picky(nn.Module):
    """Computes with attributes that others write."""

    scale: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * (2.0 if self.scale is None else self.scale)


class WritesAway(nn.Module):
    """Writes an attribute of a child, and takes it back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), Picky()
        self.second.scale = 1.5
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.how == "deleted":
            del self.second.scale
        else:
            values = {"tensor": x.mean(), "number": 3.0, "None": None, "the same": 1.5}
            self.second.scale = values[self.how]
        x = self.second(x)
        self.second.scale = 1.5
        return x.square().mean()


def train_apart(rank: int, how: str, make: Any = ReadsWeight) -> None:
    import smp

    smp.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": 2,
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    plain = make(how)
    smp.set_partition(plain.second, 1)
    model = smp.DistributedModel(plain)
    train_step = train_step_of(model, own_loss)
    for _ in range(2):
        train_step(torch.ones(4, 6))


@pytest.mark.parametrize(
    "how, expected",
    [
        ("read", "parameter 'second.weight' has no values here: it lives on pp_rank 1"),
        ("functional_call", "parameter 'weight' has been replaced here"),
    ],
)
def test_parameters_of_another_rank_are_not_computed_with(
    pool: Pool, how: str, expected: str
) -> None:
    outcomes = pool.outcomes(2, train_apart, how, env={"SMP_CHECK_FIRST_STEP": "0"})
    assert all(outcome.error for outcome in outcomes)
    assert expected in outcomes[0].message and "[global_rank 0 | pp 0" in outcomes[0].message


@pytest.mark.parametrize(
    "how, verb",
    [("number", "changes"), ("tensor", "changes"), ("None", "changes"), ("deleted", "deletes")],
)
def test_attributes_of_another_rank_are_not_written_without_a_trace(
    pool: Pool, how: str, verb: str
) -> None:
    outcomes = pool.outcomes(2, train_apart, how, WritesAway, env={"SMP_CHECK_FIRST_STEP": "0"})
    expected = f"forward {verb} attribute 'scale' of module 'second', which lives on global_rank 1"
    assert all(outcome.error for outcome in outcomes)
    assert expected in outcomes[0].message and "[global_rank 0 | pp 0" in outcomes[0].message


def test_an_attribute_of_another_rank_may_be_given_the_value_it_has(pool: Pool) -> None:
    outcomes = pool.outcomes(
        2, train_apart, "the same", WritesAway, env={"SMP_CHECK_FIRST_STEP": "0"}
    )
    assert [outcome.error for outcome in outcomes] == [None, None]
