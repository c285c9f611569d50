"""Encoders of PyTorch, which read the weights of their own parts, in a tensor-parallel run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.dist.pool import Pool
from tests.harness import train_step_of
from tests.reference.models import randomise_

WIDTH = 8


def make() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return randomise_(nn.Sequential(encoder, nn.Linear(WIDTH, 2 * WIDTH)), 3)


def use_marked(rank: int) -> dict[str, Any]:
    """Gradients and outputs of evaluation, each with those of one process, and classes."""
    import smp

    smp.init({"tensor_parallel_degree": 2, "ddp": True, "prescaled_batch": True})
    x = torch.randn(4, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    plain = make()
    plain(x).square().mean().backward()
    with smp.tensor_parallelism():
        network = make()
    model = smp.DistributedModel(network)
    train_step = train_step_of(model)
    train_step(x)
    grads = {name: p.grad for name, p in network[0].named_parameters()}
    model.eval()
    plain.eval()
    with torch.no_grad():
        outputs = model(x), plain(x)
    return {
        "grads": (grads, {name: p.grad for name, p in plain[0].named_parameters()}),
        "outputs": outputs,
        "classes": [type(child).__name__ for child in network],
    }


def test_an_encoder_of_pytorch_trains_and_evaluates_beside_split_modules(pool: Pool) -> None:
    for result in pool.run(2, use_marked):
        assert result["classes"] == ["TransformerEncoder", "DistributedLinear"]
        assert result["grads"][0]["layers.0.linear1.weight"].abs().max() > 0
        torch.testing.assert_close(*result["grads"])
        torch.testing.assert_close(*result["outputs"])
