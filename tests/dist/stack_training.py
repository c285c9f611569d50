"""Training of small stacks on several ranks, and its comparison with one process.

The models are those of `tests.reference.shared_state` and `filled_arguments`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import own_loss, train_step_of
from tests.reference.shared_state import batch

STEPS, MICROBATCHES = 3, 4


def train(
    plain: nn.Module, pp: int, config: dict[str, Any], checkpoints: bool
) -> tuple[Any, dict[str, Any]]:
    """Trains on this rank, from `smp.init` on.

    Returns:
        the wrapped model, and a dict with losses and each step's gradients.
    """
    import smp

    smp.init({"pipeline_parallel_degree": pp, "microbatches": MICROBATCHES, **config})
    model = smp.DistributedModel(plain)
    if checkpoints:
        smp.set_activation_checkpointing(plain.blocks)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step = train_step_of(model, own_loss)
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
    return model, {"losses": losses, "grads": grads}


def assert_trained_as_alone(ranks: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Losses and gradients of all ranks are those of one process."""
    for rank in ranks:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    for step, grads in enumerate(expected["grads"]):
        found = {name: g for rank in ranks for name, g in rank["grads"][step].items()}
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            assert (grad is None) == (found[name] is None), name
            if grad is not None:
                torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12, msg=name)


def assert_remote(ranks: list[dict[str, Any]]) -> None:
    """The training was one of several ranks."""
    assert sum(rank["calls"] for rank in ranks) > 0, "nothing was remote"
    assert all(rank["grads"][0] for rank in ranks), "a rank has no parameters"
