"""A step of Muon on sharded parameters, next to FSDP2 with gathered gradients.

The contender of PyTorch gathers the gradient of each matrix as `DTensor.full_tensor` and updates
it whole on every rank by ``torch.optim.Muon``; then each rank takes its shard of the result. Both
update vectors and tables by AdamW where they lie. The contenders take turns in the same processes,
and their losses must agree, or the run fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from models import Gpt, GptShape, make_batch
from timer import compare, measure
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from workers import Worker

import smp

Batch = tuple[Tensor, Tensor]
SHARDED = {"sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 0.0}
NUM_STEPS = 3  # whose losses are compared


def split(named: Iterable[tuple[str, nn.Parameter]]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the matrices of blocks, and what AdamW updates."""
    own = list(named)
    matrices = [p for name, p in own if p.dim() == 2 and "groups" in name]
    return matrices, [p for _, p in own if not any(p is m for m in matrices)]


def make_muon(matrices: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(matrices, lr=1e-3)


def make_adam(rest: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(rest, lr=1e-3, fused=True)


class Contender:
    """A way to train: a step, and its update alone with the gradients of the last step."""

    def __init__(self, backward: Callable[[], Tensor], update: Callable[[], None]) -> None:
        self.backward, self.update = backward, update

    def step(self) -> float:
        loss = float(self.backward())
        self.update()
        return loss


def plain_model(shape: GptShape) -> Gpt:
    torch.manual_seed(0)
    return Gpt(shape, shape.num_layers)


def ours(shape: GptShape, batch: Batch) -> Contender:
    model = smp.DistributedModel(plain_model(shape))
    matrices, rest = split(model.named_parameters())
    optimizers = [
        smp.DistributedOptimizer(make_muon(matrices)),
        smp.DistributedOptimizer(make_adam(rest)),
    ]

    @smp.step
    def train_step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = model(ids, targets)
        model.backward(loss)
        return loss

    def backward() -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss: Tensor = train_step(*batch).reduce_mean()
        return loss

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return Contender(backward, update)


def fsdp2(shape: GptShape, batch: Batch) -> Contender:
    model = plain_model(shape)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model.groups:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices, rest = split(model.named_parameters())
    with torch.no_grad():
        wholes = [nn.Parameter(p.full_tensor()) for p in matrices]
    muon, adam = make_muon(wholes), make_adam(rest)

    def backward() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(*batch)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def update() -> None:
        for matrix, whole in zip(matrices, wholes, strict=True):
            assert isinstance(matrix.grad, DTensor)
            whole.grad = matrix.grad.full_tensor()
        muon.step()
        for matrix, whole in zip(matrices, wholes, strict=True):
            shards = whole.detach().chunk(mesh.size())
            matrix.to_local().copy_(shards[mesh.get_local_rank()])
            whole.grad = None
        adam.step()

    return Contender(backward, update)


def main() -> None:
    worker = Worker("matrix_optimizers")
    config = worker.config
    worker.start({"sharded_data_parallel_degree": config["num_ranks"], **SHARDED})
    shape = GptShape(**config["shape"])
    batch = make_batch(shape, config["batch_size"], seed=1 + smp.rank())
    contenders = {"torch_fsdp2": fsdp2(shape, batch), "smp": ours(shape, batch)}
    losses = {
        name: torch.tensor([each.step() for _ in range(NUM_STEPS)])
        for name, each in contenders.items()
    }
    torch.testing.assert_close(losses["smp"], losses["torch_fsdp2"], rtol=1e-3, atol=0)
    for what in ("step", "update"):
        runs = {name: getattr(each, what) for name, each in contenders.items()}
        timings = measure(runs, worker.repeats, worker.warmup, distributed.barrier)
        worker.emit(f"torch_fsdp2 {what}", timings["torch_fsdp2"].summary())
        ratio = compare(timings["smp"], timings["torch_fsdp2"])
        worker.emit(f"smp {what}", timings["smp"].summary() | ratio)
    smp.shutdown()


if __name__ == "__main__":
    main()
