"""The engine of a `DistributedModel`: its owners, and their common work."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

import smp._C as _C
from smp import activations, data_parallel
from smp.activations import TransformersCheckpointing
from smp.compilation import CompiledParts
from smp.context_parallel.blocks import SequenceParts
from smp.model.backward_updates import Updates
from smp.model.buffers import ReplicaBuffers
from smp.model.gradients import GradientReduction
from smp.model.loss_weight import LossWeight
from smp.model.mask_places import MaskPlaces
from smp.model.partitioning import Partitioning
from smp.model.parts import ModelParts
from smp.model.pipeline_place import PipelinePlace
from smp.model.plain_states import guard_states
from smp.model.whole_state import WholeState
from smp.modules.compiled import CompileRequest
from smp.partition.capture import Capture
from smp.partition.costs import Trace
from smp.partition.trace_choice import TraceOptions
from smp.precision import LossScaler
from smp.precision.holdings import Holding
from smp.precision.operands import OperandCasts
from smp.storage.choose import make_storage
from smp.storage.protocol import Storage
from smp.tensor_parallel.registry import Registration
from smp.world import runtime


class CallsSeen(Protocol):
    """Sees the calls of models in a step that is run once more (`smp.observe.batch_check`)."""

    def on_output(self, model_idx: int, output: Any) -> Any: ...
    def follow(self, called_idx: int) -> None: ...
    def on_backward(
        self, roots: Sequence[Tensor], grads: Sequence[Tensor | None] | None
    ) -> None: ...


class Engine:
    """Makes the owners of one model, and brings them through partition and steps.

    Args:
        current: runtime under which the model was wrapped.
        idx: number of the model among those of this runtime.
        root: the user's model.
        trace: options of the trace for the automatic partition.
        overlap, passes_per_reduction, average, bucket_cap_bytes: options of the gradient
            reduction.
        broadcast_buffers: whether each training step begins with the first replica's buffers.
        seed: seed of delayed initialisation.
        registrations: registrations of the modules that distributed ones have replaced.
        compiled: compiled parts of the model.

    Attributes:
        partitioning: decides which rank has which module.
        parts: parts of the model on this rank; None before the partition, as the next two.
        storage: storage of the parameters on this rank.
        pipeline: the place of the model in a pipeline; None also without one.
        gradients: reduces gradients over replicas.
        mask_places: marks where masks are drawn, if they may not depend on the layout.
        sequences: blocks that compute parts of sequences.
        loss: weighs losses.
        state: state dicts of the whole model.
        capture: capture of the step function while it runs for the trace, or None.
        batch_pass: pass of the check of the loss that runs now, or None.
        uneven: handler of uneven batches inside of `smp.join`, or None.
        on_next_call: receives the arguments of the next call of the model.
        joins_step: whether a step of this model has begun and not ended.
        running_mb: microbatch whose body runs without a pipeline, or None.
        shows_whole: whether parameters have the values of other ranks (`smp.whole_parameters`).
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
        registrations: Sequence[Registration],
        compiled: CompiledParts,
    ) -> None:
        self._current = current
        self.idx = idx
        self._root = root
        self._bucket_cap_bytes = bucket_cap_bytes
        self._buffers = ReplicaBuffers(current.rank, root, broadcast_buffers)
        self._seed = seed
        self.registrations = registrations
        self.compiled = compiled
        self._honoured = TransformersCheckpointing(root)
        self.partitioning = Partitioning(current, root, trace, self._honoured)
        self.gradients = GradientReduction(
            current.rank,
            overlap=overlap,
            averages=average,
            passes_per_reduction=passes_per_reduction,
            bucket_cap_bytes=bucket_cap_bytes,
        )
        self.mask_places = MaskPlaces(current, idx, self.partitioning, compiled, lambda: self.label)
        self.sequences = SequenceParts(
            current.rank,
            root,
            lambda: self.label,
            lambda: self.in_step(),
            current.rank.config.context_parallel_ring_degree,
        )
        self.loss = LossWeight(current, lambda: self.gradients.is_hooked)
        self.state = WholeState(current.rank, root, registrations)
        self.operands = OperandCasts(root)
        self.parts: ModelParts | None = None
        self.storage: Storage | None = None
        self.pipeline: PipelinePlace | None = None
        self.capture: Capture | None = None
        self.batch_pass: CallsSeen | None = None
        self.uneven: data_parallel.UnevenBatches | None = None
        self.on_next_call: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self.joins_step = False
        self.shows_whole = False
        self._num_steps = 0
        self._has_failed = False  # whether the last step has failed
        self.running_mb: int | None = None
        self._has_updated = False

    @property
    def root(self) -> nn.Module:
        """The user's model."""
        return self._root

    @property
    def label(self) -> str:
        """Name of this model in messages."""
        millions = sum(p.numel() for p in self._root.parameters()) / 1e6
        return f"{self.idx}: {type(self._root).__name__} of {millions:.3g} M parameters"

    @property
    def partitioned(self) -> bool:
        return self.parts is not None

    @property
    def holdings(self) -> dict[nn.Parameter, Holding]:
        """Tensors that this rank updates instead of parameters, by parameter."""
        return {} if self.storage is None else self.storage.holdings

    def in_step(self) -> bool:
        return bool(_C.in_context()) if self.pipeline is not None else self.running_mb is not None

    # ---- partition

    def partition(self, trace: Trace | None = None) -> None:
        """Decides the partition, moves parts to their ranks, joins the pipeline. Collective.

        Args:
            trace: trace of the model on the first rank, if there is one.
        """
        current = self._current
        self.compiled.take()
        decision = self.partitioning.decide(trace)
        pp_rank = current.rank.ranks["pp"]
        storage = self.storage = make_storage(
            current.rank,
            self._root,
            lambda module: decision.partition_of[module] == pp_rank,
            bucket_cap_bytes=self._bucket_cap_bytes,
            overlap=self.gradients.overlaps,
        )
        parts = self.parts = ModelParts(self._root, decision.partition_of, pp_rank, storage)
        local = list(parts.named_parameters())
        for see in current.observers.model_placing:
            see(self, trace, local)
        storage.place(
            local,
            lambda on_ready: parts.place(current.rank.device, self._seed, on_ready),
            lambda: self.state.load_kept(parts),
        )
        if storage.mixes_dtypes:
            self.operands.begin()
        current.wrapped.has_holdings |= bool(storage.holdings)
        self._finish_on_shutdown(storage)
        self.lay_out_gradients()
        if current.rank.sizes["pp"] > 1:
            self.pipeline = PipelinePlace(current, self.idx, self._root, decision)
            if current.rank.config.half_dtype is not None:
                self.pipeline.modules.look_at = self.operands.look_at
        for placed in current.observers.model_placed:
            placed(self)
        self.compiled.place(decision, pp_rank)
        if self.pipeline is not None or not storage.shows_values:
            guard_states(self._root)
        current.wrapped.add_engine(self.idx, self)
        _C.release_host_memory()  # whole values are not needed any more

    def _finish_on_shutdown(self, storage: Storage) -> None:
        known = weakref.ref(storage)

        def finish() -> None:
            last = known()  # None: the model was deleted
            if last is not None:
                last.finish()

        self._current.on_shutdown(finish)

    def lay_out_gradients(self) -> None:
        """Lays out the gradients of this rank, for the present dtypes of the parameters.

        Collective over the replicas; not while a step runs.
        """
        assert self.parts is not None and self.storage is not None
        local = list(self.parts.named_parameters())
        self.gradients.lay_out(local, self.storage, self.parts.ties())

    def lay_out_thawed(self) -> None:
        """Lays out gradients again if the script has thawed parameters on all ranks.

        Collective over the replicas if it has. Nothing is done inside of a step.

        Raises:
            ValueError: the tensors that the optimizer updates were laid out without them.
            RuntimeError: gradients of several steps are being added up.
        """
        if self.storage is None or not self.gradients.has_frozen or self.gradients.in_step:
            return
        name = self.gradients.thawed()
        if name is not None:
            self.storage.thaw(name)
            self.lay_out_gradients()

    def use_comm_hook(self, hook: data_parallel.CommHook) -> None:
        """Lets a hook sum gradients, in place of an earlier hook. Collective over the replicas.

        Raises:
            ValueError: gradients are not summed in buckets that all replicas have whole.
            RuntimeError: gradients are being reduced, or some are kept and not summed yet.
        """
        if self.joins_step or self.uneven is not None or self.gradients.in_step:
            raise RuntimeError(
                f"{_C.rank_prefix()}call register_comm_hook between steps, outside of step "
                "functions and of model.join()"
            )
        if self.gradients.use_hook(hook, self._root) and self.partitioned:
            self.lay_out_gradients()

    def update_with(self, updates: Updates, scaler: LossScaler | None) -> None:
        """Connects an optimizer with parameters of this model.

        Args:
            updates: updates that gradients may be handed to during the backward.
            scaler: scale of losses; None: losses have none.
        """
        if scaler is not None:
            self.loss.scaler = scaler
        if self.gradients.updates is not None:
            self.gradients.updates.use(updates)

    def after_update(self) -> None:
        """Brings updated values to the places where modules use them.

        Collective over the ranks that hold one copy of a sharded state. Nothing is to do while
        every rank updates all parameters that its modules use.
        """
        assert self.storage is not None
        if self.gradients.updates is not None:
            self.gradients.updates.confirm()
        self.storage.after_update()
        if self._has_updated:
            _C.release_idle_host_memory()
        else:
            _C.release_host_memory()  # all lasting memory exists now
            self._has_updated = True

    @property
    def can_change_dtype(self) -> bool:
        """True if no part of the partitioned model is elsewhere or exists twice."""
        return self._current.rank.sizes["pp"] == 1 and not self.holdings

    def compile_root(self, request: CompileRequest | None) -> None:
        """Compiles the whole model on request of the user; None: takes that back."""
        if self.compiled.request(self._root, request) and self.partitioned:
            self.compiled.settle()

    def close(self) -> None:
        """Drops the model, and references to it elsewhere. May be called twice."""
        for see in self._current.observers.model_closed:
            see(self)
        self._current.wrapped.engines.pop(self.idx, None)
        self.compiled.close()
        self.operands.close()
        self.mask_places.leave()
        self.sequences.leave()
        if self.pipeline is not None:
            self.pipeline.leave()
        if self.storage is not None:
            self.storage.close()
        self.gradients.close()

    def gather_to_cpu(self) -> None:
        """Makes every parameter real on the CPU of every rank, and restores the modules' forwards.

        Collective.
        """
        state = self.state.gathered(self.parts, to_rank0=False)
        self.compiled.close()
        self.mask_places.leave()
        self.sequences.leave()
        if self.pipeline is not None:
            self.pipeline.disconnect()
        if self.parts is not None:
            self.storage = self.parts.storage = self.parts.storage.make_real()
        self.state.make_whole(self.parts, state)

    @property
    def marks(self) -> tuple[Any, ...]:
        """The counts that all replicas have alike, on which exchanges in later steps depend."""
        return self._num_steps, self._buffers.marks

    def restore_marks(self, marks: tuple[Any, ...]) -> None:
        """Restores earlier `marks`, because a step that has failed is run again."""
        self._num_steps, self._buffers.marks = marks

    def join_groups(self) -> None:
        """Joins the groups of the ranks that go on after a failure; values stay. Collective."""
        assert self.partitioning.decision is not None and self.storage is not None
        self.storage.join_groups()  # first: nothing waits for former ranks' parts of parameters
        if self.pipeline is not None:
            look_at = self.pipeline.modules.look_at
            self.pipeline.disconnect()
            self.pipeline = PipelinePlace(
                self._current, self.idx, self._root, self.partitioning.decision
            )
            self.pipeline.modules.look_at = look_at
        self.lay_out_gradients()

    # ---- steps

    def begin_step(
        self,
        num_microbatches: int,
        trains: bool,
        may_overlap: bool,
    ) -> None:
        """Joins a step. Collective over the replicas.

        Args:
            num_microbatches: number of microbatches of the step.
            trains: whether gradients are enabled.
            may_overlap: whether gradients may be reduced during backward.
        """
        self.refuse_whole()
        if self.sequences.blocks:
            self.sequences.refuse_compiled(self.compiled.is_on)
        self.joins_step = True
        if self.pipeline is not None:
            self.pipeline.modules.mode = ""
            if self._has_failed:
                self.pipeline.modules.forget_step()
        self._has_failed = False
        if trains:
            self.lay_out_thawed()
        if self.storage is not None and self.storage.has_steps:
            self.storage.begin_step(num_microbatches, trains)
        if trains:
            syncs = self._buffers.is_on
            first = 0 if self.uneven is None else self.uneven.announce(syncs)
            if syncs:
                self._buffers.begin_step(first, ends=self.uneven is None)
            self.gradients.begin_step(num_microbatches, may_overlap)
        self.settle()

    def refuse_whole(self) -> None:
        """Raises if the model is to run while its parameters have values of other ranks.

        Raises:
            RuntimeError: inside of `smp.whole_parameters`.
        """
        if self.shows_whole:
            raise RuntimeError(
                f"{_C.rank_prefix()}model {self.label} runs inside of smp.whole_parameters, where "
                "its parameters have the values of other ranks; leave the context first"
            )

    def settle(self) -> None:
        """Takes over what the script has set on modules: checkpointing and compilation."""
        if self._honoured.modules:
            self._honoured.honour()
        self.compiled.settle()

    def checkpoints(self) -> bool:
        """Returns whether a part of this model is known to be checkpointed before it runs."""
        return self._honoured.is_enabled or any(map(activations.is_marked, self._root.modules()))

    def end_step(self, trains: bool) -> None:
        """Waits for the reduction of the step's gradients."""
        self.joins_step = False
        if self.storage is not None and self.storage.has_steps:
            self.storage.end_step()
        if self.pipeline is not None and self.pipeline.modules.swaps.swapped:
            self.pipeline.modules.swaps.refuse_left()
        if trains:
            self.gradients.end_step()
            if self.uneven is not None:
                self.uneven.end_step()
            if self._buffers.is_open:
                self._buffers.end_step()
        if not self.sequences.is_told:
            self.sequences.tell()
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1) == 0:
            self.compiled.exchange_notes()

    def abandon_step(self) -> None:
        """Closes a step that failed; its gradients are lost. Not collective."""
        self.joins_step, self._has_failed = False, True
        if self.storage is not None:
            self.storage.abandon_step()
        self.gradients.abandon_step()
        self._buffers.abandon_step()
