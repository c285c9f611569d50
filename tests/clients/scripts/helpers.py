"""Client H: schedules, memory reports, parameter groups, and names of a checkpoint's content."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm


class AnnealingLR:
    """A schedule of its own that writes to the groups; no class of torch."""

    def __init__(self, optimizer: Any, start_lr: float, warmup: int, total: int) -> None:
        self.optimizer, self.start_lr, self.warmup, self.total = optimizer, start_lr, warmup, total
        self.num_steps = 0
        self.step(0)

    def get_lr(self) -> float:
        if self.num_steps <= self.warmup:
            return self.start_lr * max(self.num_steps, 1) / max(self.warmup, 1)
        share = (self.num_steps - self.warmup) / max(self.total - self.warmup, 1)
        return self.start_lr * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))

    def step(self, num_steps: int | None = None) -> None:
        self.num_steps = self.num_steps + 1 if num_steps is None else num_steps
        for group in self.optimizer.param_groups:
            group["lr"] = self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        return {"start_lr": self.start_lr, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start_lr = state["start_lr"]
        self.step(state["num_steps"])


def set_seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def param_groups_of(model: nn.Module, weight_decay: float = 0.01) -> list[dict[str, Any]]:
    """Norms and biases get no weight decay; parameters are read from the modules themselves."""
    decayed: dict[str, Any] = {"params": [], "weight_decay": weight_decay}
    exempt: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    seen = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            is_norm = isinstance(module, nn.LayerNorm | FusedLayerNorm)
            (exempt if is_norm or name == "bias" else decayed)["params"].append(parameter)
    return [decayed, exempt] if exempt["params"] else [decayed]


def num_params_of(model: nn.Module) -> Any:
    """Counts whole shapes where parameters are sharded; a number of numpy, as scripts get it."""
    total = 0
    for parameter in model.parameters():
        shape = parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape
        total += np.prod(shape)
    return total


def memory_status(message: str) -> str:
    """A memory report of a rank; without a GPU there is little to report."""
    if smp.rdp_rank() != 0:
        return ""
    used = torch.cuda.memory_allocated(smp.local_rank()) if torch.cuda.is_available() else 0
    return f"({smp.pp_rank()}, {smp.tp_rank()}) {message}: {used / 2**20:.1f} MB"


def buffer_names_of(model: Any) -> list[str]:
    """Names of what is not a parameter and is saved, as the sharded checkpoints of scripts do."""
    names = []
    transient = set()
    for prefix, module in model.module.named_modules():
        for name in module._non_persistent_buffers_set:
            transient.add(f"{prefix}.{name}" if prefix else name)
    for name, _ in model.module.named_buffers():
        if name not in transient:
            names.append(name)
    return names


def param_shapes_of(model: Any, optimizer: Any) -> list[dict[str, torch.Size]]:
    """Whole shapes by name, for each group of 16-bit parameters."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    shapes = []
    for group in optimizer.fp16_groups:
        own: dict[str, torch.Size] = {}
        for parameter in group:
            assert parameter in names, "groups hold the very parameters of the model"
            shape = parameter.ds_shape if hasattr(parameter, "ds_numel") else parameter.shape
            own[names[parameter].removeprefix("module.")] = shape
        shapes.append(own)
    return shapes


def offsets_by_id(groups: Iterable[dict[str, Any]]) -> dict[int, int]:
    """Returns the offset of each parameter's shard in the flat memory of its group."""
    offsets = {}
    for group in groups:
        begin = 0
        for parameter in group["params"]:
            offsets[id(parameter)] = begin
            begin += parameter.ds_tensor.ds_numel
    return offsets


def buffers_by_id(
    groups: list[list[Any]], optimizer: Any, offsets: dict[int, int]
) -> dict[int, torch.Tensor]:
    """The float32 shard of each parameter, as a view of the optimizer's flat memory."""
    assert len(groups) == len(optimizer.param_groups)
    return {
        id(parameter): optimizer.fp32_partitioned_groups_flat[i].narrow(
            0, offsets[id(parameter)], parameter.ds_tensor.ds_numel
        )
        for i, parameters in enumerate(groups)
        for parameter in parameters
    }


def report(path: str, **values: Any) -> None:
    """Leaves what this rank has found for the test to judge."""
    Path(path, f"result_{smp.rank()}.json").write_text(json.dumps(values, default=float))
