"""Updates during the backward: training in layouts, gradients that exist at a time, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure
from tests.dist.processes import REPO, run_to_the_end
from tests.harness import (
    LAYOUTS,
    WIDTH,
    Config,
    Layers,
    assert_near,
    own_samples,
    samples_of,
    square_loss,
    train_step_of,
    wholes,
)

SCRIPT = REPO / "tests" / "dist" / "scripts" / "gradient_memory.py"
STEPS, LR = 4, 0.01
BUCKET_BYTES = 1024  # a matrix and its bias have 576
ON: Config = {"update_in_backward": True, "microbatches": 1}
OPTIMIZERS = ("FusedAdam", "AdamW", "SGD")


class Tied(Layers):
    """Layers of which the first two share a matrix; some batches have another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].weight = self.layers[0].weight
        self.rare = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        is_rare = bool(x[0, 2] > 0)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x + torch.tanh(self.rare(x)) if is_rare else x


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    import smp

    if name == "FusedAdam":
        return smp.optimizers.FusedAdam(parameters, lr=LR, weight_decay=0.1)
    if name == "AdamW":
        return torch.optim.AdamW(parameters, lr=LR, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=LR, momentum=0.9)


def model_of(config: Config, net: Layers) -> Any:
    """Starts smp and wraps a model in small buckets; layers are placed as in `tests.harness`."""
    import smp

    smp.init({"ddp": True, "auto_partition": False, **config})
    if smp.tp_size() > 1:
        for layer in net.layers[1:3]:
            smp.set_tensor_parallelism(layer)
    model = smp.DistributedModel(net, bucket_cap_mb=BUCKET_BYTES / 2**20)
    if smp.pp_size() > 1:
        for layer in net.layers[2:]:
            smp.set_partition(layer, 1)
    return model


def train(
    rank: int, config: Config, name: str, net: Layers, checkpoints: bool = False
) -> dict[str, Any]:
    """Trains, and returns losses, values, and the bytes and the number of buckets.

    Args:
        rank: position of the process, which the pool gives.
        config: keys of the configuration.
        name: optimizer.
        net: model.
        checkpoints: whether each layer is computed again in the backward.
    """
    import smp
    from smp.model import engine_of

    model = model_of(config, net if config.get("bf16") else net.double())
    for layer in net.layers if checkpoints else ():
        smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(optimizer_of(name, model.parameters()))
    train_step = train_step_of(model)
    losses, left = [], 0
    for step in range(STEPS):
        x = samples_of(step) if smp.tp_size() > 1 else own_samples(step)
        losses.append(float(train_step(x).reduce_mean()))
        left += sum(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        optimizer.step()
        optimizer.zero_grad()
    reducers = engine_of(model).gradients.reducers
    values = wholes(model)
    found = {
        "losses": losses,
        "values": values,
        "left": left,
        "peaks": [reducer.stats.peak_flat_bytes for reducer in reducers],
        "early": sum(reducer.stats.num_early_buckets for reducer in reducers),
        "buckets": sum(reducer.num_buckets for reducer in reducers),
        "state": len(optimizer.state),
    }
    smp.shutdown()
    return found


def plain(name: str, net: Layers) -> dict[str, Tensor]:
    """Trains in one process on the whole batch."""
    net.double()
    optimizer = optimizer_of("AdamW" if name == "FusedAdam" else name, net.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        square_loss(net, samples_of(step)).backward()
        optimizer.step()
    return {key: value.detach() for key, value in net.state_dict().items()}


@pytest.mark.sample(keep=5)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "layout", ["one", "replicas", "pipeline", "split, one batch", "bf16", "pipeline of replicas"]
)
def test_training_is_that_of_one_process(pool: Pool, layout: str, name: str) -> None:
    """Compares with the same layout without the key as well, bit for bit."""
    ranks, config = LAYOUTS[layout]
    config = {**config, "microbatches": 1}
    ours = pool.run(ranks, train, {**config, **ON}, name, Layers())
    theirs = pool.run(ranks, train, config, name, Layers())
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == other["losses"]
        assert mine["left"] == 0 < other["left"]
        assert mine["early"] > 0 and mine["buckets"] > 1
        assert mine["state"] == other["state"] > 0
        assert 0 < max(mine["peaks"]) <= 2 * BUCKET_BYTES
        for key, value in other["values"].items():
            assert torch.equal(mine["values"][key], value), key
    if "bf16" not in config:
        assert_near([mine["values"] for mine in ours], plain(name, Layers()))


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("layout", ["replicas", "pipeline", "one"])
def test_parameters_of_some_ranks_and_steps_are_updated_where_one_process_does(
    pool: Pool, layout: str, checkpoints: bool
) -> None:
    """Shares a matrix, uses a layer for some batches only, and another one never.

    With checkpoints each of the two layers that share a matrix gives it a gradient of its own.
    """
    ranks, config = LAYOUTS[layout]
    config = {**config, "microbatches": 1}
    ours = pool.run(ranks, train, {**config, **ON}, "AdamW", Tied(), checkpoints)
    theirs = pool.run(ranks, train, config, "AdamW", Tied(), checkpoints)
    first = Tied().double().state_dict()
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["losses"] == other["losses"]
        for key, value in other["values"].items():
            assert torch.equal(mine["values"][key], value), key
        assert torch.equal(mine["values"]["never.weight"], first["never.weight"])
        assert not torch.equal(mine["values"]["rare.weight"], first["rare.weight"])


def test_rare_layer_is_used_by_one_of_two_replicas() -> None:
    halves = [samples_of(step).chunk(2) for step in range(STEPS)]
    uses = [sum(bool(half[0, 2] > 0) for half in pair) for pair in halves]
    assert 1 in uses and 0 in uses, uses


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_never_all_alive(metered_pool: Pool, ranks: int, tmp_path: Path) -> None:
    run_to_the_end(metered_pool, SCRIPT, ranks, [str(tmp_path)])
    for rank in range(ranks):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        print(told)
        whole, bucket = told["gradient_bytes"], told["bucket_bytes"]
        assert whole > 8 * bucket
        # Beside buckets one gradient is still in the hands of autograd.
        assert told["peak"]["False"] - told["peak"]["True"] > whole - 4 * bucket
        assert told["peak"]["True"] < 4 * bucket


def twice(rank: int) -> None:
    import smp

    model = model_of(ON, Layers().double())
    _kept = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR))
    train_step = train_step_of(model)
    train_step(samples_of(0))
    train_step(samples_of(0))


def uncovered(rank: int) -> None:
    import smp

    net = Layers().double()
    model = model_of(ON, net)
    kept = [p for name, p in net.named_parameters() if name != "layers.2.bias"]
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(kept, lr=LR))
    train_step_of(model)(samples_of(0))
    optimizer.step()


def clipped(rank: int) -> None:
    import smp

    model = model_of(ON, Layers().double())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR))
    train_step_of(model)(samples_of(0))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


class Torn(Layers):
    """Raises in the backward of its first layer, when later ones were updated."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        x.register_hook(_raise)
        return super().forward(x)


def _raise(grad: Tensor) -> None:
    raise ValueError("the script's own")


def torn(rank: int) -> None:
    import smp

    model = model_of(ON, Torn().double())
    _kept = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR))
    train_step = train_step_of(model)
    with pytest.raises(ValueError, match="the script's own"):
        train_step(samples_of(0))
    train_step(samples_of(0))


class Repeated(Layers):
    """Calls a layer twice, each time computed again in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = x + self.layers[0](x)
        for layer in (self.layers[1], self.layers[1], self.layers[2], self.layers[3]):
            x = x + checkpoint(layer, x, use_reentrant=True)
        return x


def repeated(rank: int) -> None:
    import smp

    model = model_of(ON, Repeated().double())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR))
    train_step_of(model)(samples_of(0))
    optimizer.step()


@pytest.mark.sample(keep=5)
@pytest.mark.parametrize(
    ("script", "words"),
    [
        (twice, r"without optimizer.step\(\) after the first one"),
        (uncovered, r"no optimizer would use the gradient of 'layers.2.bias'"),
        (clipped, "the norm of all gradients is needed"),
        (torn, "an earlier step failed when a part of its updates was made"),
        (repeated, r"layers.1.(weight|bias) got a gradient after its update"),
    ],
)
def test_scripts_that_need_gradients_later_get_an_error(
    pool: Pool, script: Any, words: str
) -> None:
    with pytest.raises(RankFailure, match=words):
        pool.run(1, script)
