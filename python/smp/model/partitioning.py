"""Decides which pipeline rank owns which module of one model."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import nn

import smp._C as _C
from smp import activations
from smp.activations import TransformersCheckpointing
from smp.partition.costs import Trace
from smp.partition.decide import Fastest
from smp.partition.decision import Decision
from smp.partition.devices import stage_speeds
from smp.partition.expected_memory import Expected, expect
from smp.partition.fastest import StepShape
from smp.partition.room import device_room_bytes, state_factor
from smp.partition.together import Demands, ModulePlaces, decide_together
from smp.partition.trace_choice import TraceOptions
from smp.world import runtime
from smp.world.placement_map import ranges

_log = logging.getLogger("smp")


class Partitioning:
    """Decides the partition of one model, once.

    Args:
        current: the runtime.
        root: the user's model.
        trace: options of the trace.
        honoured: settings of gradient checkpointing in transformers.

    Attributes:
        decision: owners of the modules; None before the decision.
        expected: memory of this rank under the decision.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        root: nn.Module,
        trace: TraceOptions,
        honoured: TransformersCheckpointing,
    ) -> None:
        self._current = current
        self._root = root
        self.trace_options = trace
        self._honoured = honoured
        self._followed: Path | None = None  # partition of a checkpoint
        self.decision: Decision | None = None
        self.expected: Expected | None = None

    @property
    def wants_trace(self) -> bool:
        """True if the partition depends on a trace."""
        config = self._current.rank.config
        is_open = config.auto_partition and not config.skip_tracing and self._followed is None
        is_open = is_open and self._root not in self._current.wrapped.placed
        return self._current.rank.sizes["pp"] > 1 and is_open

    def follow(self, path: Path, num_chunks: int) -> None:
        """Makes a file decide the partition, if it has as many stages as this run.

        Args:
            path: file like `partition_file` of the configuration, which has precedence.
            num_chunks: stages per rank in the file.
        """
        if self._num_chunks == num_chunks:
            self._followed = path

    def decide(self, trace: Trace | None) -> Decision:
        """Decides the partition of this model. Collective over all ranks.

        Args:
            trace: trace of the model on the first rank, if there is one.

        Raises:
            ValueError: on every rank, for a model that cannot be partitioned as configured.
        """
        current, config = self._current, self._current.rank.config
        given = current.rank.given
        self._check_file()
        demands = Demands(
            file=config.partition_file or self._followed,
            num_chunks=self._num_chunks,
            memory_limits=config.memory_limits,
            speeds=stage_speeds(config.device_speeds or (), current.rank.grid),
            room_bytes=device_room_bytes(current.rank.device, current.rank.local_size)
            // max(1, current.wrapped.num_wrapped),
            whole=activations.units(self._root.modules()) | set(self._honoured.layers),
            fastest=self._fastest(),
            is_weighed=given.get("memory_weight") is not None or "optimize" in given,
            earlier=self._earlier(),
        )
        decision = decide_together(
            current.rank,
            self._root,
            (lambda: trace) if self.wants_trace else None,
            demands,
        )
        self.decision = decision
        if current.rank.sizes["pp"] > 1:
            current.wrapped.placed[self._root] = ModulePlaces.of(decision)
        self.expected = expect(current.rank, decision, trace is not None)
        if current.rank.global_rank == 0 and current.rank.sizes["pp"] > 1:
            ranks = [current.rank.on_pipeline_rank(p) for p in range(current.rank.sizes["pp"])]
            for line in decision.words([ranges(own) for own in ranks]):
                _log.info("smp: %s", line)
        activations.note_placement(decision)
        activations.settle_marks(decision.modules)
        return decision

    def _earlier(self) -> ModulePlaces | None:
        """Returns the places where an earlier wrapper of the same model has left its parameters.

        Raises:
            ValueError: on every rank, if modules were added or removed meanwhile.
        """
        placed: ModulePlaces | None = self._current.wrapped.placed.get(self._root)
        num_modules = sum(1 for _ in self._root.modules())
        if placed is not None and len(placed.partition_idxs) != num_modules:
            raise ValueError(
                f"{_C.rank_prefix()}{type(self._root).__name__} was wrapped before with "
                f"{len(placed.partition_idxs)} modules and has {num_modules} now, while its "
                "parameters are on the ranks of that partition; change modules before the model "
                "is wrapped for the first time, or load a checkpoint into a new one"
            )
        return placed

    def _fastest(self) -> Fastest | None:
        """Returns the inputs of the search for the shortest step."""
        rank = self._current.rank
        config = rank.config
        if not config.auto_partition or rank.sizes["pp"] == 1:
            return None
        active = config.active_microbatches or config.microbatches
        shape = StepShape(config.pipeline, config.microbatches, active)
        factor = state_factor(self._root.parameters(), config, rank.shard_size)
        return Fastest(shape, state_factor=factor)

    @property
    def _num_chunks(self) -> int:
        """Number of stages per rank."""
        rank = self._current.rank
        return 1 if rank.sizes["pp"] == 1 else rank.config.virtual_stages

    def _check_file(self) -> None:
        """Refuses a partition file, which describes one model, if there are several.

        Raises:
            ValueError: on every rank.
        """
        config, wrapped = self._current.rank.config, self._current.wrapped
        if wrapped.num_wrapped < 2:
            return
        if config.partition_file is not None:
            raise ValueError(
                f"{_C.rank_prefix()}smp config: partition_file is for one model, and "
                f"{wrapped.num_wrapped} were wrapped ({wrapped.candidates}); leave "
                "it out, or put the models into one module"
            )
