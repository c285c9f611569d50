"""Layouts of a model on a number of devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import torch

import smp._C as _C
from smp.config.schema import Config
from smp.data_parallel import DEFAULT_MB, bucket_cap_bytes
from smp.partition.decide import kept_by
from smp.partition.fastest import StepShape
from smp.planning.profile import Part, Shares


@dataclass(frozen=True)
class Layout:
    """Degrees and choices of a run.

    Attributes:
        pp, tp, rdp, cp: ranks along each axis.
        shard: ranks that hold one copy of the optimizer state together; 1: it is not sharded.
        shards_parameters: parameters and gradients are sharded as well.
        microbatch: samples that a tensor-parallel group reads together.
        microbatches: number of microbatches of a step.
        schedule: name of a policy.
        chunks: stages per rank.
        active: microbatches in flight.
        checkpoints: each repeated layer is computed again, unless `Part.is_kept`.
        offload: inputs of checkpoints are copied to host memory; "all": all activations are.
        in_memory: activations between split layers of tensor parallelism are cut as well.
        placement: axes from slow to fast.
        spreads_experts: experts are spread over the ranks of a tensor-parallel group, and their
            features are not split.
        precision: "fp32", "bf16" or "fp16".
        state_dtype: storage of the optimizer's moments: "fp32", "bf16" or "int8".
        masters: storage of digits that 16-bit parameters lack: "fp32", "residue" or "none".
        has_owners: an owner updates each tensor whole where ranks hold parts.
        offloads_state: moments of the optimizer are in host memory.
        drops_gradients: each gradient is applied in the backward, and dropped.
        device: type of the devices: "cpu" or "cuda".
        own_batches: each rank of a tensor-parallel group reads a microbatch of its own.
        persistent: sharded tensors of fewer elements stay whole between uses.
        horizon: inputs of checkpoints that are back on the device before they are needed.
        share: samples that a replica reads over the mean of all replicas.
        device_speeds: speeds of the devices, by global rank; empty: all are alike.
        memory_limits: most bytes of each pipeline rank; empty: the run finds out.
        kept_layers: names of layers that are not computed again, with `checkpoints`.
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
    offload: bool | Literal["all"] = False
    in_memory: bool = False
    placement: str = "DPT"
    spreads_experts: bool = False
    precision: str = "fp32"
    state_dtype: str = "fp32"
    masters: str = "fp32"
    has_owners: bool = False
    offloads_state: bool = False
    drops_gradients: bool = False
    device: str = "cpu"
    own_batches: bool = False
    persistent: int = 1_000_000
    horizon: int = 4
    cp: int = 1
    share: float = 1.0
    device_speeds: tuple[float, ...] = ()
    memory_limits: tuple[int, ...] = ()
    kept_layers: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        config: Config,
        num_ranks: int,
        checkpoints: bool,
        device: str,
        state_dtype: str = "fp32",
    ) -> Layout:
        """Returns the layout of a configuration; a sample is what a rank reads in a microbatch."""
        pp, tp = config.pipeline_parallel_degree, config.tensor_parallel_degree
        replicas = num_ranks // (pp * tp)
        return cls(
            pp,
            tp,
            replicas // config.context_parallel_degree,
            config.shard_size(replicas),
            config.sharded_data_parallel_degree > 1,
            microbatches=config.microbatches,
            schedule=config.pipeline,
            chunks=config.virtual_stages if pp > 1 else 1,
            active=min(config.active_microbatches or config.microbatches, config.microbatches),
            checkpoints=checkpoints,
            offload=config.offload_activations,
            in_memory=config.optimize == "memory",
            spreads_experts=config.expert_parallel_degree > 1,
            precision="fp16" if config.fp16 else "bf16" if config.bf16 else "fp32",
            state_dtype=state_dtype,
            masters=config.bf16_masters,
            has_owners=config.optimizer_state == "tensors",
            offloads_state=config.offload_optimizer_state,
            drops_gradients=config.update_in_backward,
            device=device,
            own_batches=not config.prescaled_batch,
            persistent=config.sdp_param_persistence_threshold,
            horizon=config.activation_loading_horizon,
            cp=config.context_parallel_degree,
        )

    @property
    def num_ranks(self) -> int:
        """Returns the number of devices."""
        return self.pp * self.tp * self.replicas

    @property
    def computed_samples(self) -> float:
        """Returns the samples of a microbatch that a rank computes, in parts of sequences."""
        return self.microbatch * self.share / self.cp

    @property
    def replicas(self) -> int:
        """Returns the number of ranks with equal parameters; `cp` of them read one batch."""
        return self.rdp * self.cp

    @property
    def axes(self) -> str:
        """Returns the letters of the axes from slow to fast; C where several ranks read a batch."""
        if self.cp == 1:
            return self.placement
        return _C.ProcessGrid(self.num_ranks, self.pp, self.tp, self.cp, self.placement).placement

    @property
    def samples(self) -> int:
        """Returns the samples of a step, over all ranks."""
        return self.microbatch * self.microbatches * self.rdp

    @property
    def width(self) -> int:
        """Returns the bytes of an element in the precision of the layout."""
        return 4 if self.precision == "fp32" else 2

    @property
    def cuts_parameters(self) -> bool:
        """Returns whether a rank keeps less than whole parameters."""
        return self.shards_parameters and self.shard > 1

    @cached_property
    def shares(self) -> Shares:
        """Returns the shares in the table of borders of docs/design/tensor_parallelism.md."""
        own = float(self.tp) if self.own_batches else 1.0
        return Shares(1 / self.tp, own / self.tp, own / self.tp if self.in_memory else own)

    @property
    def shape(self) -> StepShape:
        """Returns how a step passes the pipeline."""
        return StepShape(self.schedule, self.microbatches, self.active)

    @property
    def kept(self) -> tuple[int, ...]:
        """Returns the microbatches whose activations each pipeline rank keeps."""
        return _kept(self.schedule, self.pp, self.chunks, self.microbatches, self.active)

    @cached_property
    def bucket_bytes(self) -> int:
        """Returns the bytes of gradients that are reduced together by default."""
        return bucket_cap_bytes(DEFAULT_MB, torch.device(self.device))

    def config(self) -> dict[str, Any]:
        """Returns the configuration of `smp.init`: keys that differ from the defaults."""
        return {key: value for key, value in self._keys().items() if value is not None}

    def repeats(self, part: Part) -> bool:
        """Returns whether a backward computes a part again."""
        return self.checkpoints and part.is_layer and not part.is_kept

    def has(self, values: Mapping[str, Any]) -> bool:
        """Returns whether the configuration of the layout has some values, given or default."""
        own = Config.from_dict(self.config())
        return all(getattr(own, key) == value for key, value in values.items())

    def _keys(self) -> dict[str, Any]:
        several, split, piped = self.num_ranks > 1, self.tp > 1, self.pp > 1
        return {
            "pipeline_parallel_degree": self.pp,
            "tensor_parallel_degree": self.tp,
            "context_parallel_degree": self.cp if self.cp > 1 else None,
            "microbatches": self.microbatches,
            "ddp": several or None,
            "active_microbatches": self.active if self.microbatches > 1 else None,
            "pipeline": self.schedule if piped else None,
            "virtual_stages": self.chunks if piped and self.chunks > 1 else None,
            "prescaled_batch": split or None,
            "optimize": "speed" if split and not self.in_memory else None,
            "expert_parallel_degree": self.tp if self.spreads_experts else None,
            "sharded_data_parallel_degree": self.shard if self.cuts_parameters else None,
            "shard_optimizer_state": (self.shard > 1 and not self.shards_parameters) or None,
            self.precision: True if self.precision != "fp32" else None,
            "bf16_masters": self.masters if self.masters != "fp32" else None,
            "offload_activations": self.offload or None,
            "offload_optimizer_state": self.offloads_state or None,
            "update_in_backward": self.drops_gradients or None,
            "placement_strategy": self.placement if several else None,
            "device_speeds": list(self.device_speeds) or None,
            "partition_memory_limit": list(self.memory_limits) or None,
        }

    def text(self) -> str:
        """Returns degrees and choices in few words, for tables."""
        words = [f"pp {self.pp}", f"tp {self.tp}", f"dp {self.rdp}"]
        if self.spreads_experts:
            words.insert(2, f"ep {self.tp}")
        if self.cp > 1:
            words.insert(-1, f"cp {self.cp}")
        if self.shard > 1:
            words.append(f"{'sdp' if self.shards_parameters else 'opt'} {self.shard}")
        words.append(f"{self.microbatches} x {self.microbatch}")
        if self.pp > 1:
            words.append(self.schedule + (f" {self.chunks}" if self.chunks > 1 else ""))
        if self.checkpoints:
            kept = f" but {len(self.kept_layers)} layers" if self.kept_layers else ""
            words.append(("ckpt+offload" if self.offload else "ckpt") + kept)
        elif self.offload == "all":
            words.append("offload")
        return ", ".join(words)


#: Keys of the configuration that a layout decides.
KEYS = frozenset(Layout()._keys()) - {"fp32", "ddp"}


# Layouts share few schedules, and a search asks for each of them thousands of times.
@cache
def _kept(policy: str, pp: int, chunks: int, microbatches: int, active: int) -> tuple[int, ...]:
    return tuple(kept_by(policy, pp, chunks, microbatches, active))
