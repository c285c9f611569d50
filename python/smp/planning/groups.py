"""The groups of ranks of a layout, and what their exchanges take and send."""

from __future__ import annotations

import math
from dataclasses import dataclass

from smp.planning.hardware import Hardware, Link
from smp.planning.layout import Layout


@dataclass(frozen=True)
class Cost:
    """Seconds of exchanges, and the bytes that each rank sends in them."""

    seconds: float = 0.0
    num_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.num_bytes + other.num_bytes)

    def __mul__(self, times: float) -> Cost:
        return Cost(times * self.seconds, times * self.num_bytes)


@dataclass(frozen=True)
class Reach:
    """A group of ranks and how fast they exchange.

    Attributes:
        size: number of ranks.
        crosses: the group spans several hosts.
        link: speed of the slowest place, for each rank.
    """

    size: int
    crosses: bool
    link: Link

    def gather(self, num_bytes: float) -> Cost:
        """Returns the cost of an all-gather or a reduce-scatter of `num_bytes` in all: a ring."""
        pieces = self.size - 1
        sent = num_bytes / self.size * pieces
        return Cost(sent / self.link.bytes_per_s + pieces * self.link.latency_s, sent)

    def all_reduce(self, num_bytes: float) -> Cost:
        """Returns the cost of a ring of 2 (n - 1) messages of 1/n of the bytes."""
        return self.gather(num_bytes) * 2

    def exchange(self, sent_bytes: float) -> Cost:
        """Returns the cost of an all-to-all in which each rank sends `sent_bytes` to others."""
        seconds = sent_bytes / self.link.bytes_per_s + (self.size - 1) * self.link.latency_s
        return Cost(seconds, sent_bytes)


def reach(layout: Layout, axis: str, size: int, per_host: int, hardware: Hardware) -> Reach:
    """Returns a group of `size` neighbours along an axis.

    Args:
        axis: "D", "P", "T" or "C".
    """
    sizes = {"D": layout.rdp, "P": layout.pp, "T": layout.tp, "C": layout.cp}
    inner = layout.axes[layout.axes.index(axis) + 1 :]
    stride = math.prod(sizes[letter] for letter in inner)
    if stride * size <= per_host or size == 1:
        link = hardware.inside if axis == "P" else hardware.collective or hardware.inside
        return Reach(size, False, link)
    # Ranks of a ring that share a host send between hosts once, over what all of them have.
    together = max(1, per_host // stride)
    speed = min(hardware.inside.bytes_per_s, hardware.between.bytes_per_s * min(together, size))
    return Reach(size, True, Link(speed, hardware.between.latency_s))


def reach_of_replicas(layout: Layout, size: int, per_host: int, hardware: Hardware) -> Reach:
    """Returns a group of `size` neighbours among the ranks with equal parameters."""
    if layout.cp == 1:
        return reach(layout, "D", size, per_host, hardware)
    near, far = (axis for axis in reversed(layout.axes) if axis in "CD")
    inner = min(size, layout.cp if near == "C" else layout.rdp)
    parts = [
        reach(layout, near, inner, per_host, hardware),
        reach(layout, far, -(-size // inner), per_host, hardware),
    ]
    slowest = min((part for part in parts if part.size > 1), key=_speed, default=parts[0])
    return Reach(size, slowest.crosses, slowest.link)


def _speed(group: Reach) -> tuple[bool, float]:
    return not group.crosses, group.link.bytes_per_s


@dataclass(frozen=True)
class Grid:
    """The groups of ranks of a layout.

    Attributes:
        tensor: ranks that split layers together.
        shard: ranks that hold one copy of the state together.
        replicas: ranks that hold the same part of the state.
        next_stage: a rank and the one with the next part of the model.
        context: ranks that read one batch and have parts of its sequences.
        apart: mean number of other ranks that a token is sent to, if experts are spread.
        sent_keys: heads of keys that the context-parallel ranks exchange, over those of queries.
    """

    tensor: Reach
    shard: Reach
    replicas: Reach
    next_stage: Reach
    context: Reach
    apart: float = 0.0
    sent_keys: float = 1.0

    @classmethod
    def of(
        cls,
        layout: Layout,
        per_host: int,
        hardware: Hardware,
        experts: int = 0,
        routed: int = 1,
        sent_keys: float = 1.0,
    ) -> Grid:
        """Returns the groups of a layout; a token is sent to `routed` of `experts` experts."""

        def along(axis: str, size: int) -> Reach:
            return reach(layout, axis, size, per_host, hardware)

        replicas = reach_of_replicas(layout, layout.replicas, per_host, hardware)
        return cls(
            along("T", layout.tp),
            reach_of_replicas(layout, layout.shard, per_host, hardware),
            Reach(layout.replicas // layout.shard, replicas.crosses, replicas.link),
            along("P", min(2, layout.pp)),
            Reach(1, False, hardware.inside) if layout.cp == 1 else along("C", layout.cp),
            other_ranks(layout.tp, experts, routed) if layout.spreads_experts else 0.0,
            sent_keys,
        )


def other_ranks(num_ranks: int, experts: int, routed: int) -> float:
    """Returns the mean number of other ranks that a token is sent to.

    All choices of its experts are equally likely. A token is sent to a rank once, however many of
    its experts are there.

    Args:
        num_ranks: number of ranks that share the experts evenly.
        experts: number of experts of the mixture.
        routed: experts per token.
    """
    elsewhere = experts - experts // num_ranks
    missed = math.comb(elsewhere, routed) / math.comb(experts, routed)
    return (num_ranks - 1) * (1 - missed)
