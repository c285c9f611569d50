"""What stands behind a DistributedModel: partition, server, reducer, and the steps over them."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from smp import _C, activations, data_parallel
from smp.model.parts import ModelParts, make_whole
from smp.model.state_loading import StateLoader
from smp.observe.first_step import FirstStepCheck
from smp.partition.capture import Capture
from smp.partition.costs import Trace
from smp.partition.decide import Decision
from smp.partition.together import Wishes, decide_together
from smp.partition.trace_choice import TraceOptions
from smp.pipeline import PipelineHub, PipelineLink
from smp.pipeline.chosen_schedule import ChosenSchedule, choose_schedule
from smp.pipeline.opening import check_order, open_pipeline
from smp.precision import LossScaler, show_gradients
from smp.storage.flat_parameters import FlatParameters
from smp.storage.holdings import Holding, master_of
from smp.storage.masters import make_holdings
from smp.storage.sharded import ShardedParameters
from smp.tensor_parallel.registry import Registration
from smp.tensor_parallel.sharding import interval_of
from smp.world import comm, runtime

_log = logging.getLogger("smp")


class Engine:
    """Owned by one DistributedModel; everything in it exists after :meth:`partition`.

    Args:
        current: the runtime that the model was wrapped under.
        idx: number of the model among those of this runtime.
        root: the user's model.
        trace: how the model is traced for the automatic partition.
        overlap, passes_per_reduction, average, bucket_cap_bytes: of the gradient reduction.
        broadcast_buffers: whether each training step begins with the first replica's buffers.
        seed: of delayed initialisation.
        registrations: of the modules in it that were replaced by distributed ones.
    """

    def __init__(
        self,
        current: runtime.Runtime,
        idx: int,
        root: nn.Module,
        *,
        trace: TraceOptions,
        overlap: bool,
        passes_per_reduction: int,
        average: bool,
        bucket_cap_bytes: int,
        broadcast_buffers: bool,
        seed: int,
        registrations: Sequence[Registration] = (),
    ) -> None:
        self._current = current
        self.idx = idx
        self._root = root
        self.trace_options = trace
        self._overlap = overlap
        self._passes_per_reduction = passes_per_reduction
        self.averages = average
        self._bucket_cap_bytes = bucket_cap_bytes
        self._broadcast_buffers = broadcast_buffers
        self._seed = seed
        self.registrations = registrations
        self.parts: ModelParts | None = None
        self.decision: Decision | None = None
        self.link: PipelineLink | None = None
        self.server: _C.Server | None = None
        self.reducers: list[_C.Reducer] = []  # one per group of ranks, once there are some
        self._past_reductions = 0  # of reducers that others took the place of
        #: what this rank updates in place of parameters; None: the parameters themselves
        self.holdings: dict[nn.Parameter, Holding] | None = None
        #: with sharded data parallelism
        self.sharded: ShardedParameters | None = None
        #: with sharded optimizer state
        self.flat: FlatParameters | None = None
        self._dtypes = data_parallel.KeptDtypes([])
        self.trainable_bytes = 0  # on this rank, as on its peers in other replicas
        self.joins_step = False  # between begin and end
        self._has_begun = False  # a step that trains
        self._inside_step = False
        self.capture: Capture | None = None  # while the step function runs for the trace
        self._weights: Sequence[float] | None = None
        self._weight = 1.0
        #: decides on the loss scale; None: there is none
        self.loss_scaler: LossScaler | None = None
        self._weight_hooks: list[RemovableHandle] = []
        self._running_mb = 0
        self._has_updated = False
        #: sums buckets of gradients in place of the reducers
        self.comm_hook: data_parallel.CommHook | None = None
        #: while replicas may run out of batches (`smp.model.join`)
        self.uneven: data_parallel.UnevenBatches | None = None
        self._honoured = activations.HonouredModules(root)
        self._followed: Path | None = None  # partition of a checkpoint
        self.loader = StateLoader(root, registrations)
        self.first_step = FirstStepCheck(current, root, f"model {idx} ({type(root).__name__})")

    @property
    def partitioned(self) -> bool:
        return self.parts is not None

    @property
    def is_driver(self) -> bool:
        return self.server is None or self.server.is_driver

    def in_step(self) -> bool:
        return bool(_C.in_context()) if self.server is not None else self._inside_step

    # ---- partition

    @property
    def wants_trace(self) -> bool:
        """Does the partition depend on a trace?"""
        config = self._current.config
        is_open = config.auto_partition and not config.skip_tracing and self._followed is None
        return self._current.sizes["pp"] > 1 and is_open

    def follow_partition(self, path: Path, num_chunks: int) -> None:
        """Lets a file decide on the partition, if it is for as many stages as this run has.

        Args:
            path: as `partition_file` in the configuration, which comes first.
            num_chunks: stages per rank in it.
        """
        schedule = choose_schedule(self._current.config, self._current.sizes["pp"])
        if schedule.num_chunks == num_chunks:
            self._followed = path

    def partition(self, trace: Trace | None = None) -> None:
        """Decides the partition, moves parts to their ranks, joins the server. Collective.

        Args:
            trace: of the model, on the first rank, if there is one.
        """
        current = self._current
        config = current.config
        schedule = choose_schedule(config, current.sizes["pp"])
        self._check_files()
        wishes = Wishes(
            plan=config.partition_file or self._followed,
            num_chunks=schedule.num_chunks,
            memory_limit_bytes=config.partition_memory_limit or 0,
            kept=schedule.kept_microbatches,
            whole=activations.units(self._root.modules()) | set(self._honoured.layers),
        )
        decision = decide_together(
            self._root,
            config,
            current.sizes["pp"],
            (lambda: trace) if self.wants_trace else None,
            wishes,
        )
        self.decision = decision
        if current.global_rank == 0 and current.sizes["pp"] > 1:
            _log.info("%s", decision.text)
        activations.note_placement(decision)
        activations.settle_marks(decision.modules)
        self.parts = ModelParts(self._root, decision.partition_of, current.ranks["pp"])
        local = list(self.parts.named_parameters())
        self.first_step.before_placing(trace, local)
        if config.sharded_data_parallel_degree > 1:
            self.sharded = ShardedParameters(self._root, local)
            self.parts.place(current.device, self._seed, self.sharded.take)
            data_parallel.broadcast_from_first(list(self._root.buffers()))
            self.sharded.open()
            self.holdings = self.sharded.holdings
            self.parts.sharded = self.sharded
            self.loader.load_kept(self.parts)
        else:
            self._place_whole(local)
            if config.shard_optimizer_state and current.sizes["shard"] > 1:
                self._shard_optimizer_state(local)
            else:
                self.holdings = make_holdings(
                    self._root, local, bucket_cap_bytes=self._bucket_cap_bytes
                )
                show_gradients((self.holdings or {}).values())
        self.make_reducers()
        if current.sizes["pp"] > 1:
            self._join_pipeline(decision, schedule)
        self.first_step.placed(decision.modules, decision.names)
        current.partitioned.add(self.idx)
        _C.release_host_memory()  # whole values are gone for good

    def _place_whole(self, local: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Parameters are real, and the same on all replicas."""
        assert self.parts is not None
        self.parts.place(self._current.device, self._seed)
        self.loader.load_kept(self.parts)
        split = [p for _, p in local if interval_of(p) is not None]
        whole = [p for _, p in local if interval_of(p) is None]
        data_parallel.broadcast_from_first(whole + list(self._root.buffers()))
        data_parallel.broadcast_from_first(split, "rdp")

    def _shard_optimizer_state(self, local: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.flat = flat = FlatParameters(
            self._root,
            local,
            bucket_cap_bytes=self._bucket_cap_bytes,
            overlap=self._overlaps,
        )
        self.holdings = flat.holdings
        known, links = weakref.ref(flat), self._current.links

        def finish() -> None:
            last = known()  # None: the model was deleted
            if last is not None and links is not None and links.is_healthy:
                last.finish()

        self._current.on_shutdown(finish)

    @property
    def _overlaps(self) -> bool:
        """May ranks exchange gradients and parameters while others work?"""
        return self._overlap and self._current.config.overlapping_allreduce

    def make_reducers(self) -> None:
        """Lays out the gradients of this rank, for parameters of the dtypes that they have now.

        Collective over the replicas; not while a step runs.
        """
        assert self.parts is not None
        trainable = [(name, p) for name, p in self.parts.named_parameters() if p.requires_grad]
        self.trainable_bytes = sum(p.numel() * p.element_size() for _, p in trainable)
        self._dtypes = data_parallel.KeptDtypes(trainable)
        self._past_reductions = self.num_reductions
        self.reducers = []  # the former ones let go of the parameters
        self.reducers = data_parallel.make_reducers(
            trainable,
            target_of=master_of,
            bucket_cap_bytes=self._bucket_cap_bytes,
            overlap=self._overlaps,
            average=self.averages,
            passes_per_reduction=self._passes_per_reduction,
            hook=self.comm_hook,
        )

    def use_comm_hook(self, hook: data_parallel.CommHook) -> None:
        """Lets a hook sum gradients, in place of an earlier one. Collective over the replicas.

        Raises:
            ValueError: gradients are not summed by buckets that all replicas have whole.
            RuntimeError: gradients are on their way, or some are kept that are not summed yet.
        """
        data_parallel.refuse_comm_hook(self._overlaps)
        if self.joins_step or self.uneven is not None or any(r.in_step for r in self.reducers):
            raise RuntimeError(
                f"{_C.rank_prefix()}register_comm_hook is called between steps, outside of step "
                "functions and of model.join()"
            )
        if self.comm_hook is not None:
            self.comm_hook.take_over(hook)
            return
        if self._passes_per_reduction > 1 and self._has_trained():
            raise RuntimeError(
                f"{_C.rank_prefix()}register_comm_hook: gradients of "
                f"{self._passes_per_reduction} backward_passes_per_step are added up before they "
                "are summed over replicas, so the first hook is registered before training begins; "
                "others may take its place later"
            )
        self.comm_hook = hook
        if self.partitioned:
            self.make_reducers()

    def _has_trained(self) -> bool:
        has_grads = any(master_of(p).grad is not None for p in self._root.parameters())
        return has_grads or self._has_begun or self.num_reductions > 0

    def after_update(self) -> None:
        """Brings what was updated on this rank to where modules use it.

        Collective over the ranks that hold one copy of a sharded state. Nothing is to do while
        every rank updates all that its modules use.
        """
        if self.sharded is not None:
            self.sharded.after_update()
        if self.flat is not None:
            self.flat.after_update()
        if self._has_updated:
            _C.release_idle_host_memory()
        else:
            _C.release_host_memory()  # all that stays is there now
            self._has_updated = True

    # ---- precision

    @property
    def half_dtype(self) -> torch.dtype | None:
        """Dtype of the model's parameters and activations in 16-bit training."""
        return self._current.config.half_dtype

    @property
    def loss_scale(self) -> float:
        """What a loss is multiplied with before its backward; the host reads it."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.loss_scale

    @property
    def can_change_dtype(self) -> bool:
        """Of a model that is partitioned: nothing of it is elsewhere, or there twice."""
        return self._current.sizes["pp"] == 1 and self.holdings is None

    def watch_backward(self, output: Any) -> None:
        """Refuses backward without a loss scale, where it may be called without this library."""
        scaler = self.loss_scaler
        if scaler is None or not torch.is_grad_enabled():
            return
        if not scaler.is_dynamic and scaler.loss_scale == 1.0:
            return
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(self._check_scaled)

    def _check_scaled(self, grad: torch.Tensor) -> None:
        if self._current.num_scaled_backwards == 0 and self.loss_scale != 1.0:
            raise RuntimeError(
                f"{_C.rank_prefix()}backward began at a loss without its scale {self.loss_scale:g},"
                " which would make gradients in torch.float16 vanish; call model.backward(loss) "
                "instead of loss.backward()"
            )

    def use_loss_scaler(self, scaler: LossScaler) -> None:
        """From now on this one decides on the loss scale."""
        self.loss_scaler = scaler

    @property
    def num_reductions(self) -> int:
        """Steps whose gradients this rank has taken part in reducing."""
        now = sum(reducer.stats.num_reductions for reducer in self.reducers)
        return self._past_reductions + now

    def _check_files(self) -> None:
        """Files that describe one model cannot be meant for several.

        Raises:
            ValueError: on every rank.
        """
        config = self._current.config
        if self._current.num_wrapped < 2:
            return
        for key in ("partition_file", "schedule_file"):
            if getattr(config, key) is not None:
                raise ValueError(
                    f"{_C.rank_prefix()}smp config: {key} is for one model, and "
                    f"{self._current.num_wrapped} were wrapped ({self._current.candidates}); leave "
                    "it out, or put the models into one module"
                )

    def _join_pipeline(self, decision: Decision, schedule: ChosenSchedule) -> None:
        current = self._current
        hub = current.pipeline
        if hub is None:
            hub = current.pipeline = open_pipeline(current, schedule, decision)
        assert isinstance(hub, PipelineHub)
        check_order(current, hub, decision)
        self.server = hub.server
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
            writes=decision.index.writes,
        )
        names = decision.names
        if self.idx > 0:
            names = [f"{self.idx}:{name or '(root)'}" for name in names]
        depth = decision.depth_of(current.ranks["pp"])
        hub.add(self.link, names, decision.chunk_idxs or [0] * len(names), depth)
        # Last registered, first called: its threads may still be at work for the models.
        current.on_shutdown(hub.close)

    def close(self) -> None:
        """Lets go of the model, and of what others know of it. May be called twice."""
        hub = self._current.pipeline
        if self.link is not None and isinstance(hub, PipelineHub):
            hub.remove(self.link)
        if self.sharded is not None:
            self.sharded.uncover()
        if self.flat is not None:
            self.flat.uncover()
        self.reducers = []

    # ---- steps

    def begin_step(
        self,
        num_microbatches: int,
        trains: bool,
        weights: Sequence[float] | None,
        may_overlap: bool,
    ) -> None:
        """Joins a step. Collective over the replicas.

        Args:
            num_microbatches: of the step.
            trains: whether gradients are enabled.
            weights: of the microbatches on the driver, if they have different sizes.
            may_overlap: reduce gradients during backward.
        """
        self.joins_step = True
        self._has_begun |= trains
        self.honour_checkpointing()
        if self.sharded is not None:
            self.sharded.begin_step(num_microbatches, trains)
        if trains:
            syncs = self._broadcast_buffers and self._root.training
            first = 0 if self.uneven is None else self.uneven.announce(syncs)
            if syncs:
                data_parallel.broadcast_from_first(list(self._root.buffers()), first=first)
        if trains:
            for reducer in self.reducers:
                reducer.begin_step(num_microbatches, may_overlap)
            if weights is not None and self.averages and self.server is None:
                self._weigh_gradients(weights)

    def honour_checkpointing(self) -> None:
        """Takes over what transformers has been told of gradient checkpointing."""
        self._honoured.honour()

    def checkpoints(self) -> bool:
        """Is anything of this model to be checkpointed, as far as is known before it runs?"""
        return self._honoured.is_enabled or any(map(activations.is_marked, self._root.modules()))

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

    def root_weight(self, weight: float) -> float | torch.Tensor:
        """What gradients of a microbatch are multiplied with where its backward begins.

        Args:
            weight: of the microbatch in the mean over the batch.

        Returns:
            a number; with a dynamic loss scale a float64 tensor without dimensions on the device.
        """
        shared = weight if self.averages and self.server is not None else 1.0
        return shared if self.loss_scaler is None else self.loss_scaler.factor * shared

    def begin_microbatch(self, mb: int) -> None:
        """A body begins, without a server."""
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

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """Around a body of a step, which may read parameters outside of forwards."""
        return contextlib.nullcontext() if self.sharded is None else self.sharded.reading()

    def microbatch_done(self, mb: int) -> None:
        """All gradients of a microbatch have come."""
        for reducer in self.reducers:
            if reducer.in_step:
                reducer.finish_microbatch(mb)

    def leave_bodies(self) -> None:
        """No body runs any more, without a server."""
        self._inside_step = False

    def end_step(self, trains: bool) -> None:
        """Waits for the reduction of the step's gradients."""
        self.joins_step = False
        self._stop_weighing()
        if self.sharded is not None:
            self.sharded.end_step()
        if trains:
            if self.parts is not None and self.link is not None:
                self.parts.refuse_lost_gradients()
            self._dtypes.check()
            for reducer in self.reducers:
                reducer.end_step()

    def abandon_step(self) -> None:
        """Closes a step that failed; its gradients are lost. Not collective."""
        self.joins_step = False
        self._stop_weighing()
        if self.sharded is not None:
            self.sharded.abandon_step()
        for reducer in self.reducers:
            if reducer.in_step:
                reducer.cancel_step()

    # ---- state

    @property
    def _is_alone(self) -> bool:
        """Has this rank all of the model?"""
        return self._current.sizes["mp"] == 1

    def state_dict(self, gather_to_rank0: bool) -> dict[str, Any]:
        current = self._current
        if self.parts is None:
            is_wanted = not gather_to_rank0 or current.global_rank == 0
            return dict(self._root.state_dict()) if is_wanted else {}
        if self._is_alone:
            return self.parts.state(keep=not gather_to_rank0 or current.global_rank == 0)
        if not gather_to_rank0:
            return self.parts.merged(comm.allgather(self.parts.marked_state(), comm.MP_GROUP))
        if 0 not in current.groups["mp"]:
            self.parts.state(keep=False)
            return {}
        if current.global_rank != 0:
            comm.send(self.parts.marked_state(), 0, comm.RankType.WORLD_RANK)
            return {}
        states = [
            self.parts.marked_state()
            if rank == 0
            else comm.recv_from(rank, comm.RankType.WORLD_RANK)
            for rank in current.groups["mp"]
        ]
        return self.parts.merged(states)

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool, same_partition_load: bool
    ) -> torch.nn.modules.module._IncompatibleKeys:
        return self.loader.load(self.parts, state, strict, same_partition_load)

    def gather_to_cpu(self) -> None:
        """Makes every parameter real on the CPU of every rank and gives modules their forward."""
        state = self.state_dict(gather_to_rank0=False)
        if self.link is not None:
            self.link.disconnect()
        if self.sharded is not None:
            self.sharded.make_real()
            self.sharded = None
        is_local = self.parts.is_local_parameter if self.parts is not None else None
        make_whole(self._root, state, is_local)
