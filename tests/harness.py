"""The training script that tests share: a model of layers, its batches, and step functions.

Used in one process for the numbers to expect, and on the ranks of a pool for those of smp.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8
Config = dict[str, Any]
#: name: (number of ranks, keys of the configuration)
LAYOUTS: dict[str, tuple[int, Config]] = {
    "one": (1, {}),
    "replicas": (2, {}),
    "pipeline": (2, {"pipeline_parallel_degree": 2}),
    "pipeline of replicas": (4, {"pipeline_parallel_degree": 2}),
    "split": (2, {"tensor_parallel_degree": 2}),
    "split, one batch": (2, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    "sharded state": (2, {"shard_optimizer_state": True}),
    "sharded": (2, {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0}),
    "bf16": (2, {"bf16": True}),
}


def layouts(*names: str) -> dict[str, tuple[int, Config]]:
    """Returns some layouts, in the order of their names."""
    return {name: LAYOUTS[name] for name in names}


class Layers(nn.Module):
    """Four equal layers, each added to what it gets.

    Args:
        width: number of features.
        has_loss: returns the mean of the result's squares.
    """

    def __init__(self, width: int = WIDTH, has_loss: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.has_loss = has_loss

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean() if self.has_loss else x


def samples_of(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Makes the batch of all replicas, [8, WIDTH]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def own_samples(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Returns the part of the batch that belongs to this rank's replica."""
    import smp

    return samples_of(step, dtype).chunk(smp.rdp_size())[smp.rdp_rank()]


def wrapped(config: Config, net: Any) -> Any:
    """Starts smp and wraps a model of four layers; the two in the middle are split by tensors,
    the last two belong to the second stage of a pipeline.

    Args:
        config: keys beside those of two microbatches and of replicas.
        net: `Layers`, or a module that holds one as ``net``.
    """
    import smp

    smp.init({"ddp": True, "microbatches": 2, "auto_partition": False, **config})
    layers = getattr(net, "net", net).layers
    if smp.tp_size() > 1:
        for layer in layers[1:3]:
            smp.set_tensor_parallelism(layer)
    model = smp.DistributedModel(net)
    if smp.pp_size() > 1:
        for layer in layers[2:]:
            smp.set_partition(layer, 1)
    return model


def square_loss(model: Any, x: Tensor) -> Tensor:
    """Computes the mean of the squares of the model's result."""
    loss: Tensor = model(x).square().mean()
    return loss


def own_loss(model: Any, x: Any) -> Tensor:
    """Calls a model whose result is the loss."""
    loss: Tensor = model(x)
    return loss


def labelled_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Calls a model in the form of transformers, whose result has the loss of its labels."""
    loss: Tensor = model(**batch)["loss"]
    return loss


def train_step_of(model: Any, loss_of: Callable[[Any, Any], Tensor] = square_loss) -> Any:
    """Makes the step function of a plain script: the loss, its backward, and the loss as result.

    Args:
        model: the `smp.DistributedModel`.
        loss_of: function of the model and of a microbatch, which returns the loss.
    """
    import smp

    @smp.step
    def train_step(x: Any) -> Tensor:
        loss = loss_of(model, x)
        model.backward(loss)
        return loss

    return train_step


def forward_step(model: Any) -> Any:
    """Makes a step function that returns the model's result without a backward."""
    import smp

    @smp.step
    def forward(x: Any) -> Any:
        return model(x)

    return forward


def wholes(model: Any) -> dict[str, Tensor]:
    """Returns copies of the whole model's values, in double precision. Collective."""
    return {name: value.double().clone() for name, value in model.state_dict().items()}


def assert_near(
    of_ranks: Iterable[Mapping[str, Tensor]], expected: Mapping[str, Tensor], bound: float = 1e-12
) -> None:
    """Compares the values of each rank with those of one process, by name."""
    assert expected
    for values in of_ranks:
        for name, value in expected.items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=bound)


class Heard(logging.Handler):
    """Collects the lines of smp's log that contain some words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words
        self.texts: list[str] = []
        logging.getLogger("smp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if self.words in record.getMessage():
            self.texts.append(record.getMessage())
