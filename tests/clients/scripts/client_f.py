"""Client F: a small convolutional network for digits, over a pipeline of two."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

import smdistributed.modelparallel.torch as smp
from tests.clients.scripts.helpers import report


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return torch.flatten(F.max_pool2d(x, 2), 1)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), Head()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.trunk(x))
        return result


@smp.step
def train_step(model: Any, scaler: Any, data: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=scaler.is_enabled()):
        output = model(data)
    loss = F.nll_loss(output.float(), target, reduction="mean")
    model.backward(scaler.scale(loss))
    return output, loss


@smp.step
def test_step(model: Any, data: Tensor, target: Tensor) -> tuple[float, int]:
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    pred = output.argmax(dim=1, keepdim=True)
    return loss, pred.eq(target.view_as(pred)).sum().item()


def batches(replica: int, num_samples: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
    """The last one is smaller than the others."""
    generator = torch.Generator().manual_seed(replica)
    target = torch.randint(0, 10, (num_samples,), generator=generator)
    data = torch.randn(num_samples, 1, 12, 12, generator=generator) * 0.1
    data += target.view(-1, 1, 1, 1) / 5.0
    return list(zip(data.split(batch_size), target.split(batch_size), strict=True))


def test(model: Any, loader: list[tuple[Tensor, Tensor]]) -> tuple[float, int]:
    model.eval()
    loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in loader:
            loss_batch, correct_batch = test_step(model, data, target)
            assert isinstance(loss_batch, list) and isinstance(correct_batch[0], int)
            loss += sum(loss_batch)
            correct += sum(correct_batch)
    return loss, correct


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--resume", type=int, default=0)
    parser.add_argument("--model_dir", default=os.environ["SM_MODEL_DIR"])
    args = parser.parse_args()
    smp.init()
    torch.manual_seed(1)
    model: Any = Net()
    optimizer: Any = torch.optim.Adadelta(model.parameters(), lr=1.0)
    model = smp.DistributedModel(model)
    scaler = smp.amp.GradScaler(enabled=args.amp > 0)
    optimizer = smp.DistributedOptimizer(optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    if args.resume:
        partial = smp.load(f"{args.model_dir}/pt_mnist.pt", partial=True)
        model.load_state_dict(partial["model_state_dict"])
        optimizer.load_state_dict(partial["optimizer_state_dict"])
    loader = batches(smp.dp_rank(), 45, 16)  # 13 samples are left for four microbatches
    losses = []
    for _ in range(args.epochs):
        model.train()
        for data, target in loader:
            optimizer.zero_grad()
            _, loss_mb = train_step(model, scaler, data, target)
            losses.append(loss_mb.reduce_mean().item())
            scaler.step(optimizer)
            scaler.update()
        scheduler.step()
    test_loss, correct = test(model, loader)
    if smp.dp_rank() == 0:
        smp.save(
            {
                "model_state_dict": model.local_state_dict(),
                "optimizer_state_dict": optimizer.local_state_dict(),
            },
            f"{args.model_dir}/pt_mnist.pt",
            partial=True,
        )
        assert os.path.exists(f"{args.model_dir}/pt_mnist.pt_{smp.mp_rank()}")
    smp.barrier()
    report(
        os.environ["SM_CHANNEL_TRAIN"],
        losses=losses,
        test_loss=test_loss,
        correct=correct,
        lr=optimizer.param_groups[0]["lr"],
        mp_rank=smp.mp_rank(),
        dp_rank=smp.dp_rank(),
    )


if __name__ == "__main__":
    main()
