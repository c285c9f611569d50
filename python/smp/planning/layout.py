"""Layouts of a model on a number of devices, and the groups of ranks that they make."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import smp._C as _C
from smp.planning.hardware import Hardware, Link
from smp.planning.memory import Sharding
from smp.planning.tensor_split import Shares

PERSISTENT = 1_000_000  # default of sdp_param_persistence_threshold


@dataclass(frozen=True)
class Layout:
    """Degrees and choices of a run.

    Attributes:
        pp, tp, rdp: ranks along each axis.
        shard: ranks that hold one copy of the optimizer state together; 1: it is not sharded.
        shards_parameters: parameters and gradients are sharded as well.
        microbatch: samples that a tensor-parallel group reads together.
        microbatches: number of microbatches of a step.
        schedule: name of a policy.
        chunks: stages per rank.
        active: microbatches in flight.
        checkpoints: each repeated layer is computed again.
        offload: inputs of checkpoints are copied to host memory.
        in_memory: activations between split layers of tensor parallelism are cut as well.
        placement: axes from slow to fast.
        spreads_experts: experts are spread over the ranks of a tensor-parallel group, and their
            features are not split.
    """

    pp: int = 1
    tp: int = 1
    rdp: int = 1
    shard: int = 1
    shards_parameters: bool = False
    microbatch: int = 1
    microbatches: int = 1
    schedule: str = _C.DEFAULT_POLICY
    chunks: int = 1
    active: int = 1
    checkpoints: bool = False
    offload: bool = False
    in_memory: bool = False
    placement: str = "DPT"
    spreads_experts: bool = False

    @property
    def num_ranks(self) -> int:
        """Returns the number of devices."""
        return self.pp * self.tp * self.rdp

    @property
    def samples(self) -> int:
        """Returns the samples of a step, over all ranks."""
        return self.microbatch * self.microbatches * self.rdp

    @cached_property
    def shares(self) -> Shares:
        """Returns the shares that a rank has of a tensor-parallel group's microbatch."""
        return Shares(1 / self.tp, 1 / self.tp, 1 / self.tp if self.in_memory else 1.0)

    def sharding(self, half: bool, bucket_bytes: int) -> Sharding:
        """Returns how state is kept."""
        return Sharding(half, self.shard, self.shards_parameters, PERSISTENT, bucket_bytes)

    def config(self, precision: str) -> dict[str, Any]:
        """Returns the configuration of `smp.init`: keys that differ from the defaults."""
        values: dict[str, Any] = {
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "microbatches": self.microbatches,
        }
        if self.num_ranks > 1:
            values["ddp"] = True
        if self.microbatches > 1:
            values["active_microbatches"] = self.active
        if self.pp > 1:
            values["pipeline"] = self.schedule
            if self.chunks > 1:
                values["virtual_stages"] = self.chunks
        if self.tp > 1:
            values["prescaled_batch"] = True
            if not self.in_memory:
                values["optimize"] = "speed"
        if self.spreads_experts:
            values["expert_parallel_degree"] = self.tp
        if self.shard > 1 and self.shards_parameters:
            values["sharded_data_parallel_degree"] = self.shard
        elif self.shard > 1:
            values["shard_optimizer_state"] = True
        if precision != "fp32":
            values[precision] = True
        if self.offload:
            values["offload_activations"] = True
        if self.num_ranks > 1:
            values["placement_strategy"] = self.placement
        return values

    def text(self) -> str:
        """Returns degrees and choices in few words, for tables."""
        words = [f"pp {self.pp}", f"tp {self.tp}", f"dp {self.rdp}"]
        if self.spreads_experts:
            words.insert(2, f"ep {self.tp}")
        if self.shard > 1:
            words.append(f"{'sdp' if self.shards_parameters else 'opt'} {self.shard}")
        words.append(f"{self.microbatches} x {self.microbatch}")
        if self.pp > 1:
            words.append(self.schedule + (f" {self.chunks}" if self.chunks > 1 else ""))
        if self.checkpoints:
            words.append("ckpt+offload" if self.offload else "ckpt")
        return ", ".join(words)


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

    def all_reduce_s(self, num_bytes: float) -> float:
        """Returns the seconds of a ring of 2 (n - 1) messages of 1/n of the bytes."""
        return 2 * self.gather_s(num_bytes)

    def gather_s(self, num_bytes: float) -> float:
        """Returns the seconds of an all-gather or a reduce-scatter of `num_bytes` in all."""
        if self.size == 1:
            return 0.0
        pieces = self.size - 1
        return pieces * (num_bytes / self.size / self.link.bytes_per_s + self.link.latency_s)

    def exchange_s(self, sent_bytes: float) -> float:
        """Returns the seconds of an all-to-all in which each rank sends `sent_bytes` to others."""
        if self.size == 1:
            return 0.0
        return sent_bytes / self.link.bytes_per_s + (self.size - 1) * self.link.latency_s

    def sent_bytes(self, num_bytes: float) -> float:
        """Returns the bytes that a rank sends in an all-gather or a reduce-scatter."""
        return num_bytes * (self.size - 1) / self.size


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


def reach(layout: Layout, axis: str, size: int, per_host: int, hardware: Hardware) -> Reach:
    """Returns a group of `size` neighbours along an axis.

    Args:
        axis: "D", "P" or "T".
    """
    sizes = {"D": layout.rdp, "P": layout.pp, "T": layout.tp}
    stride = 1
    for letter in reversed(layout.placement):
        if letter == axis:
            break
        stride *= sizes[letter]
    if stride * size <= per_host or size == 1:
        link = hardware.inside if axis == "P" else hardware.collective or hardware.inside
        return Reach(size, False, link)
    # Ranks of a ring that share a host send between hosts once, over what all of them have.
    together = max(1, per_host // stride)
    speed = min(hardware.inside.bytes_per_s, hardware.between.bytes_per_s * min(together, size))
    return Reach(size, True, Link(speed, hardware.between.latency_s))
