"""``transformers.Trainer`` (5.x) over smp, without the variables of SageMaker.

Overrides methods of ``Trainer``, replaces nothing of it. The loss is that of ``compute_loss``, run
per microbatch, so losses of one's own, label smoothing and the count of tokens over accumulated
batches stay what they are.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from smp import _C, checkpoint, comm, microbatch, runtime
from smp.integrations import adapters
from smp.integrations.accelerator import SMPAccelerator, distributed_optimizer, whole_state_dict
from smp.microbatch import StepOutput
from smp.model import DistributedModel
from smp.optimizer import DistributedOptimizer
from smp.step import step

_TAG = "smp"
_OPTIMIZER = "optimizer.pt"  # of a Trainer in one process


class SMPTrainer(Trainer):
    """``Trainer`` whose model is a `DistributedModel`. Call `smp.init` before ``TrainingArguments``.

    Batch sizes of the arguments are those of a replica. 16-bit training follows the configuration
    of smp. Checkpoints hold the model in Hugging Face's format, beside it a checkpoint of smp
    (``smp_partial``) from which training goes on with any layout.

    Args:
        args, kwargs: of ``Trainer``. The model is the plain one; modules marked with
            `smp.tensor_parallelism` are replaced when it is wrapped.

    Raises:
        ValueError: a model that is wrapped already; arguments that ask for 16 bits where the
            configuration of smp does not.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = runtime.current().config
        super().__init__(*args, **kwargs)
        if isinstance(self.model, DistributedModel):
            raise ValueError(
                f"{_C.rank_prefix()}SMPTrainer wraps the model itself; give it the plain one"
            )
        for key in ("fp16", "bf16"):
            if getattr(self.args, key) and not getattr(config, key):
                raise ValueError(
                    f"smp config: {key}=False: the TrainingArguments ask for {key}; set {key}: "
                    "True in the configuration of smp.init"
                )
        self._batches_per_epoch: int | None = None

    # ---- what is prepared

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return arguments | {"mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        plain = self.accelerator
        self.accelerator = SMPAccelerator(dataloader_config=plain.dataloader_config)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        try:
            self._batches_per_epoch = len(loader)
        except TypeError:  # an iterable without a length
            self._batches_per_epoch = None
        return loader

    def get_total_train_batch_size(self, args: Any) -> int:
        replicas: int = self.accelerator.num_processes
        return int(self._train_batch_size * args.gradient_accumulation_steps * replicas)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Each rank gets its part when the model is partitioned."""

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> DistributedModel:
        if not isinstance(self.model_wrapped, DistributedModel):
            # Whether the last update of an epoch takes fewer batches is not known to the reducer.
            passes = self.args.gradient_accumulation_steps
            is_even = self._batches_per_epoch is not None and self._batches_per_epoch % passes == 0
            self.model_wrapped = DistributedModel(
                self.model, backward_passes_per_step=passes if is_even else 1
            )
        wrapped: DistributedModel = self.model_wrapped
        return wrapped

    def create_optimizer(self, model: nn.Module | None = None) -> DistributedOptimizer:
        if not isinstance(self.optimizer, DistributedOptimizer):
            super().create_optimizer(self._wrap_model(self.model))
            if not isinstance(self.optimizer, DistributedOptimizer):
                self.optimizer = distributed_optimizer(self.optimizer)
        optimizer: DistributedOptimizer = self.optimizer
        return optimizer

    # ---- steps

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        is_sum = (
            self.model_accepts_loss_kwargs and num_items_in_batch is not None
        ) or self.compute_loss_func is not None
        divisor = 1 if is_sum else self.current_gradient_accumulation_steps
        count = self._num_microbatches(inputs) if is_sum else None
        loss = _train(self, model, inputs, num_items_in_batch, count, divisor)
        mean: Tensor = loss.reduce_mean()
        return mean.detach().to(self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        names = self.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        returns_loss = inputs.get("return_loss")
        if returns_loss is None:
            returns_loss = self.can_return_loss
        has_loss = has_labels or (not names and bool(returns_loss))
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        items = self._get_num_items_in_batch([inputs], self.args.device) if has_loss else None
        is_sum = (
            self.model_accepts_loss_kwargs and items is not None
        ) or self.compute_loss_func is not None
        count = self._num_microbatches(inputs) if is_sum else None
        ignored = None if prediction_loss_only else tuple(ignore_keys)
        with torch.no_grad():
            loss, outputs = _predict(self, model, inputs, items, count, has_loss, ignored)
        mean = loss.reduce_mean().detach() if has_loss else None
        if prediction_loss_only:
            return mean, None, None
        logits = _concat(outputs)
        labels = tuple(inputs.get(name) for name in names) if has_loss else None
        if labels is not None and len(labels) == 1:
            labels = labels[0]
        return mean, logits[0] if len(logits) == 1 else logits, labels

    def _num_microbatches(self, inputs: dict[str, Any]) -> int:
        wanted = runtime.current().config.microbatches
        return microbatch.num_microbatches({"inputs": inputs}, {}, wanted)

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the whole model as ``save_pretrained`` does. Collective over all ranks."""
        folder = self.args.output_dir if output_dir is None else output_dir
        state = whole_state_dict(self._wrap_model(self.model))
        if self.args.should_save:
            self._save(folder, state_dict=state)
        comm.barrier()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        is_adapted = adapters.is_adapted(self.model)  # what is frozen is not saved again
        checkpoint.save_checkpoint(
            output_dir, _TAG, optimizer=self.optimizer,
            model=None if is_adapted else self.model_wrapped,
        )  # fmt: skip
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        self._load_weights(resume_from_checkpoint, load_optimizer=True)

    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint, load_optimizer=False)

    def _load_weights(self, folder: str, load_optimizer: bool) -> None:
        """The model, and the optimizer as soon as there is one."""
        wrapped = self._wrap_model(self.model)
        has_own = Path(folder, f"{_TAG}_partial").is_dir()
        if adapters.is_adapted(self.model):
            adapters.load(wrapped, self.model, folder)
            if load_optimizer and has_own:
                checkpoint.resume_from_checkpoint(folder, _TAG, strict=False)
        elif has_own:
            checkpoint.resume_from_checkpoint(folder, _TAG, load_optimizer=load_optimizer)
        else:
            checkpoint.resume_from_checkpoint(folder, partial=False, load_optimizer=False)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        whole = Path(checkpoint, _OPTIMIZER)
        if whole.is_file() and not Path(checkpoint, f"{_TAG}_partial").is_dir():
            state = torch.load(whole, map_location="cpu", mmap=True, weights_only=True)
            self.optimizer.load_state_dict(state)
        scheduler = Path(checkpoint, SCHEDULER_NAME)
        if scheduler.is_file():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


@step(non_split_inputs=["num_items"])
def _train(
    trainer: SMPTrainer,
    model: DistributedModel,
    inputs: dict[str, Any],
    num_items: Any,
    count: int | None,
    divisor: int,
) -> Tensor:
    """Forward and backward of one microbatch.

    Args:
        count: number of microbatches if the loss is a share of a sum over the whole batch, else
            None; smp takes the mean over microbatches.
    """
    with trainer.compute_loss_context_manager():
        loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=num_items)
    loss = loss * _share(count) / divisor
    model.backward(loss)
    return loss


@step(non_split_inputs=["num_items"])
def _predict(
    trainer: SMPTrainer,
    model: DistributedModel,
    inputs: dict[str, Any],
    num_items: Any,
    count: int | None,
    has_loss: bool,
    ignored: tuple[str, ...] | None,
) -> tuple[Tensor | None, Any]:
    """Loss and the outputs that metrics see (none if ``ignored`` is None) of one microbatch."""
    loss = None
    with trainer.compute_loss_context_manager():
        if has_loss:
            loss, outputs = trainer.compute_loss(
                model, inputs, return_outputs=True, num_items_in_batch=num_items
            )
            loss = loss * _share(count)
        else:
            outputs = model(**inputs)
    if ignored is None:
        return loss, None
    if isinstance(outputs, dict):
        left_out = {*ignored, "loss"} if has_loss else set(ignored)
        return loss, tuple(value for key, value in outputs.items() if key not in left_out)
    return loss, tuple(outputs[1:] if has_loss else outputs)


def _share(count: int | None) -> float:
    return 1.0 if count is None else count / microbatch.current_share().weight


def _concat(outputs: Any) -> Any:
    """Of all microbatches."""
    return pytree.tree_map_only(
        StepOutput, lambda o: o.concat(), outputs, is_leaf=lambda o: isinstance(o, StepOutput)
    )
