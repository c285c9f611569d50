"""What modules on other ranks put into containers among their arguments is there at the caller."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.reference import filled_arguments
from tests.reference.shared_state import Block, Stack, batch, train_plain

STEPS, MICROBATCHES = 3, 4


def train(
    rank: int, case: str, pp: int, config: dict[str, Any], checkpoints: bool = False
) -> dict[str, Any]:
    import smp

    smp.init({"pipeline_parallel_degree": pp, "microbatches": MICROBATCHES, **config})
    plain = filled_arguments.make(case)
    model = smp.DistributedModel(plain)
    if checkpoints:
        smp.set_activation_checkpointing(plain.blocks)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = model(x)
        model.backward(loss)
        return loss

    @smp.step
    def eval_step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)  # type: ignore[no-any-return]

    losses, grads = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses += [loss.item() for loss in train_step(batch(step)).outputs]
        grads.append(
            {
                name.removeprefix("module."): None if p.grad is None else p.grad.clone()
                for name, p in model.local_named_parameters()
            }
        )
        optimizer.step()
    model.eval()
    evaluated = [loss.item() for _ in range(2) for loss in eval_step(batch(9)).outputs]
    checked = model._engine.first_step.outcome
    calls = smp.metrics.server_stats()["remote_calls"]
    smp.shutdown()
    return {
        "losses": losses,
        "grads": grads,
        "evaluated": evaluated,
        "calls": calls,
        "checked": checked,
    }


def assert_equal_to_one_process(case: str, ranks: list[dict[str, Any]]) -> None:
    plain = filled_arguments.make(case)
    expected = train_plain(plain, STEPS, MICROBATCHES)
    with torch.no_grad():
        evaluated = [plain(part).item() for part in batch(9).chunk(MICROBATCHES)] * 2
    assert sum(rank["calls"] for rank in ranks) > 0, "nothing was remote"
    for rank in ranks:
        assert rank["grads"][0], "a rank has no parameters"
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert rank["evaluated"] == pytest.approx(evaluated, rel=1e-9)
        assert rank["checked"] == ranks[0]["checked"]
    assert ranks[0]["checked"].startswith("equal"), ranks[0]["checked"]
    for step, grads in enumerate(expected["grads"]):
        found = {name: g for rank in ranks for name, g in rank["grads"][step].items()}
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("case", filled_arguments.CASES)
def test_containers_are_filled_as_in_one_process(pool: Pool, case: str, pp: int) -> None:
    assert_equal_to_one_process(case, pool.run(pp, train, case, pp, {}))


@pytest.mark.parametrize("case", ["ReadByOthers", "FillsDict", "FillsNested"])
@pytest.mark.parametrize(
    "config",
    [
        {"pipeline": "simple"},
        {"pipeline": "zero_bubble"},
        {"pipeline": "virtual_interleaved", "virtual_stages": 2},
        {"static_mode": True},
    ],
    ids=lambda config: next(iter(config.values())),
)
def test_containers_are_filled_under_every_schedule(
    pool: Pool, case: str, config: dict[str, Any]
) -> None:
    assert_equal_to_one_process(case, pool.run(2, train, case, 2, config))


# A checkpoint follows no objects, no tensors that are written to, and no attributes of modules.
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
