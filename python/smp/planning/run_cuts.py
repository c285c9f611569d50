"""Cuts a model into the stages of a run's partition, also inside layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from smp.config.schema import Config
from smp.partition import trace_flops
from smp.partition.costs import Trace
from smp.partition.decision import Decision
from smp.partition.trace import trace
from smp.planning.decided import Run, decided, scaled
from smp.planning.layout import Layout
from smp.planning.recomputed import repeated_layers
from smp.planning.stages import Stage, of_parts
from smp.planning.traced_model import TracedModel
from smp.world.log import first_rank_log


def stages_of(model: TracedModel, decision: Decision) -> list[Stage]:
    """Returns the stages that a partition makes of a model.

    Args:
        model: the model with its costs.
        decision: partition of its modules.
    """
    size = decision.num_partitions
    chunks = decision.chunk_idxs or (0,) * len(decision.modules)
    stage_of = {
        module: chunk * size + rank
        for module, rank, chunk in zip(
            decision.modules, decision.partition_idxs, chunks, strict=True
        )
    }
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
        self._layers = repeated_layers(model.root)
        self._device = device

    def stages(self, layout: Layout, precision: str, room_bytes: int) -> list[Stage]:
        """Returns the stages of a layout with several pipeline ranks.

        Args:
            layout: layout of the run.
            precision: precision of its parameters.
            room_bytes: bytes that the partition may take on a rank.

        Raises:
            ValueError: the library cannot partition the model so.
        """
        return stages_of(self._model, self._decided(layout, precision, room_bytes))

    def _decided(self, layout: Layout, precision: str, room_bytes: int) -> Decision:
        values = layout.config(precision)
        run = Run(
            Config.from_dict(values),
            frozenset(values),
            layout.num_ranks,
            layout.checkpoints,
            room_bytes,
            self._device,
        )
        costs = _of_samples(self._costs, layout.microbatch)
        costs = scaled(costs, self._model.root, layout.shares, layout.spreads_experts)
        with _silent():
            return decided(self._model.root, costs, run, self._layers if run.checkpoints else ())


def _of_samples(traced: Trace, samples: int) -> Trace:
    """Multiplies all figures of a trace of one sample, which are linear in the samples."""
    return replace(
        traced,
        costs=tuple(
            replace(
                cost,
                forward_flops=samples * cost.forward_flops,
                backward_flops=samples * cost.backward_flops,
                activation_bytes=samples * cost.activation_bytes,
            )
            for cost in traced.costs
        ),
        values=tuple(
            replace(
                value,
                num_bytes=samples * value.num_bytes,
                flops=samples * value.flops,
                activation_bytes=samples * value.activation_bytes,
            )
            for value in traced.values
        ),
    )


@contextmanager
def _silent() -> Iterator[None]:
    """Silences warnings about partitions that do not fit: they are no plans."""
    level = first_rank_log.logger.level
    first_rank_log.logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        first_rank_log.logger.setLevel(level)
