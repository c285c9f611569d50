"""Bytes of a rank by kind, from numbers of elements and of activations. Pure arithmetic.

The formulas are those of docs/memory.md and docs/design/memory.md. Peaks lie where a forward ends,
with all activations, or where the backward ends, with all gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

_MASTER = 4
_MOMENTS = 8  # two, in FP32


@dataclass(frozen=True)
class Sharding:
    """How a rank keeps parameters and their state.

    Attributes:
        half: 16-bit parameters with FP32 masters and sums; otherwise FP32.
        size: ranks that hold one copy of the state together.
        parameters: parameters and gradients are cut as well, not the optimizer state alone.
        persistent: tensors of fewer elements stay whole between uses, if parameters are cut.
        bucket_bytes: of gradients, reduced together.
    """

    half: bool = False
    size: int = 1
    parameters: bool = False
    persistent: int = 0
    bucket_bytes: int = 25 << 20

    @property
    def parameter_bytes(self) -> int:
        """Of one element."""
        return 2 if self.half else 4

    @property
    def state_bytes(self) -> float:
        """Of one element with gradient and the state of Adam, on one rank."""
        optimizer = _MOMENTS + (_MASTER if self.half else 0)
        shared = (4 + optimizer) / self.size
        return self.parameter_bytes / (self.size if self.parameters else 1) + shared


@dataclass(frozen=True)
class Holding:
    """What a rank computes with.

    Attributes:
        elements: of parameters, whole.
        trainable: those with gradients.
        small: in tensors below `Sharding.persistent`.
        largest: elements of the largest tensor.
        units: of the two largest layers, elements, without those in small tensors.
        wide: those of 32 bits, which are their own masters.
        activations: bytes that the microbatches in flight keep, together.
        temporary: bytes on top where a forward ends, while the loss or one recomputed layer goes
            back.
        late: bytes on top where a backward ends: of a gradient, and of a recomputed layer.
        host: bytes of activations in host memory.
    """

    elements: float
    trainable: float
    small: float = 0
    largest: float = 0
    units: float = 0
    wide: float = 0
    activations: float = 0
    temporary: float = 0
    late: float = 0
    host: float = 0


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a rank where it holds most, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    buckets: float
    temporary: float
    host: float = 0

    @property
    def peak(self) -> float:
        """On the device."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.gathered + self.buckets + self.temporary


@dataclass(frozen=True)
class Passing:
    """What is there for the time of a few operators, in bytes.

    Attributes:
        tensor: the largest tensor that a microbatch makes.
        gradient: of the largest parameter, before it is added up.
        tied: gradients of parameters that are used at both ends of the model: the first use of them
            in a backward waits for the last one.
        again: activations of the largest recomputed layer.
    """

    tensor: float
    gradient: float
    tied: float = 0.0
    again: float = 0.0

    def forward_ends(self, kept: int) -> float:
        """On top of the activations of so many microbatches, of which one goes back."""
        loss = self.tensor + max(self.tensor, self.gradient)
        return max(loss, self.again) + (kept - 1) * self.tied

    @property
    def backward_ends(self) -> float:
        """Beside all gradients."""
        return max(self.gradient, self.again) + self.tied


def rank_bytes(holding: Holding, sharding: Sharding, microbatches: int) -> RankBytes:
    """What a rank holds at its peak.

    Args:
        holding: of the rank.
        sharding: of parameters and state.
        microbatches: of a step; gradients of earlier ones are there while later ones go forward.
    """
    size, cuts = sharding.size, sharding.parameters and sharding.size > 1
    width = sharding.parameter_bytes
    wide = holding.wide if sharding.half else 0.0
    parameters = (width * holding.elements + (4 - width) * wide) / (size if cuts else 1)
    gradients = 4 * holding.trainable / size
    masters = max(0.0, holding.trainable - wide) if sharding.half else 0.0
    optimizer = (_MOMENTS * holding.trainable + _MASTER * masters) / size
    gathered = width * (holding.units + holding.small * (1 - 1 / size)) if cuts else 0.0
    buckets = 0.0
    if size > 1:
        cap = sharding.bucket_bytes / (2 if sharding.parameters else 1)
        buckets = min(2 * max(cap, 4 * holding.largest), 4 * holding.trainable)
    # Shards of gradients come with their first sum; whole buckets stay from step to step.
    early = gradients if size == 1 or microbatches > 1 else 0.0
    forward_ends = RankBytes(
        parameters,
        early,
        optimizer,
        holding.activations,
        gathered,
        buckets,
        holding.temporary,
        holding.host,
    )
    backward_ends = RankBytes(
        parameters, gradients, optimizer, 0.0, gathered, buckets, holding.late, 0.0
    )
    return max(forward_ends, backward_ends, key=lambda found: found.peak)
