"""The cells of the grid, and which of them smp refuses. Pure."""

from __future__ import annotations

import itertools
from dataclasses import astuple, dataclass
from typing import Any

import torch

#: Norm to which a sharded run's optimizer clips gradients; below the norms of the test.
SHARDED_CLIPPING = 1.0
LOSS_SCALE = 1024.0

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Cell:
    """A layout, precision and memory setting under which a model is trained.

    Attributes:
        pp, tp, dp: pipeline, tensor-parallel and reduced data-parallel size.
        sharding: "none", "state" (``shard_optimizer_state``) or "sdp2"
            (``sharded_data_parallel_degree`` 2).
        precision: "fp32", "fp16" or "bf16".
        checkpointing: "none" or a strategy of ``set_activation_checkpointing``.
        offload: whether activations are offloaded, those of checkpoints or else all.
    """

    pp: int
    tp: int
    dp: int
    sharding: str
    precision: str
    checkpointing: str
    offload: bool

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def dtype(self) -> torch.dtype:
        """Returns the type of the model's parameters."""
        return _DTYPES[self.precision]

    @property
    def num_shards(self) -> int:
        """Ranks that hold one copy of the optimizer's state together."""
        return {"none": 1, "state": self.dp, "sdp2": 2}[self.sharding]

    @property
    def clipping(self) -> float | None:
        """Returns the norm to which the optimizer clips gradients by itself, or None."""
        return SHARDED_CLIPPING if self.sharding == "sdp2" else None

    @property
    def config(self) -> dict[str, Any]:
        """Returns the configuration for ``smp.init``, without the number of microbatches."""
        config: dict[str, Any] = {
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "ddp": True,
            "offload_activations": self.offload and (self.checkpointing != "none" or "all"),
        }
        if self.sharding == "state":
            config["shard_optimizer_state"] = True
        if self.sharding == "sdp2":
            config["sharded_data_parallel_degree"] = 2
            config["sdp_param_persistence_threshold"] = 0
            config["sdp_gradient_clipping"] = SHARDED_CLIPPING
        if self.precision != "fp32":
            config[self.precision] = True
        return config

    @property
    def error(self) -> str | None:
        """Returns the text of smp's error for an impossible cell, or None for a possible one."""
        if self.sharding == "sdp2" and self.dp % 2:
            return (
                "smp config: sharded_data_parallel_degree=2: does not divide the reduced "
                f"data-parallel size {self.dp}; use a divisor of {self.dp}"
            )
        return None

    def __str__(self) -> str:
        offload = "offload" if self.offload else "keep"
        return (
            f"pp{self.pp}-tp{self.tp}-dp{self.dp}-{self.sharding}-{self.precision}-"
            f"{self.checkpointing}-{offload}"
        )


CELLS = tuple(
    Cell(*values)
    for values in itertools.product(
        (1, 2),
        (1, 2),
        (1, 2),
        ("none", "state", "sdp2"),
        ("fp32", "fp16", "bf16"),
        ("none", "each", "group_2"),
        (False, True),
    )
)
LEGAL = tuple(cell for cell in CELLS if cell.error is None)
ILLEGAL = tuple(cell for cell in CELLS if cell.error is not None)


def row_of(cell: Cell) -> tuple[Any, ...]:
    """The choices of a cell."""
    return astuple(cell)
