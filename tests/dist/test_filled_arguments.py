"""Callers see the values that modules on other ranks put into containers among their arguments."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.observe.verification.first_step import outcome_of
from tests.dist import stack_training
from tests.dist.pool import Pool
from tests.dist.stack_training import (
    MICROBATCHES,
    STEPS,
    assert_remote,
    assert_trained_as_alone,
)
from tests.harness import own_loss, train_step_of
from tests.reference import filled_arguments
from tests.reference.shared_state import Block, Stack, batch, train_plain


def train(
    rank: int, case: str, pp: int, config: dict[str, Any], checkpoints: bool = False
) -> dict[str, Any]:
    import smp

    model, result = stack_training.train(filled_arguments.make(case), pp, config, checkpoints)

    @smp.step
    def eval_step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    model.eval()
    result["evaluated"] = [loss.item() for _ in range(2) for loss in eval_step(batch(9)).outputs]
    result["checked"] = outcome_of(model)
    result["calls"] = smp.metrics.server_stats()["remote_calls"]
    smp.shutdown()
    return result


def assert_equal_to_one_process(case: str, ranks: list[dict[str, Any]]) -> None:
    plain = filled_arguments.make(case)
    expected = train_plain(plain, STEPS, MICROBATCHES)
    with torch.no_grad():
        evaluated = [plain(part).item() for part in batch(9).chunk(MICROBATCHES)] * 2
    assert_remote(ranks)
    assert_trained_as_alone(ranks, expected)
    for rank in ranks:
        assert rank["evaluated"] == pytest.approx(evaluated, rel=1e-9)
        assert rank["checked"] == ranks[0]["checked"]
    assert ranks[0]["checked"].startswith("equal"), ranks[0]["checked"]


@pytest.mark.sample(keep=6)
@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("case", filled_arguments.CASES)
def test_containers_are_filled_as_in_one_process(pool: Pool, case: str, pp: int) -> None:
    assert_equal_to_one_process(case, pool.run(pp, train, case, pp, {}))


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("case", ["ReadByOthers", "FillsDict", "FillsNested"])
@pytest.mark.parametrize(
    "config",
    [
        {"pipeline": "simple"},
        {"pipeline": "zero_bubble"},
        {"pipeline": "virtual_interleaved", "virtual_stages": 2},
    ],
    ids=lambda config: next(iter(config.values())),
)
def test_containers_are_filled_under_every_schedule(
    pool: Pool, case: str, config: dict[str, Any]
) -> None:
    assert_equal_to_one_process(case, pool.run(2, train, case, 2, config))


# A checkpoint follows no objects, no tensors that are written to, and no attributes of modules.
@pytest.mark.sample(keep=7)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    "case",
    sorted(filled_arguments.CASES.keys() - {"FillsObjects", "TensorsInPlace", "KeptContainers"}),
)
def test_checkpoints_fill_containers_once(pool: Pool, case: str, pp: int) -> None:
    ranks = pool.run(pp, train, case, pp, {}, True)
    if pp == 1:
        for rank in ranks:
            rank["calls"], rank["checked"] = 1, "equal"
    assert_equal_to_one_process(case, ranks)


# ---- containers of the step function


class FillsItsOwn(Stack):
    """Layers fill a list that the step function has made."""

    block = filled_arguments.ListBlock

    def forward(self, x: Tensor, out: list[Tensor], *, more: dict[str, Any]) -> Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = block(x, out)
        more["last"] = out[-1]
        more["given"] = x.dtype
        return (x * x).mean()


def train_with_list(rank: int, pp: int, config: dict[str, Any]) -> Any:
    import smp

    smp.init({"pipeline_parallel_degree": pp, "microbatches": 2, **config})
    torch.manual_seed(0)
    model = smp.DistributedModel(FillsItsOwn())

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        out: list[Tensor] = []
        more: dict[str, Any] = {}
        loss = model(x, out, more=more)
        assert len(out) == 4 and torch.equal(more["last"], out[-1])
        assert out[0].dtype == more["given"] == torch.float32  # sums with the argument are, too
        loss = loss + sum(hidden.abs().mean() for hidden in out)
        model.backward(loss)
        return loss

    losses = [loss.item() for loss in train_step(batch(0).float()).outputs]
    grads = {n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None}
    return losses, grads


@pytest.mark.parametrize("config", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_containers_of_the_step_function_are_filled_on_all_ranks(
    pool: Pool, config: dict[str, Any]
) -> None:
    ((losses, grads),) = pool.run(1, train_with_list, 1, config)
    ranks = pool.run(2, train_with_list, 2, config)
    tolerance = 2e-2 if config else 1e-5
    for rank_losses, rank_grads in ranks:
        assert rank_losses == pytest.approx(losses, rel=tolerance)
        for name, grad in rank_grads.items():
            torch.testing.assert_close(grad, grads[name], rtol=tolerance, atol=tolerance)
    assert {name for _, found in ranks for name in found} == grads.keys()


# ---- refused


class Counting(Block):
    """Changes what cannot be followed."""

    def forward(self, x: Tensor, counts: Counter[str]) -> Tensor:  # type: ignore[override]
        counts["calls"] += 1
        return super().forward(x)


class ChangesCounter(Stack):
    block = Counting

    def forward(self, x: Tensor) -> Tensor:
        counts: Counter[str] = Counter()
        for block in self.blocks:
            x = block(x, counts)
        return (x * x).mean()


class Mixing(Stack):
    """Passes the same dictionary in all microbatches."""

    block = filled_arguments.DictBlock
    shared: dict[str, Any] = {"count": 0}

    def forward(self, x: Tensor) -> Tensor:
        import smp

        shared = {"count": 0} if smp.is_tracing() else self.shared
        shared["x"] = x
        for i, block in enumerate(self.blocks):
            block(shared, name=f"mean{i}")
        return (shared["x"] ** 2).mean()


def train_refused(rank: int, kind: type[nn.Module], config: dict[str, Any]) -> None:
    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, **config})
    model = smp.DistributedModel(kind())
    train_step = train_step_of(model, own_loss)
    train_step(batch(0).float())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ChangesCounter, "module 'blocks.2' changed an object among its arguments"),
        # The error depends on which comes first: a dictionary filled in both microbatches, or an
        # item of the other microbatch.
        (Mixing, "they would mix. Make a new one|on another rank is an argument in microbatch"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    pool: Pool, kind: type[nn.Module], expected: str
) -> None:
    outcomes = pool.outcomes(2, train_refused, kind, {}, env={"SMP_CHECK_FIRST_STEP": "0"})
    assert all(outcome.error for outcome in outcomes)
    assert any(re.search(expected, outcome.message) for outcome in outcomes), outcomes[0].message
    assert "[global_rank" in outcomes[0].message
