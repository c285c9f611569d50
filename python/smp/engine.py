"""What stands behind a DistributedModel: partition, server, reducer, and the steps over them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from smp import _C, comm, data_parallel, memory, runtime
from smp.chosen_schedule import ChosenSchedule, choose_schedule
from smp.model_parts import PARTIAL_MARK, ModelParts
from smp.partition.capture import Capture
from smp.partition.costs import Trace
from smp.partition.decide import Decision
from smp.partition.together import Wishes, decide_together
from smp.partition.trace_choice import TraceOptions
from smp.pipeline import PipelineLink

_log = logging.getLogger("smp")


class Engine:
    """Owned by one DistributedModel; everything in it exists after :meth:`partition`.

    Args:
        current: the runtime that the model was wrapped under.
        root: the user's model.
        trace: how the model is traced for the automatic partition.
        overlap, passes_per_reduction, average, bucket_cap_bytes: of the gradient reduction.
        broadcast_buffers: whether each training step begins with the first replica's buffers.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        root: nn.Module,
        *,
        trace: TraceOptions,
        overlap: bool,
        passes_per_reduction: int,
        average: bool,
        bucket_cap_bytes: int,
        broadcast_buffers: bool,
    ) -> None:
        self._current = current
        self._root = root
        self._trace_options = trace
        self._overlap = overlap
        self._passes_per_reduction = passes_per_reduction
        self._average = average
        self._bucket_cap_bytes = bucket_cap_bytes
        self._broadcast_buffers = broadcast_buffers
        self.parts: ModelParts | None = None
        self.decision: Decision | None = None
        self.link: PipelineLink | None = None
        self.server: _C.Server | None = None
        self._reducer: _C.Reducer | None = None
        self._num_steps = 0
        self._inside_step = False
        self.capture: Capture | None = None  # while the step function runs for the trace
        self._weights: Sequence[float] | None = None
        self._weight = 1.0
        self._weight_hooks: list[RemovableHandle] = []
        self._running_mb = 0

    @property
    def partitioned(self) -> bool:
        return self.parts is not None

    @property
    def is_driver(self) -> bool:
        return self.server is None or self.server.is_driver

    def in_step(self) -> bool:
        return bool(_C.in_context()) if self.server is not None else self._inside_step

    # ---- partition

    def partition(self, run_body: Callable[[], object] | None = None) -> None:
        """Decides the partition, moves parts to their ranks, opens the server. Collective.

        Args:
            run_body: runs the step function on the first microbatch, for the trace.
        """
        current = self._current
        config = current.config
        traces = current.sizes["pp"] > 1 and config.auto_partition and not config.skip_tracing

        def make_trace() -> Trace | None:
            return None if run_body is None else self._trace(run_body)

        schedule = choose_schedule(config, current.sizes["pp"])
        wishes = Wishes(
            plan=config.partition_file,
            num_chunks=schedule.num_chunks,
            memory_limit_bytes=config.partition_memory_limit or 0,
            kept=schedule.kept_microbatches,
        )
        decision = decide_together(
            self._root, config, current.sizes["pp"], make_trace if traces else None, wishes
        )
        self.decision = decision
        if current.global_rank == 0 and current.sizes["pp"] > 1:
            _log.info("%s", decision.text)
        self.parts = ModelParts(self._root, decision.partition_of, current.ranks["pp"])
        self.parts.place(current.device)
        local = list(self.parts.named_parameters())
        communicator = current.comms.dp
        if communicator is not None:
            data_parallel.broadcast_initial(
                communicator, [p for _, p in local] + [b for b in self._root.buffers()]
            )
        self._reducer = data_parallel.make_reducer(
            [(name, p) for name, p in local if p.requires_grad],
            communicator,
            bucket_cap_bytes=self._bucket_cap_bytes,
            overlap=self._overlap and current.config.overlapping_allreduce,
            average=self._average,
            passes_per_reduction=self._passes_per_reduction,
        )
        if current.sizes["pp"] > 1:
            self._open_server(decision, schedule)
        current.on_shutdown(self.close)

    def _trace(self, run_body: Callable[[], object]) -> Trace | None:
        """Traces the model with the arguments that the step function calls it with."""
        outside = _C.RandomState.capture(str(self._current.device))
        self.capture = Capture(self._root, self._trace_options)
        try:
            return self.capture.run(run_body)
        finally:
            self.capture = None
            outside.restore()

    def _open_server(self, decision: Decision, schedule: ChosenSchedule) -> None:
        current = self._current
        assert self._reducer is not None and current.links is not None
        links = current.links
        assert links.mailbox is not None and links.board is not None
        config = current.config
        self.server = _C.Server(
            links.mailbox,
            links.board,
            global_rank=current.global_rank,
            pp_ranks=list(current.groups["pp"]),
            order_ranks=list(current.groups["dp"]),
            policy=schedule.policy,
            actions=schedule.lists[current.ranks["pp"]] if schedule.lists else None,
            num_chunks=schedule.num_chunks,
            chunk_idxs=decision.chunk_idxs or [0] * len(decision.modules),
            active_microbatches=config.active_microbatches or 0,
            deterministic=config.deterministic_server,
            static_mode=config.static_mode,
            device=str(current.device),
            timeout_s=current.settings.timeout_s,
            module_names=decision.names,
            timeline=current.timeline,
        )
        self.server.set_error_reporter(links.report_raised)
        self.server.set_microbatch_done(self._microbatch_done)
        owners = [
            None if idx is None else current.groups["pp"][idx] for idx in decision.owner_partitions
        ]
        self.link = PipelineLink(
            self._root,
            decision.modules,
            owners,
            decision.names,
            current.global_rank,
            current.device,
            later_stages=decision.later_stages if self.server.is_driver else (),
        )
        self.link.connect(self.server)
        current.server = self.server

    def close(self) -> None:
        """Ends the server's threads and lets go of the model. May be called twice."""
        if self.server is not None:
            self.server.close()
        if self.link is not None:
            self.link.disconnect()
        self._reducer = None

    # ---- steps

    def begin_step(
        self, name: str, num_microbatches: int, trains: bool, weights: Sequence[float] | None
    ) -> int:
        """Opens a step on all ranks of the replica.

        Args:
            name: of the step function.
            num_microbatches: of this rank.
            trains: whether gradients are enabled.
            weights: of the microbatches on the driver, if they have different sizes.

        Returns:
            the number of microbatches of the driver, whose data count.
        """
        if self.server is not None:
            assert self.link is not None
            num_microbatches = self.server.begin_step(name, num_microbatches)
            self.link.begin_step()
        communicator = self._current.comms.dp
        if trains and communicator is not None and self._broadcast_buffers and self._root.training:
            buffers = [b for b in self._root.buffers()]
            if buffers:
                data_parallel.broadcast_initial(communicator, buffers)
        if trains:
            assert self._reducer is not None
            self._reducer.begin_step(num_microbatches)
            if weights is not None and self._average and self.server is None:
                self._weigh_gradients(weights)
        self._num_steps += 1
        return num_microbatches

    def _weigh_gradients(self, weights: Sequence[float]) -> None:
        """Scales gradients of this step by the weight of their microbatch.

        At the parameters, because without a pipeline backward may be called without this library.
        """
        assert self.parts is not None
        self._weights = weights
        self._weight_hooks = [
            parameter.register_hook(lambda grad: grad * self._weight)
            for _, parameter in self.parts.named_parameters()
            if parameter.requires_grad
        ]

    def _stop_weighing(self) -> None:
        for handle in self._weight_hooks:
            handle.remove()
        self._weights, self._weight, self._weight_hooks = None, 1.0, []

    def root_weight(self, weight: float) -> float:
        """What gradients of a microbatch are multiplied with where its backward begins.

        Args:
            weight: of the microbatch in the mean over the batch.
        """
        return weight if self._average and self.server is not None else 1.0

    def run_step(
        self, num_microbatches: int, body: Callable[[int], None], others: Sequence[Engine] = ()
    ) -> None:
        """Runs the bodies; random numbers depend on (seed, replica, step, microbatch) alone.

        Args:
            num_microbatches: how many there are.
            body: runs one of them.
            others: engines of further models, whose step this is as well.
        """
        device = str(self._current.device)
        outside = _C.RandomState.capture(device)
        seed = torch.initial_seed() & (2**64 - 1)
        for part in (self._current.ranks["dp"], self._num_steps):
            seed = _C.mix_seed(seed, part)
        try:
            if self.server is not None:
                self.server.run_step(num_microbatches, seed, body)
            else:
                self._run_alone(num_microbatches, seed, body, (self, *others))
        finally:
            outside.restore()

    def _run_alone(
        self,
        num_microbatches: int,
        seed: int,
        body: Callable[[int], None],
        engines: Sequence[Engine],
    ) -> None:
        device = str(self._current.device)
        timeline = self._current.timeline
        timeline.begin_step(self._num_steps - 1, num_microbatches)
        try:
            for mb in range(num_microbatches):
                _C.seed_generators(_C.mix_seed(seed, mb), device)
                for engine in engines:
                    engine._begin_microbatch(mb)
                timeline.begin_run(False, mb)
                with _C.TaskScope(self._num_steps, mb):
                    body(mb)
                timeline.end_run()
                for engine in engines:
                    engine._microbatch_done(mb)
            timeline.end_step()
        finally:
            for engine in engines:
                engine._inside_step = False

    def _begin_microbatch(self, mb: int) -> None:
        self._inside_step = True
        self._running_mb = mb
        if self._weights is not None:
            self._weight = self._weights[mb]

    def begin_backward_alone(self) -> None:
        """A body without a server goes on with its backward: another box in the timeline."""
        timeline = self._current.timeline
        if self._inside_step and timeline.is_on:
            timeline.end_run()
            timeline.begin_run(True, self._running_mb)

    def _microbatch_done(self, mb: int) -> None:
        if self.link is not None:
            self.link.microbatch_done(mb)
        if self._reducer is not None and self._reducer.in_step:
            self._reducer.finish_microbatch(mb)

    def end_step(self, trains: bool) -> None:
        """Waits for the reduction of the step's gradients."""
        self._stop_weighing()
        if trains:
            assert self._reducer is not None
            self._reducer.end_step()

    def abandon_step(self) -> None:
        """Closes a step that failed; its gradients are lost. Not collective."""
        self._stop_weighing()
        if self._reducer is not None and self._reducer.in_step:
            self._reducer.cancel_step()

    # ---- state

    def state_dict(self, gather_to_rank0: bool) -> dict[str, Any]:
        current = self._current
        if self.parts is None or current.sizes["pp"] == 1:
            state = dict(self._root.state_dict())
            return {} if gather_to_rank0 and current.global_rank != 0 else state
        if not gather_to_rank0:
            return self.parts.merged(comm.allgather(self.parts.local_state(), comm.PP_GROUP))
        if 0 not in current.groups["pp"]:
            return {}
        if current.global_rank != 0:
            comm.send(self.parts.local_state(), 0, comm.RankType.WORLD_RANK)
            return {}
        states = [
            self.parts.local_state()
            if rank == 0
            else comm.recv_from(rank, comm.RankType.WORLD_RANK)
            for rank in current.groups["pp"]
        ]
        return self.parts.merged(states)

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool, same_partition_load: bool
    ) -> torch.nn.modules.module._IncompatibleKeys:
        parts = self.parts
        if parts is None:
            if any(p.is_meta for p in self._root.parameters()):
                raise RuntimeError(
                    f"{_C.rank_prefix()}parameters on the meta device cannot take values before "
                    "the model is partitioned; load in a hook given to "
                    "register_post_partition_hook, or after the first step"
                )
            # All ranks still hold the whole model, so the values can go in at once; the
            # partition keeps what belongs to this rank.
            parts = ModelParts(self._root, dict.fromkeys(self._root.modules(), 0), 0)
        if state.get(PARTIAL_MARK) and self._current.sizes["pp"] > 1 and not same_partition_load:
            merged: dict[str, Any] = {}
            for part in comm.allgather(dict(state), comm.PP_GROUP):
                merged.update(part)
            state = merged
        elif state.get(PARTIAL_MARK) and same_partition_load:
            if self.parts is not None:
                expected = self.parts.local_state().keys()
                missing = [key for key in expected if key not in state]
                if strict and missing:
                    raise RuntimeError(
                        f"{_C.rank_prefix()}the partial state lacks {missing}; it was saved "
                        "under another partition: load it with same_partition_load=False"
                    )
                full = dict(self._root.state_dict())
                full.update(state)
                state = full
        return parts.load(state, strict)

    def gather_to_cpu(self) -> None:
        """Makes every parameter real on the CPU of every rank and gives modules their forward."""
        state = self.state_dict(gather_to_rank0=False)
        if self.link is not None:
            self.link.disconnect()
        cpu = torch.device("cpu")
        with torch.no_grad():
            for name, parameter in self._root.named_parameters():
                if self.parts is None or self.parts.is_local_parameter(parameter):
                    memory.make_real(parameter, cpu)
                else:
                    parameter.data = state[name].detach().clone()
            for module in self._root.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(cpu)
            for key, value in self._root.state_dict(keep_vars=True).items():
                if isinstance(value, torch.Tensor):
                    value.copy_(state[key])
