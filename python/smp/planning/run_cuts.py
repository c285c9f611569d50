"""Decides the partition that a run would have, and cuts a model into its stages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

import smp._C as _C
from smp.config.schema import Config
from smp.modules.sequence_blocks import find_blocks, indivisible
from smp.partition import trace_flops
from smp.partition.costs import Trace
from smp.partition.decide import Fastest, decide
from smp.partition.decision import Decision
from smp.partition.devices import stage_speeds
from smp.partition.room import state_factor
from smp.partition.together import without_cuts
from smp.partition.trace import trace
from smp.partition.tree import build_tree
from smp.planning.hardware import Hardware
from smp.planning.kept_layers import marked
from smp.planning.kinds import Kinds
from smp.planning.layout import Layout
from smp.planning.profile import ModelProfile
from smp.planning.stages import Stage, of_parts
from smp.planning.traced_model import (
    TracedModel,
    computing_in,
    layers_again,
)
from smp.world.log import first_rank_log

#: Dtypes of 16 bits that a model is cast to, by precision.
HALVES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Run:
    """A run whose partition is decided.

    Attributes:
        config: configuration of the run.
        given: keys of the configuration that were set explicitly.
        num_ranks: number of processes.
        checkpoints: each repeated layer is computed again in backward.
        kept_layers: names of layers that are not.
        rooms: bytes of memory that the partition may take, by pipeline rank; empty: not known.
        device: type of device, which decides bucket sizes.
        state_dtype: storage of the optimizer's moments.
        kinds: the devices of all ranks, with speeds; None: not known, and all alike.
    """

    config: Config
    given: frozenset[str] = frozenset()
    num_ranks: int = 1
    checkpoints: bool = False
    rooms: tuple[int, ...] = ()
    device: str = "cpu"
    state_dtype: str = "fp32"
    kinds: Kinds | None = None
    kept_layers: tuple[str, ...] = ()

    @cached_property
    def layout(self) -> Layout:
        """Returns the layout of the run."""
        return Layout.of(
            self.config, self.num_ranks, self.checkpoints, self.device, self.state_dtype
        )

    @cached_property
    def grid(self) -> _C.ProcessGrid:
        """Returns the places of the ranks."""
        config = self.config
        return _C.ProcessGrid(
            self.num_ranks,
            config.pipeline_parallel_degree,
            config.tensor_parallel_degree,
            config.context_parallel_degree,
            config.placement_strategy,
        )

    @cached_property
    def speeds(self) -> list[float]:
        """Returns the speeds of the pipeline ranks' devices; empty: all are alike."""
        return stage_speeds(self.config.device_speeds or (), self.grid)


def decided(root: nn.Module, traced: Trace, run: Run) -> Decision:
    """Decides as a run does, which does not count what checkpoints save.

    Args:
        root: the model.
        traced: the model's costs, as `scaled` returns them.
        run: the run.
    """
    config = run.config
    pp_size = config.pipeline_parallel_degree
    fastest = None
    if pp_size > 1 and not {"memory_weight", "optimize"} & run.given:
        factor = state_factor(root.parameters(), config, run.layout.shard)
        fastest = Fastest(run.layout.shape, run.rooms, factor)
    shares_tokens = config.context_parallel_degree > 1
    with indivisible([block for _, block in find_blocks(root)] if shares_tokens else ()):
        index = build_tree(root, traced)
    decision = decide(
        root,
        config,
        pp_size,
        index=index,
        file=config.partition_file,
        num_chunks=run.layout.chunks,
        memory_limits=config.memory_limits,
        speeds=run.speeds,
        fastest=fastest,
    )
    if decision.decided_by != "auto":
        return decision
    again = layers_again(root, run.kept_layers) if run.checkpoints else {}
    return without_cuts(root, traced, again.values(), fastest, decision)


def scaled(model: TracedModel, traced: Trace, layout: Layout) -> Trace:
    """Returns a trace of one sample with the samples and activations of a rank of a layout.

    All figures are linear in the samples. A rank of a tensor-parallel group keeps its share.

    Args:
        model: the model.
        traced: a trace of it.
        layout: layout of the run.
    """
    samples, shares = layout.computed_samples, layout.shares

    def kept(idx: int, num_bytes: float) -> int:
        return int(samples * model.kept(idx, num_bytes, layout.spreads_experts).on(shares))

    return replace(
        traced,
        costs=tuple(
            replace(
                cost,
                forward_flops=samples * cost.forward_flops,
                backward_flops=samples * cost.backward_flops,
                activation_bytes=kept(idx, cost.activation_bytes),
            )
            for idx, cost in enumerate(traced.costs)
        ),
        values=tuple(
            replace(
                value,
                num_bytes=int(shares.whole * layout.microbatch * value.num_bytes),
                flops=samples * value.flops,
                activation_bytes=kept(value.producer, value.activation_bytes),
            )
            for value in traced.values
        ),
    )


def stages_of(model: TracedModel, decision: Decision) -> list[Stage]:
    """Returns the stages that a partition makes of a model.

    Args:
        model: the model with its costs.
        decision: partition of its modules.
    """
    size = decision.num_partitions
    chunks = decision.chunk_idxs or (0,) * len(decision.modules)
    places = zip(decision.modules, decision.partition_idxs, chunks, strict=True)
    stage_of = {module: chunk * size + rank for module, rank, chunk in places}
    by_module = [stage_of[module] for module in model.costs.modules]
    return of_parts(model.cut(by_module, size * decision.num_chunks, size), size)


class RunCuts:
    """The partitions that runs of a model would have.

    A run weighs modules by the rates that it assumes for its type of device, not by those of the
    plan's hardware.
    """

    def __init__(self, model: TracedModel, device: str) -> None:
        """Traces the model once more.

        Args:
            model: model on the meta device.
            device: type of the devices of the run: "cpu" or "cuda".

        Raises:
            TraceError: the forward raised.
        """
        self._model = model
        args, kwargs = model.call
        rate = trace_flops.flops_per_byte(device)
        traced = trace(model.root, args, kwargs, device=torch.device("cpu"), flops_per_byte=rate)
        self._costs = replace(traced, cost_per_link_byte=trace_flops.flops_per_link_byte(device))

    def stages(self, layout: Layout, rooms: tuple[int, ...]) -> list[Stage]:
        """Returns the stages of a layout with several pipeline ranks.

        Args:
            layout: layout of the run.
            rooms: bytes that the partition may take, by pipeline rank.

        Raises:
            ValueError: the library cannot partition the model so.
        """
        values = layout.config()
        run = Run(
            Config.from_dict(values),
            frozenset(values),
            layout.num_ranks,
            layout.checkpoints,
            rooms,
            layout.device,
            kept_layers=layout.kept_layers,
        )
        with _silent():
            decision = decided(self._model.root, scaled(self._model, self._costs, layout), run)
        return marked(stages_of(self._model, decision), layout.kept_layers, layout.pp)


@contextmanager
def _silent() -> Iterator[None]:
    """Silences warnings about partitions that do not fit: they are no plans."""
    level = first_rank_log.logger.level
    first_rank_log.logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        first_rank_log.logger.setLevel(level)


@dataclass(frozen=True)
class View:
    """A model as a plan uses it.

    Attributes:
        profile: chain of its layers.
        cuts: partitions that runs would have; None: stages are cut between parts of the profile.
    """

    profile: ModelProfile
    cuts: RunCuts | None = None

    @classmethod
    def of(
        cls,
        root: nn.Module,
        call: tuple[Sequence[Any], dict[str, Any]],
        device: Hardware,
        precision: str,
    ) -> View:
        """Traces a model on the meta device; `call` has the arguments of one sample.

        Raises:
            TraceError: the forward raised.
        """
        with computing_in(root, HALVES[precision]):
            traced = TracedModel(root, *call, device.flops_per_byte(precision))
        return cls(traced.profile(), RunCuts(traced, device.type))


def sample_seconds(
    root: nn.Module, call: tuple[Sequence[Any], dict[str, Any]], device: Hardware, precision: str
) -> float:
    """Returns the seconds of a device for the work on one sample, forward and backward.

    Raises:
        TraceError: the forward raised.
    """
    with computing_in(root, HALVES[precision]):
        traced = TracedModel(root, *call, device.flops_per_byte(precision))
    work = sum(part.forward.total + part.backward.total for part in traced.profile().chain)
    return work / device.rate(precision)
