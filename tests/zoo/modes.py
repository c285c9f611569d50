"""The layouts in which the zoo runs each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MICROBATCHES = 2
STEPS = 3


@dataclass(frozen=True)
class Mode:
    """A layout of ranks.

    Attributes:
        name: name in the command and the table.
        world_size: ranks.
        config: further keys for ``smp.init``.
        replicas: different batches per step.
        split: whether layers are marked for tensor parallelism.
        checkpointed: whether repeated layers are checkpointed.
        outputs: whether optional outputs are on.
        half: train in bfloat16.
        gradients: whether local gradients are whole, and can be compared by name.
    """

    name: str
    world_size: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    replicas: int = 1
    split: bool = False
    checkpointed: bool = False
    outputs: bool = False
    half: bool = False
    gradients: bool = True

    @property
    def has_own_batches(self) -> bool:
        """Returns whether ranks of a tensor-parallel group read different batches."""
        return self.split and not self.config["prescaled_batch"]

    @property
    def pipeline(self) -> int:
        return int(self.config.get("pipeline_parallel_degree", 1))


def _tensor(degree: int, prescaled: bool) -> dict[str, Any]:
    return {"tensor_parallel_degree": degree, "ddp": True, "prescaled_batch": prescaled}


def _pipeline(degree: int) -> dict[str, Any]:
    return {"pipeline_parallel_degree": degree}


def _context(degree: int) -> dict[str, Any]:
    return {"context_parallel_degree": degree, "ddp": True}


MODES = {
    mode.name: mode
    for mode in (
        Mode("pp2", config=_pipeline(2)),
        Mode("outputs", config=_pipeline(2), outputs=True),
        Mode("pp3", 3, _pipeline(3)),
        Mode("pp2dp2", 4, {**_pipeline(2), "ddp": True}, replicas=2),
        Mode("dp2", config={"ddp": True}, replicas=2),
        Mode(
            "sdp2",
            config={"sharded_data_parallel_degree": 2, "ddp": True,
                    "sdp_param_persistence_threshold": 0, "sdp_gradient_clipping": 1e9},
            replicas=2, gradients=False,
        ),
        Mode("tp2", config=_tensor(2, True), split=True, gradients=False),
        Mode("tp2own", config=_tensor(2, False), replicas=2, split=True, gradients=False),
        Mode("tp4", 4, _tensor(4, True), split=True, gradients=False),
        Mode("pp2tp2", 4, {**_pipeline(2), **_tensor(2, True)}, split=True, gradients=False),
        # Marked as a whole, so experts are spread where a plan names them.
        Mode(
            "ep2", config={**_tensor(2, True), "expert_parallel_degree": 2},
            split=True, gradients=False,
        ),
        Mode(
            "ep2own", config={**_tensor(2, False), "expert_parallel_degree": 2}, replicas=2,
            split=True, gradients=False,
        ),
        Mode("cp2", config=_context(2)),
        Mode("cp4", 4, _context(4)),
        Mode("pp2cp2", 4, {**_pipeline(2), **_context(2)}),
        Mode(
            "tp2cp2", 4, {**_tensor(2, True), **_context(2)}, split=True, gradients=False,
        ),
        Mode("checkpointing", config=_pipeline(2), checkpointed=True),
        Mode("bf16", config=_pipeline(2), half=True),
    )
}  # fmt: skip
