"""Computes bytes of a rank by kind from numbers of elements and of activations.

The formulas are those of docs/memory.md and docs/design/memory.md. The peak is reached when a
forward ends, with all activations, or when the backward ends, with all gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

_MASTER = 4
_MOMENTS = 8  # two, in FP32


@dataclass(frozen=True)
class Sharding:
    """Choices of how a rank keeps parameters and their state.

    Attributes:
        half: 16-bit parameters with FP32 masters and sums; otherwise FP32.
        size: ranks that hold one copy of the state together.
        parameters: parameters and gradients are cut as well, not the optimizer state alone.
        persistent: tensors of fewer elements stay whole between uses, if parameters are cut.
        bucket_bytes: bytes of gradients that are reduced together.
    """

    half: bool = False
    size: int = 1
    parameters: bool = False
    persistent: int = 0
    bucket_bytes: int = 25 << 20

    @property
    def parameter_bytes(self) -> int:
        """Returns the bytes of one parameter element."""
        return 2 if self.half else 4

    @property
    def state_bytes(self) -> float:
        """Returns the bytes on one rank of an element with gradient and the state of Adam."""
        optimizer = _MOMENTS + (_MASTER if self.half else 0)
        shared = (4 + optimizer) / self.size
        return self.parameter_bytes / (self.size if self.parameters else 1) + shared


@dataclass(frozen=True)
class Holding:
    """Parameters and activations that a rank computes with.

    Attributes:
        elements: elements of whole parameters.
        trainable: elements with gradients.
        small: elements in tensors below `Sharding.persistent`.
        largest: elements of the largest tensor.
        units: elements of the two largest layers, without those in small tensors.
        wide: elements of 32 bits, which are their own masters.
        activations: bytes that the microbatches in flight keep, together.
        temporary: additional bytes where a forward ends, in the backward of the loss or of one
            recomputed layer.
        late: additional bytes where a backward ends: a gradient, and a recomputed layer.
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
        """Returns the bytes on the device."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.gathered + self.buckets + self.temporary


@dataclass(frozen=True)
class Passing:
    """Bytes that are held for the time of a few operators.

    Attributes:
        tensor: bytes of the largest tensor that a microbatch makes.
        gradient: bytes of the largest parameter's gradient, before it is added up.
        tied: bytes of gradients of parameters that are used at both ends of the model: the first
            one in a backward is kept until the last one is there.
        again: bytes of activations of the largest recomputed layer.
    """

    tensor: float
    gradient: float
    tied: float = 0.0
    again: float = 0.0

    def forward_ends(self, kept: int) -> float:
        """Returns bytes in addition to the activations of `kept` microbatches, one in backward."""
        loss = self.tensor + max(self.tensor, self.gradient)
        return max(loss, self.again) + (kept - 1) * self.tied

    @property
    def backward_ends(self) -> float:
        """Returns bytes in addition to all gradients."""
        return max(self.gradient, self.again) + self.tied


def rank_bytes(holding: Holding, sharding: Sharding, microbatches: int) -> RankBytes:
    """Returns what a rank holds at its peak.

    Args:
        holding: parameters and activations of the rank.
        sharding: sharding of parameters and state.
        microbatches: number of microbatches of a step; from the second on, gradients of earlier
            ones are held during a forward.
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
    # The first sum of gradients allocates their shards; whole buckets stay from step to step.
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
