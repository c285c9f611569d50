"""A module of one's own, split over tensor-parallel ranks.

    torchrun --nproc-per-node 2 examples/own_layer/gated_mlp.py

`GatedMlp` is an ordinary module, and `Network` uses it. `DistributedGatedMlp` is its distributed
form: each rank computes some of the inner channels. The registration at the end of the file ties
the two; hooks translate the arguments. `Network` stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import smp
from smp.nn import layout
from smp.nn.linear import ColumnLinear, RowLinear
from smp.tensor_parallel import sharding

# ---- a model as it was -----------------------------------------------------------------


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``, times a factor.

    Args:
        width: channels outside.
        factor: inner channels per channel outside.
    """

    def __init__(self, width: int, factor: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, factor * width)
        self.up = nn.Linear(width, factor * width)
        self.down = nn.Linear(factor * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return scale * self.down(functional.silu(self.gate(x)) * self.up(x))


class Network(nn.Module):
    """A network of gated MLPs with residuals, and a head."""

    def __init__(self, width: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GatedMlp(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, scale=0.5)
        return self.head(x)


# ---- its distributed form --------------------------------------------------------------


class DistributedGatedMlp(smp.nn.DistributedModule):
    """A `GatedMlp` whose inner channels are divided among the ranks of a tensor-parallel group.

    Each rank computes its channels for all samples of the group. Parameters have the names of the
    original's, so their values are taken over.

    Args:
        width: channels outside.
        inner: inner channels, of all ranks together.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self._layout = layout.current()
        sizes = sharding.split(inner)
        if 0 in sizes:
            raise smp.nn.Unsupported(f"{inner} inner channels are too few for {len(sizes)} ranks")
        self.gate = ColumnLinear(width, sizes, bias=True, std=None)
        self.up = ColumnLinear(width, sizes, bias=True, std=None)
        self.down = RowLinear(sizes, width, bias=True, std=None, layout=self._layout)

    is_indivisible = True  # it reads the parameters of `gate` and `up`

    def forward(self, inputs: tuple[Tensor, float]) -> Tensor:
        x, scale = inputs
        length = x.shape[1]
        x = self._layout.enter(x)
        gate, up = self._layout.columns(x, [self.gate, self.up], length)
        term = self.down(functional.silu(gate) * up)  # of this rank's channels
        y = scale * (self._layout.sum_up(term, length) + self.down.bias)
        return self._layout.leave(y, length)


def init_hook(width: int, factor: int = 4) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Arguments of ``GatedMlp`` to arguments of ``DistributedGatedMlp``."""
    return (width, factor * width), {}


def forward_hook(x: Tensor, scale: float = 1.0) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The same for ``forward``."""
    return ((x, scale),), {}


smp.tp_register_with_module(GatedMlp, DistributedGatedMlp, init_hook, forward_hook)


def main() -> None:
    smp.init({"tensor_parallel_degree": 2, "ddp": True})
    torch.manual_seed(0)
    with smp.tensor_parallelism():
        network = Network()
    model = smp.DistributedModel(network)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = functional.mse_loss(model(x), y)
        model.backward(loss)
        return loss

    generator = torch.Generator().manual_seed(smp.dp_rank())  # each rank has samples of its own
    for _ in range(20):
        x = torch.randn(8, 5, 64, generator=generator)
        loss = train_step(x, x.mean(-1, keepdim=True)).reduce_mean()
        optimizer.step()
        optimizer.zero_grad()
    losses = smp.allgather(loss.item(), smp.WORLD)
    if smp.rank() == 0:
        split = sum(model.is_distributed_parameter(p) for p in model.parameters())
        print(f"{split} parameters are split; mean loss {sum(losses) / len(losses):.4f}")
    smp.shutdown()


if __name__ == "__main__":
    main()
