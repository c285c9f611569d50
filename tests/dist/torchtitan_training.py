"""Trains with the parts of torchtitan that write and read checkpoints, as its trainer does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

#: learning rates of parameters without and with weight decay
LRS = (3e-2, 1e-2)


def factor(step: int) -> float:
    """Returns what the schedule multiplies learning rates by."""
    return 1 / (1 + step)


class TrainState:
    """The part of torchtitan's trainer that it saves."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Trainer:
    """A model on ranks of FSDP2, an optimizer, a schedule, and torchtitan's checkpoints.

    Args:
        model: the model, with a list of layers.
        folder: folder of the checkpoints.
        options: further options of the checkpoints.
    """

    def __init__(self, model: nn.Module, folder: str, **options: Any) -> None:
        from torchtitan.components.checkpointer import CheckpointManager
        from torchtitan.components.optimizer import (
            LRSchedulersContainer,
            OptimizersContainer,
            ParamGroupConfig,
        )

        for layer in model.layers:  # type: ignore[union-attr]
            fully_shard(layer)  # type: ignore[arg-type]
        fully_shard(model)
        groups = [
            ParamGroupConfig(
                pattern=r"bias$",
                optimizer_name="AdamW",
                optimizer_kwargs={"lr": LRS[0], "weight_decay": 0.0},
            ),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": LRS[1]}),
        ]
        config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
        self.model, self.state = model, TrainState()
        self.optimizers = config.build(model_parts=[model])
        self.schedule = LRSchedulersContainer(self.optimizers, factor)
        self.checkpoints = CheckpointManager(
            CheckpointManager.Config(enable=True, folder=folder, interval=1, **options),
            dataloader=None,
            model_parts=[model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedule,
            states={"train_state": self.state},
            sd_adapter=None,
        )

    def train(self, batch: Tensor) -> None:
        self.optimizers.zero_grad()
        self.model(batch).backward()
        self.optimizers.step()
        self.schedule.step()
        self.state.step += 1

    def values(self) -> dict[str, Tensor]:
        return {name: p.full_tensor() for name, p in self.model.state_dict().items()}
