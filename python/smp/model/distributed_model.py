"""``smp.DistributedModel``: the user's model, partitioned and run over the ranks of a replica."""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import smp._C as _C
from smp import data_parallel
from smp.compilation import CompiledParts, check_mode
from smp.initial.initialise import initialise_again
from smp.model.accepted import check_module, refuse_around
from smp.model.engine import Engine
from smp.model.join import uneven_batches
from smp.model.model_calls import ModelCalls
from smp.model.parts import ModelParts
from smp.model.torch_training import take_over
from smp.model.views import ModelViews
from smp.model.whole_parameters import showing_whole
from smp.model.wrapper import ModuleWrapper, alias_forwards
from smp.modules.compiled import (
    CompileRequest,
    compiled_around,
    request_behind,
    request_of,
    take_compiled,
)
from smp.modules.tables import hold_packed
from smp.modules.tracing import is_tracing as is_tracing
from smp.modules.training_dtypes import plan_dtypes
from smp.nn import DistributedModule
from smp.partition.costs import Trace
from smp.partition.decision import Decision
from smp.partition.expected_memory import Expected
from smp.partition.trace_choice import TraceOptions, check_tracing
from smp.precision.holdings import master_of, updates_some
from smp.replacement import convert_to_fp8, fuse_heads, replace_marked
from smp.world import runtime
from smp.world.wrapped import module_manager

Hook = Callable[["DistributedModel", Any], Any]


class DistributedModel(ModelViews):
    """Wraps a module so that it is partitioned over pipeline ranks and reduced over replicas.

    With more than one pipeline rank the partition is decided and applied in the first call of a
    step function, and ``forward`` and ``backward`` work inside step functions only. With one, all
    of it happens here and plain training loops work too. Construct on all ranks.

    Several models may be wrapped (a generator and a discriminator, a teacher and a student). Each
    is traced and partitioned by itself, in the first call of a step function that uses it, and one
    backward may go through several of them. A model lives as long as the program has it.

    Args:
        module: the model; its modules stay unmodified.
        trace_device: "gpu" (the device of this process, even if that is the CPU) or "cpu": device
            of the measurements for the partition. Without measurements the trace has shapes only,
            and needs neither memory nor a device.
        trace_execution_times: whether to measure forward times of modules on the first step; else
            they are estimated from shapes.
        trace_memory_usage: whether to measure the memory that modules keep for their backward; else
            it is taken from the tensors that autograd saves.
            tensors that autograd saves.
        overlapping_allreduce: whether to reduce each bucket of gradients as soon as it is complete.
        backward_passes_per_step: step calls whose gradients are accumulated per reduction.
        average_grads_across_microbatches: whether to average gradients over microbatches; else they
            are sums.
        bucket_cap_mb: size of a gradient bucket in MB; of two with sharded data parallelism. The
            default is 25 on the CPU and 128 on GPUs.
        broadcast_buffers: whether to copy the buffers of the first replica to all others before
            each training step.
        gradient_as_bucket_view: no effect; gradients are views of their bucket in any case.
        find_unused_parameters: no effect; unused parameters are recognised in any case.
        compile: "stage" compiles modules that are whole on a rank with `torch.compile`: the largest
            ones without equal blocks inside, and each such block, for the shapes that they get.
            A module that cannot be compiled runs in eager mode, and rank 0 logs which and why.
            None: only modules that the script has compiled itself are compiled.

    Raises:
        ValueError: for arguments that are not usable, for a module that shares parameters with
            a model that is wrapped already, and for an embedding with ``max_norm`` if there are
            several replicas.
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: float = data_parallel.DEFAULT_MB,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
        compile: str | None = None,
    ) -> None:
        super().__init__()
        current = runtime.current()
        check_mode(compile)
        requests: dict[nn.Module, CompileRequest] = {}
        if isinstance(module, nn.Module):
            module = take_compiled(module, requests)
        check_module(module, current, DistributedModel)
        for see in current.observers.model_wrapped:
            see(module)
        times = trace_execution_times or current.rank.config.use_times
        check_tracing(trace_device, times)
        if backward_passes_per_step < 1 or bucket_cap_mb <= 0:
            raise ValueError(
                f"backward_passes_per_step ({backward_passes_per_step}) must be an integer >= 1 "
                f"and bucket_cap_mb ({bucket_cap_mb}) a number > 0"
            )
        # Take the seed now: values must not depend on when the model is partitioned.
        seed = torch.initial_seed()
        initialise_again(module, current.rank.device, seed)
        rank = current.rank
        tries_plans = rank.settings.check_first_step != "0"
        module, registrations = replace_marked(module, rank.device, tries_plans=tries_plans)
        fuse_heads(module, rank.config)
        convert_to_fp8(module, rank.config, rank.device)
        hold_packed(module, rank.config.half_dtype)
        translators = [r.translators for r in registrations if r.translators is not None]
        module_manager.add(translators)
        if current.rank.config.fp16_params and current.rank.config.half_dtype is None:
            for distributed in module.modules():
                if isinstance(distributed, DistributedModule):
                    plan_dtypes(distributed, torch.float16).cast(distributed)
        self.module: nn.Module = ModuleWrapper(module)
        if current.rank.config.fp16:
            self.module = ModuleWrapper(self.module)
        self._engine = Engine(
            current,
            current.wrapped.num_wrapped,
            module,
            trace=TraceOptions(
                device=current.rank.device,
                real_device=current.rank.device if trace_device == "gpu" else torch.device("cpu"),
                measure_times=times,
                measure_memory=trace_memory_usage,
                peers=tuple(current.rank.groups["dp_cp"]),
            ),
            overlap=overlapping_allreduce,
            passes_per_reduction=backward_passes_per_step,
            average=average_grads_across_microbatches,
            bucket_cap_bytes=data_parallel.bucket_cap_bytes(bucket_cap_mb, current.rank.device),
            broadcast_buffers=broadcast_buffers,
            seed=seed,
            registrations=registrations,
            compiled=CompiledParts(current.rank, module, compile, requests),
        )
        self._runtime = current
        self._is_called = False
        self._calls = ModelCalls(current, self._engine, module)
        self._post_partition_hooks: OrderedDict[int, Hook] = OrderedDict()
        self._post_step_hooks: OrderedDict[int, Hook] = OrderedDict()
        alias_forwards(module)
        current.wrapped.add_model(self)
        take_over(current)
        let_go = weakref.finalize(self, self._engine.close)
        let_go.atexit = False  # the runtime has its own order at exit
        current.on_shutdown(let_go)
        if current.rank.sizes["pp"] == 1 and not current.rank.is_apart:
            self.prepare()

    # ---- running

    @torch._disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output; inside a step function the same on all ranks of the replica.

        With several pipeline ranks the arguments of pipeline rank 0 count.
        """
        if not self._is_called:
            refuse_around(self)
            self._is_called = True
        compiled = compiled_around(self)
        if compiled is not None:
            self._engine.compile_root(request_behind(compiled))
        if self._runtime.steps.running is None:
            self._runtime.wrapped.spread_written()
        if self._runtime.verification is not None:
            return self._runtime.verification.call(self._calls.forward, args, kwargs)
        return self._calls.forward(args, kwargs)

    def backward(
        self,
        tensors: Tensor | Sequence[Tensor],
        grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
    ) -> None:
        """Replaces ``loss.backward()`` in step functions, and outside of them in fp16 training.

        The loss scale is applied here; losses keep their values.

        Args:
            tensors: scalar or list of tensors that depend on the model's output.
            grad_tensors: gradients of these, as in ``torch.autograd.backward``.
        """
        if self._runtime.verification is not None:
            with self._runtime.verification.backward():
                self._calls.backward(tensors, grad_tensors)
            return
        self._calls.backward(tensors, grad_tensors)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters like ``torch.nn.Module.named_parameters``.

        Raises:
            ValueError: an unsupported wrapper such as `DistributedDataParallel` is around the
                model.
        """
        refuse_around(self)
        return super().named_parameters(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuses a copy, which would share ranks, gradients and state with this model.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{_C.rank_prefix()}a DistributedModel cannot be copied (deepcopy, AveragedModel); "
            "copy the model that it wraps, model.get_module(), where its parameters are whole, or "
            "load model.state_dict() into another one"
        )

    def __reduce__(self) -> NoReturn:
        """Refuses to be pickled (torch.save): the pickle would have a part of the model only.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{_C.rank_prefix()}a DistributedModel cannot be pickled or copied; save "
            "model.state_dict(), which is collective, or call smp.save_checkpoint"
        )

    def prepare(self, trace: Trace | None = None) -> None:
        """Partitions the model unless it is partitioned already. Collective.

        Args:
            trace: trace of the model on the first rank, if there is one.
        """
        if self._engine.partitioned:
            return
        self._engine.partition(trace)
        for see in self._runtime.observers.model_partitioned:
            see(self)
        for optimizer in self._runtime.wrapped.optimizers:
            optimizer._use_masters()
        for hook in list(self._post_partition_hooks.values()):
            hook(self, self._optimizer())

    def run_post_step_hooks(self) -> None:
        """Runs the hooks that wait for the end of a step."""
        hooks = list(self._post_step_hooks.values())
        self._post_step_hooks.clear()  # handles refer to this very dictionary
        for hook in hooks:
            hook(self, self._optimizer())

    def _optimizer(self) -> Any:
        """Returns the last wrapped optimizer; of several models, the last that updates this."""
        wrapped = self._runtime.wrapped
        if len(wrapped.models) <= 1:
            return wrapped.optimizer
        own = set(self.parameters())
        fitting = [o for o in wrapped.optimizers if updates_some(o.optimizer, own)]
        return fitting[-1] if fitting else wrapped.optimizer

    # ---- access

    @property
    def _idx(self) -> int:
        """Number among the models of this runtime."""
        return self._engine.idx

    @property
    def _label(self) -> str:
        """Name of this model in messages."""
        return self._engine.label

    @property
    def partitioned(self) -> bool:
        """True once the partition is applied; ``local_*`` methods are valid from then on."""
        return self._engine.partitioned

    def get_module(self) -> nn.Module:
        """Returns the user's module."""
        module = self.module
        while isinstance(module, ModuleWrapper):
            module = module.module
        return module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    @property
    def _expected_memory(self) -> Expected | None:
        """Memory that the partition expects on this rank, or None before the partition."""
        return self._engine.partitioning.expected

    @property
    def _decision(self) -> Decision | None:
        """Owner of each module; None before the partition."""
        return self._engine.partitioning.decision

    def _parts(self) -> ModelParts:
        if self._engine.parts is None:
            raise RuntimeError(
                f"{_C.rank_prefix()}the model is not partitioned yet; call a step function "
                "first, or use register_post_partition_hook"
            )
        return self._engine.parts

    def whole_parameters(
        self, parameters: Iterable[nn.Parameter] | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Returns the context `smp.whole_parameters` of this model."""
        return whole_parameters(self, parameters)

    # ---- state

    def local_state_dict(self) -> dict[str, Any]:
        """Returns the entries of the state dict that live on this rank, marked as partial.

        With sharded data parallelism it is collective over the ranks that hold one copy of the
        model, and raises PeerFailure or RuntimeError if some of them do not call it.
        """
        self._runtime.rank.check_sums()
        self._runtime.wrapped.spread_written()
        self._parts().meet(self._runtime.rank, "model.local_state_dict", is_merged=False)
        return self._parts().marked_state()

    def state_dict(self, gather_to_rank0: bool = False, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict of the whole model, with the keys of the unwrapped one.

        Once the model is partitioned, this is collective over the ranks of a replica (the MP
        group), and with sharded data parallelism also over the ranks that hold one copy of the
        model.

        Args:
            gather_to_rank0: whether only global rank 0 gets the dict, and all others an empty one.

        Raises:
            ValueError: other arguments of ``torch.nn.Module.state_dict`` were passed.
            PeerFailure, RuntimeError: some of these ranks have not called it.
        """
        if args or kwargs or not isinstance(gather_to_rank0, bool):
            raise ValueError("DistributedModel.state_dict takes gather_to_rank0 only, a bool")
        self._runtime.rank.check_sums()
        self._runtime.wrapped.spread_written()
        if self.partitioned:
            is_merged = not gather_to_rank0 or 0 in self._runtime.rank.groups["mp"]
            self._parts().meet(
                self._runtime.rank,
                "model.state_dict",
                is_merged,
                gather_to_rank0=gather_to_rank0,
            )
        return self._engine.state.gathered(self._engine.parts, gather_to_rank0)

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        same_partition_load: bool = False,
    ) -> torch.nn.modules.module._IncompatibleKeys:
        """Loads a whole state dict, or the partial state dict that this rank saved.

        Args:
            state_dict: state of the unwrapped model, or result of :meth:`local_state_dict`. Partial
                ones are merged over the ranks of the replica first, which is collective.
            strict: whether missing and unexpected keys are errors.
            same_partition_load: whether a partial dict has exactly this partition; nothing is
                merged.

        Raises:
            RuntimeError: shapes do not fit; keys do not fit, if strict; or a key names a part of a
                replaced module by its original name, if not strict.
        """
        return self._engine.state.load(self._engine.parts, state_dict, strict, same_partition_load)

    def cpu(self) -> DistributedModel:
        """Gathers the whole model on the CPU of every rank and ends its partition. Collective.

        Raises:
            RuntimeError: the model has modules that are split over several ranks.
        """
        split = next(self.distributed_modules(), None)
        if split is not None and self._runtime.rank.sizes["tp"] > 1:
            raise RuntimeError(
                f"{_C.rank_prefix()}cpu() gathers modules that work on one rank, and "
                f"{type(split).__name__} is split over {self._runtime.rank.sizes['tp']} "
                "tensor-parallel ranks; build the plain model and load state_dict() into it"
            )
        self._engine.gather_to_cpu()
        return self

    def to(self, *args: Any, **kwargs: Any) -> DistributedModel:
        """Changes the dtype before the partition; devices are chosen by the library.

        Raises:
            RuntimeError: for a change of dtype after the partition with several pipeline ranks or
                with masters, or a move to the CPU from an accelerator: parts of the model are on
                other ranks (use :meth:`cpu`).
        """
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None:
            self._change_dtype(dtype)
        several = self.partitioned and self._runtime.rank.sizes["pp"] > 1
        if several and device is not None and device.type != self._runtime.rank.device.type:
            raise RuntimeError(
                f"{_C.rank_prefix()}a partitioned model cannot move to {device}: parts of "
                "it are on other ranks; DistributedModel.cpu() gathers them"
            )
        return self

    def half(self) -> DistributedModel:
        """Converts the model like ``to(torch.float16)``."""
        return self._change_dtype(torch.float16)

    def bfloat16(self) -> DistributedModel:
        """Converts the model like ``to(torch.bfloat16)``."""
        return self._change_dtype(torch.bfloat16)

    def float(self) -> DistributedModel:
        """Converts the model like ``to(torch.float32)``."""
        return self._change_dtype(torch.float32)

    def double(self) -> DistributedModel:
        """Converts the model like ``to(torch.float64)``."""
        return self._change_dtype(torch.float64)

    def _change_dtype(self, dtype: torch.dtype) -> DistributedModel:
        floating = [p for p in self.get_module().parameters() if p.is_floating_point()]
        if all(p.dtype == dtype for p in floating):
            return self
        if self.partitioned and not self._engine.can_change_dtype:
            have = ", ".join(sorted({str(p.dtype) for p in floating}))
            raise RuntimeError(
                f"{_C.rank_prefix()}the dtype of a partitioned model cannot change from {have} to "
                f"{dtype}; convert it before the first step, or train in 16 bits with fp16 or bf16 "
                "in the configuration"
            )
        super().to(dtype=dtype)
        if self.partitioned:
            self._engine.lay_out_gradients()
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets the gradients of all parameters and of their masters.

        Raises:
            RuntimeError: inside of a step function.
        """
        self._runtime.steps.refuse_inside("model.zero_grad", "in front of")
        self._runtime.wrapped.note_dropped()
        for parameter in self.get_module().parameters():
            updated = master_of(parameter)
            if set_to_none:
                parameter.grad = updated.grad = None
            elif updated.grad is not None:
                with torch.no_grad():
                    updated.grad.zero_()

    def cuda(self, device: Any = None) -> DistributedModel:
        """Returns the model unchanged; the library chooses the device of each part."""
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the model with `torch.compile` and its arguments. Call on all ranks alike.

        A model that is whole on one rank is compiled as a whole, else its parts are, as with
        ``compile="stage"``. ``torch.compile(model)`` does the same in its first call. Takes effect
        with the next forward or step; parameters keep their names.
        """
        self._engine.compile_root(request_of(*args, **kwargs))

    # ---- hooks

    def register_post_partition_hook(self, hook: Hook) -> RemovableHandle:
        """Calls ``hook(model, optimizer)`` after the partition, or at once if that is over."""
        handle = RemovableHandle(self._post_partition_hooks)
        if self.partitioned:
            hook(self, self._optimizer())
        else:
            self._post_partition_hooks[handle.id] = hook
        return handle

    def register_post_step_hook(self, hook: Hook) -> RemovableHandle:
        """Calls ``hook(model, optimizer)`` once, after the next completed step call."""
        handle = RemovableHandle(self._post_step_hooks)
        self._post_step_hooks[handle.id] = hook
        return handle

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which replicas may have different numbers of batches.

        A replica that leaves the body early joins the gradient reductions of the others, with
        nothing to add, and receives parameters, buffers and optimizer states at the end. With
        ``shard_optimizer_state`` it makes their updates and clipping, too; then the body changes
        gradients and parameters by these only. The script cares for schedulers, counts of steps,
        and its own collectives. All ranks of a replica (the MP group) have equally many batches;
        with pipeline parallelism at least one, unless the model is partitioned already. Collective
        over the replicas.

        Args:
            divide_by_initial_world_size: a gradient is the sum over the replicas that have a batch,
                divided by the number of all; False: by the number of those with a batch.
            enable: False: no effect, for inputs that are known to be even.
            throw_on_early_termination: whether to raise on all replicas when one has run out.

        Raises:
            ValueError: without `ddp`, and where replicas depend on each other in more than that:
                sharded data parallelism, `deterministic_server`, several models.
        """
        if not enable:
            return contextlib.nullcontext()
        return uneven_batches(
            self._runtime,
            self._engine,
            divide_by_all=divide_by_initial_world_size,
            throw=throw_on_early_termination,
        )

    def register_comm_hook(
        self,
        state: object,
        callable: Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]],
    ) -> None:
        """Replaces the gradient reduction by a hook, as in torch's DistributedDataParallel.

        ``callable(state, bucket)`` is called with each bucket instead of its all-reduce, in the
        order of their indices, during the backward. It returns a future of a tensor like
        ``bucket.buffer()``, which has sums over microbatches: the hook does all averaging, over
        replicas and microbatches. Reduce over ``smp.get_dp_process_group()``. Gradients of
        parameters that are used more often than in earlier steps may come in another bucket without
        parameters. With one replica nothing is reduced, and no hook is called.

        Collective over the replicas, between steps. A later hook replaces an earlier one.

        Raises:
            ValueError: without `ddp` or overlapping_allreduce, and with tensor parallelism or
                sharding, where there is no such all-reduce.
            RuntimeError: not between steps, or the first one while gradients are accumulated.
        """
        self._engine.use_comm_hook(data_parallel.CommHook(state, callable))

    #: the name of the method in PyTorch 1.7
    _register_comm_hook = register_comm_hook


def whole_parameters(
    model: DistributedModel, parameters: Iterable[nn.Parameter] | None = None
) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which every rank can read and write whole parameters.

    Written values stay, on the ranks that hold the parameters and in masters; those of the first
    replica count. The model does not run inside. Collective over all ranks, between steps; all
    ranks do the same inside. After an error inside, parameters of which ranks have parts are as
    before.

    Args:
        model: partitioned model.
        parameters: parameters of the model that are whole at the same time; None: all of them,
            which takes the memory of the whole model on each rank.

    Raises:
        ValueError: a given parameter is not one of the model.
        RuntimeError: inside of a step function, before the model is partitioned, or if some ranks
            have not called it.
    """
    model._runtime.steps.refuse_inside("smp.whole_parameters")
    return showing_whole(model._runtime.rank, model._engine, model._parts(), parameters)


def engine_of(model: DistributedModel) -> Engine:
    """Returns the engine of a model, for the other rooms of the library."""
    return model._engine
