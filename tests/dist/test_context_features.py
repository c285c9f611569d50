"""Blocks in parts of sequences beside checkpointing, sharding, precision and dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.context_training import ContextRun, calls_of, check_runs
from tests.dist.pool import Pool

SHARDED = (("sharded_data_parallel_degree", 2), ("sdp_param_persistence_threshold", 0))
FEATURES = {
    "checkpoints": ContextRun("sliding", checkpointed=True),
    "sharded": ContextRun("causal", config=(*SHARDED, ("sdp_gradient_clipping", 1e9))),
    "sharded, small ones whole": ContextRun(
        "causal",
        config=(("sharded_data_parallel_degree", 2), ("sdp_gradient_clipping", 1e9)),
    ),
    "checkpoints of cross attention": ContextRun("cross", checkpointed=True),
    "offloaded checkpoints": ContextRun(
        "causal", checkpointed=True, config=(("offload_activations", True),)
    ),
    "sharded checkpoints": ContextRun(
        "grouped heads", checkpointed=True, config=(*SHARDED, ("sdp_gradient_clipping", 1e9))
    ),
    "sharded optimizer": ContextRun("packed", config=(("shard_optimizer_state", True),)),
    "bf16": ContextRun("causal", config=(("bf16", True),)),
    "fp16": ContextRun("sliding", config=(("fp16", True),)),
}


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("feature", FEATURES)
def test_parts_beside_a_feature_train_like_one_process(pool: Pool, feature: str) -> None:
    run = FEATURES[feature]
    (record,) = check_runs(pool, [run])
    for calls in record.blocks.values():
        assert calls.in_parts >= 6 and calls.problems == [], f"{run}: {calls}"


# ---- dropout


class DroppingBlock(nn.Module):
    """Drops tokens' features; what is left shows the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.weight = nn.Parameter(torch.ones(16, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x * self.weight)


class DroppingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DroppingBlock()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * 1


def drop(rank: int, checkpointed: bool) -> tuple[list[Tensor], list[Tensor], Tensor, int]:
    """Returns results and gradients of two steps, and the state of the generator after them."""
    import smp

    smp.init({"context_parallel_degree": 2, "ddp": True})
    torch.manual_seed(5)
    net = DroppingNet()
    model: Any = smp.DistributedModel(net)
    if checkpointed:
        smp.set_activation_checkpointing(net.blocks[0])
    results, grads = [], []

    @smp.step
    def step(x: Tensor) -> Tensor:
        result = model(x)
        model.backward((result * 1).sum())
        return result * 1

    for _ in range(2):
        results.append(step(torch.ones(2, 64, 16, dtype=torch.float64)).outputs[0].detach())
        grads.append(net.blocks[0].weight.grad.clone())
        model.zero_grad()
    num_cut = sum(calls.in_parts for calls in calls_of(model).values())
    return results, grads, torch.random.get_rng_state(), num_cut


@pytest.mark.parametrize("checkpointed", [True, False])
def test_parts_drop_other_elements_and_runs_again_the_same(pool: Pool, checkpointed: bool) -> None:
    (results, grads, state, num_cut), other = pool.run(2, drop, checkpointed)
    assert num_cut == 2
    assert all(torch.equal(a, b) for a, b in zip(results, other[0], strict=True))
    assert torch.equal(state, other[2])  # generators of ranks are equal after the steps
    assert not torch.equal(results[0], results[1])
    for result, grad in zip(results, grads, strict=True):
        kept = result != 0
        assert abs(kept.double().mean() - 0.5) < 0.06
        first, second = kept[:, :32], kept[:, 32:]
        assert 0.4 < (first == second).double().mean() < 0.6  # 1 if ranks drop alike
        # With a weight of ones, its gradient is the sum of the results: the same mask again.
        torch.testing.assert_close(grad, result.sum((0, 1)))
