"""An ``accelerate.Accelerator`` that works with the replicas of smp.

Accelerate takes every process for a replica of its own. Here processes that hold one replica
together get the same batches, their results are gathered once, and gradients are clipped by the
norm of the whole model. Methods of ``Accelerator`` are overridden; none is patched.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import smp._C as _C
from smp import checkpoint
from smp.model import DistributedModel
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.precision import grad_norm
from smp.world import comm, runtime
from smp.world.rank import Rank
from smp.world.wrapped import module_manager

_TAG = "accelerate"
#: options of a loss scale that behaves like that of ``torch.amp.GradScaler``
DYNAMIC_LOSS_ARGS = {"init_scale": 2.0**16, "scale_window": 2000}


class SMPAccelerator(Accelerator):
    """An ``accelerate.Accelerator`` over `smp`: call `smp.init` first.

    ``prepare`` wraps models into `DistributedModel` and optimizers into `DistributedOptimizer`, and
    splits data loaders over the replicas. With pipeline parallelism forward and ``backward`` belong
    into a function decorated with `smp.step`. 16-bit training is `fp16` or `bf16` of smp.

    Args:
        kwargs: arguments of ``Accelerator``. With ``gradient_accumulation_steps`` gradients are
            reduced in each step call, because Accelerate also updates after fewer of them.

    Raises:
        ValueError: ``mixed_precision`` differs from the configuration of smp, or an engine of
            another library is given.
        RuntimeError: Accelerate does not see the processes of the job.
    """

    #: whether `__init__` checks the ranks of Accelerate; False if a subclass checks them elsewhere
    _checks_launch: ClassVar[bool] = True

    def __init__(self, **kwargs: Any) -> None:
        current = runtime.current()
        self._rank, self._steps = current.rank, current.steps
        config = self._rank.config
        wanted = kwargs.pop("mixed_precision", None)
        configured = "fp16" if config.fp16 else "bf16" if config.bf16 else "no"
        if wanted not in (None, "no", configured):
            raise ValueError(
                f"{_C.rank_prefix()}mixed_precision={wanted!r}, but smp trains in "
                f"{configured!r}; set {wanted}: True in the configuration of smp.init"
            )
        for engine in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"):
            if kwargs.get(engine) is not None:
                raise ValueError(f"{_C.rank_prefix()}{engine} cannot be used together with smp")
        if kwargs.get("dataloader_config") is None:
            kwargs["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
        # Without this argument Accelerate takes a process without a GPU for a job of its own.
        kwargs.setdefault("cpu", self._rank.device.type == "cpu")
        super().__init__(mixed_precision="no", **kwargs)
        if self._checks_launch:
            check_launch(PartialState())

    # ---- ranks and the main process

    @property
    def _replicas(self) -> _Group:
        return _Group(self._rank)

    @property
    def replica_group(self) -> comm.CommGroup:
        """Group of the ranks that work on different batches."""
        return self._replicas.kind

    @property
    def num_processes(self) -> int:
        """Number of different batches at a time, which is the number of replicas."""
        return len(self._replicas.ranks)

    @property
    def process_index(self) -> int:
        """Number of the replica that this process belongs to."""
        return self._replicas.own

    @property
    def local_process_index(self) -> int:
        """Number of this process on its host."""
        return comm.local_rank()

    @property
    def is_main_process(self) -> bool:
        """Returns whether this process is the one of the job that prints and writes."""
        return comm.rank() == 0

    @property
    def is_local_main_process(self) -> bool:
        """Returns whether this process is the main one of its host."""
        return comm.local_rank() == 0

    @property
    def is_last_process(self) -> bool:
        """Returns whether this process is the last of the job."""
        return comm.rank() == comm.size() - 1

    @property
    def device(self) -> torch.device:
        """Device on which batches are put."""
        return self._rank.device

    def wait_for_everyone(self) -> None:
        """Waits for all processes of the job."""
        comm.barrier()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints once per host."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    # ---- preparing

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Wraps a model; smp decides its placement."""
        if not isinstance(model, DistributedModel):
            model = DistributedModel(model)
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Splits a loader over the replicas; all ranks shuffle alike. Collective over all ranks."""
        options = self.dataloader_config
        given = options.data_seed
        if given is None:
            options.data_seed = comm.allgather(torch.initial_seed(), comm.WORLD)[0]
        try:
            return super().prepare_data_loader(*args, **kwargs)
        finally:
            options.data_seed = given

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> DistributedOptimizer:
        """Wraps an optimizer, in fp16 with a dynamic loss scale.

        Between updates its ``step`` does nothing.
        """
        if not isinstance(optimizer, DistributedOptimizer):
            optimizer = distributed_optimizer(optimizer, kind=_Optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wraps a scheduler so that it steps once for each batch of an update, as in Accelerate."""
        if isinstance(scheduler, _Scheduler):
            return scheduler
        prepared = _Scheduler(
            scheduler,
            self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        prepared.num_replicas = self.num_processes
        self._schedulers.append(prepared)
        return prepared

    # ---- training

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Runs ``model.backward`` of the prepared model on the loss over accumulation steps."""
        if kwargs:
            raise ValueError(f"{_C.rank_prefix()}backward takes the loss alone, not {list(kwargs)}")
        if len(self._models) != 1:
            raise RuntimeError(
                f"{_C.rank_prefix()}{len(self._models)} models are prepared; call backward of the "
                "one that is meant"
            )
        self._models[0].backward(loss / self.gradient_accumulation_steps)

    def clip_grad_norm_(
        self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Clips by the norm over the whole model; call it between step function and update."""
        if len(self._optimizers) == 1 and norm_type == 2.0:
            norm: Tensor = self._optimizers[0].clip_grad_norm(max_norm)
            return norm
        return grad_norm.clip_grad_norm_(parameters, max_norm, norm_type)

    # ---- gathering

    def gather(self, tensor: Any) -> Any:
        """Gathers tensors of all replicas along dimension 0. Collective over all ranks."""
        return pytree.tree_map_only(Tensor, functools.partial(_gather, self._replicas), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers results without the samples that were added to fill the last batch.

        Args:
            input_data: tensors of any nesting, or any objects in a list.
            use_gather_object: gather tensors as objects, too.
        """
        leaves = pytree.tree_leaves(input_data)
        if use_gather_object or not all(isinstance(leaf, Tensor) for leaf in leaves):
            parts = comm.allgather(input_data, self._replicas.kind)
            gathered: Any = [item for part in parts for item in part]
        else:
            gathered = self.gather(input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return gathered
        if isinstance(gathered, list) and not all(isinstance(x, Tensor) for x in gathered):
            return gathered[: state.remainder]
        return pytree.tree_map_only(Tensor, lambda t: t[: state.remainder], gathered)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pads ``dim`` to the largest size among the replicas."""

        def pad(one: Tensor) -> Tensor:
            if one.dim() <= dim or self.num_processes == 1:
                return one
            missing = max(comm.allgather(one.shape[dim], self._replicas.kind)) - one.shape[dim]
            widths = [0] * (2 * (one.dim() - dim))
            widths[-2 if pad_first else -1] = missing
            return functional.pad(one, widths, value=pad_index) if missing else one

        return pytree.tree_map_only(Tensor, pad, tensor)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Returns the sum or mean over the replicas, times ``scale``."""

        def reduce_one(one: Tensor) -> Tensor:
            if reduction == "none":
                return one
            stacked = torch.stack(
                [p.to(one.device) for p in comm.allgather(one, self._replicas.kind)]
            )
            return (stacked.sum(0) if reduction == "sum" else stacked.mean(0)) * scale

        if reduction not in ("sum", "mean", "none"):
            raise ValueError(f"reduction {reduction!r} is not 'sum', 'mean' or 'none'")
        return pytree.tree_map_only(Tensor, reduce_one, tensor)

    # ---- state

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Returns the user's module."""
        return model.get_module() if isinstance(model, DistributedModel) else model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the whole model on rank 0, with Hugging Face's names where they exist.

        Collective over all ranks; the others get an empty dictionary.
        """
        return (
            whole_state_dict(model) if isinstance(model, DistributedModel) else model.state_dict()
        )

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, **kwargs: Any
    ) -> str | os.PathLike[str]:
        """Saves by `smp.save_checkpoint`, with schedulers and registered objects. Collective."""
        if output_dir is None or kwargs or len(self._models) > 1 or len(self._optimizers) > 1:
            raise ValueError(
                f"{_C.rank_prefix()}save_state takes a folder alone, and at most one model and "
                "optimizer; use smp.save_checkpoint for anything else"
            )
        content = {
            "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
            "custom_objects": [custom.state_dict() for custom in self._custom_objects],
            "step": self.step,
        }
        checkpoint.save_checkpoint(
            output_dir, _TAG, model=_only(self._models), optimizer=_only(self._optimizers),
            user_content=content,
        )  # fmt: skip
        return output_dir

    def load_state(self, input_dir: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        """Loads a folder of `save_state`, on any layout. Collective."""
        if input_dir is None or kwargs:
            raise ValueError(f"{_C.rank_prefix()}load_state takes the folder of save_state alone")
        content = checkpoint.resume_from_checkpoint(input_dir, _TAG)
        for scheduler, state in zip(self._schedulers, content["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for custom, state in zip(self._custom_objects, content["custom_objects"], strict=True):
            custom.load_state_dict(state)
        self.step = content["step"]


class _Optimizer(DistributedOptimizer):
    """An optimizer that updates after the last accumulated batch, like ``AcceleratedOptimizer``."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        return super().step(closure) if GradientState().sync_gradients else None

    def zero_grad(self, set_to_none: bool = True, set_grads_to_None: bool | None = None) -> None:  # noqa: N803
        if GradientState().sync_gradients:
            super().zero_grad(set_to_none, set_grads_to_None)


class _Scheduler(AcceleratedScheduler):  # type: ignore[misc]
    num_replicas = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.step_with_optimizer or self.split_batches:
            super().step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients or any(
            o.step_was_skipped for o in self.optimizers
        ):
            return
        total = getattr(self.scheduler, "total_steps", None)
        for _ in range(self.num_replicas):
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)


def check_launch(state: PartialState) -> None:
    """Raises RuntimeError unless Accelerate counts the processes of the job as smp does."""
    seen, wanted = (state.process_index, state.num_processes), (comm.rank(), comm.size())
    if seen != wanted:
        raise RuntimeError(
            f"{_C.rank_prefix()}Accelerate takes this process for rank {seen[0]} of {seen[1]}, but "
            f"it is rank {wanted[0]} of {wanted[1]}, so every process would log and save; "
            "Accelerate reads the variables of torchrun: start the job with torchrun or `smp run "
            "--torch-env`, or set RANK, WORLD_SIZE and LOCAL_RANK for each process"
        )


def distributed_optimizer(
    optimizer: torch.optim.Optimizer,
    dynamic_loss_args: Mapping[str, Any] = DYNAMIC_LOSS_ARGS,
    kind: type[DistributedOptimizer] = DistributedOptimizer,
) -> DistributedOptimizer:
    """Wraps an optimizer; in fp16 with a dynamic loss scale."""
    if not runtime.current().rank.config.fp16:
        return kind(optimizer)
    return kind(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args=dynamic_loss_args,
    )


def whole_state_dict(model: DistributedModel) -> dict[str, Any]:
    """Returns the whole model in Hugging Face's names on rank 0. Collective over all ranks."""
    state: dict[str, Any] = model.state_dict(gather_to_rank0=True)
    if comm.rank() == 0:
        for to_hugging_face, _ in module_manager.translate_functions:
            state = to_hugging_face(state)
    return state


class _Group:
    """The ranks that work on different batches."""

    def __init__(self, rank: Rank) -> None:
        self.kind = comm.RDP_GROUP if rank.config.prescaled_batch else comm.DP_GROUP
        self.ranks = rank.groups[self.kind.value]
        self.own = rank.ranks[self.kind.value]

    def process_group(self) -> dist.ProcessGroup:
        if self.kind == comm.RDP_GROUP:
            return comm.get_rdp_process_group()
        return comm.get_dp_process_group()


def _gather(group: _Group, tensor: Tensor) -> Tensor:
    own = (tensor[None] if tensor.dim() == 0 else tensor).contiguous()
    if len(group.ranks) == 1:
        return own
    parts = [torch.empty_like(own) for _ in group.ranks]
    dist.all_gather(parts, own, group=group.process_group())
    return torch.cat(parts)


def _only(prepared: list[Any]) -> Any:
    return prepared[0] if prepared else None
