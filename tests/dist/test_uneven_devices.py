"""Devices of different speed and memory, against the plain script on the whole batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.planning.kinds import Kinds
from smp.planning.layout import Layout
from smp.planning.run_cuts import View
from smp.planning.search import Job, predict
from tests.dist.pool import Pool
from tests.harness import assert_near, train_step_of, wholes
from tests.made_up_hardware import MADE_UP

WIDTH, CLASSES, BATCH, STEPS = 8, 5, 12, 3
Config = dict[str, Any]
LAYOUTS: dict[str, tuple[int, Config]] = {
    "pipeline": (3, {"pipeline_parallel_degree": 3, "device_speeds": "1, 2, 1"}),
    "replicas": (2, {"device_speeds": "1, 3"}),
    "pipelines": (4, {"pipeline_parallel_degree": 2, "device_speeds": [1, 2, 2, 4]}),
    "sharded": (
        3,
        {
            "sharded_data_parallel_degree": 3,
            "sdp_gradient_clipping": 0.0,
            "device_speeds": [3, 1, 2],
        },
    ),
    "split": (4, {"tensor_parallel_degree": 2, "device_speeds": "1:2, 2:2"}),
    "split, one batch": (
        4,
        {"tensor_parallel_degree": 2, "prescaled_batch": True, "device_speeds": "1:2, 2:2"},
    ),
    "parts of sequences": (
        4,
        {"context_parallel_degree": 2, "device_speeds": "1:2, 2:2"},
    ),
}
IGNORED = -100


class Classifier(nn.Module):
    """Twelve layers and a head; the loss is a mean over labels, of which samples have 0 to 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)


def batch_of(step: int) -> dict[str, Tensor]:
    """Makes the samples of all replicas; their numbers of labels differ."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 4, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, CLASSES, (BATCH, 4), generator=generator)
    counts = torch.arange(BATCH) % 4 + 1
    return {"x": x, "labels": labels.masked_fill(torch.arange(4) >= counts[:, None], IGNORED)}


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(batch["x"], batch["labels"])
    return loss


def plain() -> dict[str, Tensor]:
    model = Classifier().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch_of(step)).backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def trained(rank: int, config: Config) -> tuple[dict[str, Tensor], list[int], list[int]]:
    import smp

    smp.init({"ddp": True, "microbatches": 2, **config})
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        net = Classifier().double()
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    @smp.step(weight=lambda batch: (batch["labels"] != IGNORED).sum())
    def train_step(batch: dict[str, Tensor]) -> None:
        model.backward(loss_of(model, batch))

    own = smp.batch_slice(BATCH)
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step({key: value[own] for key, value in batch_of(step).items()})
        optimizer.step()
    sizes = [cost.param_bytes for cost in smp.explain_partition().ranks]
    return wholes(model), [own.start, own.stop], sizes


SLICES = {
    "pipeline": [[0, 12]] * 3,
    "replicas": [[0, 3], [3, 12]],
    "pipelines": [[0, 4], [0, 4], [4, 12], [4, 12]],
    "sharded": [[0, 6], [6, 8], [8, 12]],
    "split": [[0, 2], [2, 4], [4, 8], [8, 12]],
    "split, one batch": [[0, 4], [0, 4], [4, 12], [4, 12]],
    "parts of sequences": [[0, 4], [0, 4], [4, 12], [4, 12]],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sample(keep=3)
def test_uneven_devices_train_like_the_plain_script(pool: Pool, name: str) -> None:
    num_ranks, config = LAYOUTS[name]
    results = pool.run(num_ranks, trained, config)
    assert [own for _, own, _ in results] == SLICES[name]
    assert_near([values for values, _, _ in results], plain(), 1e-11)
    sizes = results[0][2]
    if name == "pipeline":
        assert sizes[1] > 1.6 * max(sizes[0], sizes[2]), "the fast rank has more layers"


def refused(rank: int, config: Config, num_samples: int) -> str:
    import smp

    with pytest.raises(ValueError) as refusal:
        smp.init({"ddp": True, "microbatches": 2, **config})
        smp.batch_slice(num_samples)
    return str(refusal.value).rpartition("] ")[2]


@pytest.mark.parametrize(
    ("config", "num_samples", "words"),
    [
        ({"device_speeds": [1, 2, 1]}, 8, "has 3 speeds for 2 processes; give one speed for each"),
        ({"device_speeds": [1, 2]}, 1, "1 samples cannot be shared by 2 replicas"),
        ({"tensor_parallel_degree": 2}, 5, "cannot be divided by the 2 ranks of a tensor-parallel"),
        (
            {"pipeline_parallel_degree": 2, "partition_memory_limit": "1GB:3"},
            8,
            "has 3 sizes for 2 pipeline ranks",
        ),
    ],
)
def test_speeds_and_samples_that_do_not_fit_are_refused_by_all_ranks(
    pool: Pool, config: Config, num_samples: int, words: str
) -> None:
    texts = pool.run(2, refused, config, num_samples)
    assert texts[0] == texts[1] and words in texts[0]


def limited(rank: int, limits: str) -> tuple[str, list[int]]:
    import smp

    config = {"pipeline_parallel_degree": 3, "microbatches": 2, "partition_memory_limit": limits}
    smp.init({"ddp": True, **config})
    model = smp.DistributedModel(nn.Sequential(*(nn.Linear(128, 128) for _ in range(12))))
    try:
        train_step_of(model)(torch.ones(8, 128))
    except ValueError as error:
        return str(error).rpartition("] ")[2], []
    return "", [cost.memory_bytes for cost in smp.explain_partition().ranks]


def test_each_rank_keeps_its_own_memory_limit(pool: Pool) -> None:
    _, free = pool.run(3, limited, "9MB:3")[0]
    assert free[1] > 700_000
    _, held = pool.run(3, limited, "9MB, 700kB, 9MB")[0]
    assert 0 < held[1] <= 700_000 and sum(held) == pytest.approx(sum(free), rel=0.1)
    (text, _), (other, _), _ = pool.run(3, limited, "1MB, 700kB, 1MB")
    assert text == other and "the model does not fit" in text and "pp_rank" in text


SLOW = replace(MADE_UP, name="slow", at_once=3)


def stack() -> nn.Module:
    return nn.Sequential(*(nn.Linear(128, 128) for _ in range(12)))


def sizes_of_run(rank: int, config: Config) -> list[int]:
    import smp

    smp.init(config)
    model = smp.DistributedModel(stack())
    train_step_of(model)(torch.ones(8, 128))
    return [cost.param_bytes for cost in smp.explain_partition().ranks]


@pytest.mark.parametrize("memory_bytes", [10**9, 1_500_000])
def test_a_run_has_the_partition_that_was_planned_for_its_devices(
    pool: Pool, memory_bytes: int
) -> None:
    fast = replace(SLOW, flops={"fp32": 2e10}, memory_bytes=memory_bytes)
    devices = Kinds((SLOW, fast, SLOW), (1, 1, 1), (1.0, 2.0, 1.0))
    with torch.device("meta"):
        view = View.of(stack(), ((torch.ones(1, 128),), {}), SLOW, "fp32")
    job = Job(view, SLOW, 3, 3, SLOW.memory_bytes, 8, "fp32", kinds=devices)
    plan = predict(job, Layout(pp=3, microbatch=2, microbatches=4, active=4))
    planned = [0] * 3
    for stage in plan.stages:
        planned[stage.rank] += 4 * sum(part.elements for part in stage.parts)
    config = plan.layout.config()
    assert ("partition_memory_limit" in config) == (memory_bytes < SLOW.memory_bytes)
    layer = 4 * (128 * 128 + 128)
    assert (planned[1] == 6 * layer) == (memory_bytes == SLOW.memory_bytes)
    assert pool.run(3, sizes_of_run, config)[0] == planned
