"""Vision models are split by plans of ours, and train as the plain script on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import smp
from smp.tensor_parallel import sharding
from tests.dist.pool import Pool
from tests.harness import labelled_loss, train_step_of, wholes

SAMPLES, STEPS, CLASSES = 8, 3, 5
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48,
    "image_size": 16, "patch_size": 8, "num_labels": CLASSES,
}  # fmt: skip
FAMILIES = {
    "vit": ("ViTForImageClassification", "ViTConfig", {}),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {}),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {"mlp_ratio": 2}),
}


def build(name: str) -> nn.Module:
    model, config, changes = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**SIZES | changes))
    return made.double().train()  # type: ignore[no-any-return]


def batch_of(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "pixel_values": torch.randn(SAMPLES, 3, 16, 16, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
    }


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(rank: int, name: str, config: dict[str, Any]) -> dict[str, Any]:
    smp.init({"ddp": True, "microbatches": 2, **config})
    with smp.tensor_parallelism():
        made = build(name)
    model = smp.DistributedModel(made)
    optimizer = smp.DistributedOptimizer(sgd(model))
    step = train_step_of(model, labelled_loss)
    prescaled = config.get("prescaled_batch", False)
    own = (smp.rdp_rank, smp.rdp_size) if prescaled else (smp.dp_rank, smp.dp_size)
    losses = []
    for number in range(STEPS):
        batch = {key: value[own[0]() :: own[1]()] for key, value in batch_of(number).items()}
        losses.append(float(step(batch).reduce_mean()))
        optimizer.step()
        optimizer.zero_grad()
    split = [p for p in model.local_parameters() if sharding.interval_of(p) is not None]
    every = smp.allgather(losses, smp.CommGroup.DP_GROUP)
    return {
        "losses": [sum(values) / len(every) for values in zip(*every, strict=True)],
        "state": wholes(model),
        "num_split": len(split),
    }


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize(
    ("name", "config", "num_ranks"),
    [
        ("vit", {"tensor_parallel_degree": 2, "prescaled_batch": True}, 2),
        ("dinov2", {"tensor_parallel_degree": 2}, 2),
        ("vit", {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}, 4),
        ("deit", {"tensor_parallel_degree": 2, "prescaled_batch": True}, 4),
        ("vit", {"tensor_parallel_degree": 4}, 4),
    ],
    ids=str,
)
def test_vision_models_train_as_in_one_process(
    pool: Pool, name: str, config: dict[str, Any], num_ranks: int
) -> None:
    model = build(name)
    optimizer, losses = sgd(model), []
    for number in range(STEPS):
        loss = labelled_loss(model, batch_of(number))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    layers = SIZES["num_hidden_layers"] // config.get("pipeline_parallel_degree", 1)
    for record in pool.run(num_ranks, train, name, config):
        assert record["num_split"] >= 10 * (layers - 1), "weights and biases of six layers"
        assert record["losses"] == pytest.approx(losses, rel=1e-10)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(record["state"][key], value, rtol=0, atol=1e-10)
