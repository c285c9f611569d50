"""A ``transformers.Trainer`` (5.x) over smp, without the variables of SageMaker.

Methods of ``Trainer`` are overridden; none is patched. The loss is that of ``compute_loss``, run
per microbatch. So users' losses, label smoothing and the count of tokens over accumulated batches
work as before. The mixin overrides them for any subclass, also for trainers of TRL.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

import smp._C as _C
from smp import checkpoint
from smp.integrations import adapters, trainer_losses, trainer_trl
from smp.integrations.accelerator import (
    DYNAMIC_LOSS_ARGS,
    SMPAccelerator,
    check_launch,
    distributed_optimizer,
    whole_state_dict,
)
from smp.integrations.trainer_batches import PAIRS, joined_outputs, num_samples, restored, to_cut
from smp.model import DistributedModel
from smp.optim.distributed_optimizer import DistributedOptimizer
from smp.step import step
from smp.step.labels import rule_of
from smp.step.microbatch import StepOutput
from smp.world import comm, runtime

_TAG = "smp"
_OPTIMIZER = "optimizer.pt"  # file of a Trainer in one process


class _Accelerator(SMPAccelerator):
    _checks_launch = False

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return super().num_processes

    @property
    def num_processes(self) -> int:
        """Number of replicas; 1 in a step, where a loss is what one process on all would compute.

        ``compute_loss`` multiplies by it, also terms that no number of labels divides.
        """
        return self.num_replicas if self._steps.running is None else 1

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Wraps a model that is trained; a reference is wrapped where it is first called."""
        if evaluation_mode:
            return model
        return super().prepare_model(model, device_placement)

    def gather(self, tensor: Any) -> Any:
        """Gathers over the replicas; a microbatch keeps its own, as steps are no meeting points."""
        if self._steps.running is None:
            return super().gather(tensor)
        return pytree.tree_map_only(Tensor, lambda t: t if t.dim() else t[None], tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        if self._steps.running is None:
            return super().gather_for_metrics(input_data, use_gather_object)
        return self.gather(input_data)


if TYPE_CHECKING:

    class _Base(Trainer):
        pass

else:
    _Base = object


class SMPTrainerMixin(_Base):
    """Lets a subclass of ``Trainer`` train a `DistributedModel`.

    Name it before the trainer: ``class T(SMPTrainerMixin, MyTrainer)``. The trainer's own
    ``compute_loss`` runs once per microbatch, its ``training_step`` and ``prediction_step`` do not
    run. Trainers of TRL may be its ``SFTTrainer`` and ``DPOTrainer``.

    `smp.init` is called before the arguments of the trainer are made. Batch sizes of the arguments
    are those of a replica. 16-bit training follows the configuration of smp. Checkpoints hold the
    model in Hugging Face's format, and beside it a checkpoint of smp (``smp_partial``) from which
    training can resume with any layout.

    Args:
        args, kwargs: arguments of the trainer. The model is the plain one; modules marked with
            `smp.tensor_parallelism` are replaced when it is wrapped.

    Raises:
        RuntimeError: Accelerate does not see the processes of the job.
        TypeError: a class does not name the mixin first, or derives from a trainer of TRL that is
            not supported.
        ValueError: the model is wrapped already, the arguments ask for 16 bits and the
            configuration of smp does not, or for what smp does not do.
    """

    accelerator: Any
    model_wrapped: Any
    optimizer: Any
    ref_model: Any  # of DPO

    #: options of the loss scale in fp16, by default those of ``torch.amp.GradScaler``
    dynamic_loss_args: ClassVar[dict[str, Any]] = DYNAMIC_LOSS_ARGS

    _batches_per_epoch: int | None = None
    _is_divided: bool | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        others = [base for base in order if not issubclass(base, SMPTrainerMixin)]
        first = next((base for base in others if issubclass(base, Trainer)), None)
        if first is not None and order.index(first) < order.index(SMPTrainerMixin):
            raise TypeError(
                f"class {cls.__name__}: SMPTrainerMixin comes after {first.__name__}, whose "
                "methods it has to override; name it first: class "
                f"{cls.__name__}(SMPTrainerMixin, {first.__name__})"
            )
        trainer_trl.check_class(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, Trainer):
            raise TypeError(
                f"{type(self).__name__} has no Trainer behind SMPTrainerMixin; write class "
                f"{type(self).__name__}(SMPTrainerMixin, Trainer)"
            )
        self._config = runtime.current().rank.config
        super().__init__(*args, **kwargs)

    def _check_arguments(self) -> None:
        if isinstance(self.model, DistributedModel):
            raise ValueError(
                f"{_C.rank_prefix()}{type(self).__name__} wraps the model itself; give it the "
                "plain one"
            )
        for key in ("fp16", "bf16"):
            if getattr(self.args, key) and not getattr(self._config, key):
                raise ValueError(
                    f"smp config: {key}=False: the TrainingArguments ask for {key}; set {key}: "
                    "True in the configuration of smp.init"
                )
        if self.args.parallelism_config is not None:
            self._refuse_engine("parallelism_config")
        trainer_trl.check_options(self)

    def _refuse_engine(self, name: str) -> None:
        raise ValueError(
            f"{_C.rank_prefix()}{type(self).__name__}: {name} of the arguments or of accelerate's "
            "configuration cannot be used together with smp; set the layout in smp.init instead"
        )

    # ---- preparing

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**kwargs)
        return arguments | {"mixed_precision": "no"}

    def create_accelerator_and_postprocess(self) -> None:
        self._check_arguments()
        super().create_accelerator_and_postprocess()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            self._refuse_engine("deepspeed" if self.is_deepspeed_enabled else "fsdp")
        plain = self.accelerator
        if self.args.distributed_state is not None:  # else transformers reads ranks from smp
            check_launch(self.args.distributed_state)
        self.accelerator = _Accelerator(dataloader_config=plain.dataloader_config)
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
        """Moves nothing: each rank gets its part when the model is partitioned."""

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> DistributedModel:
        if not isinstance(self.model_wrapped, DistributedModel):
            # The reducer cannot see whether the last update of an epoch takes fewer batches.
            passes = self.args.gradient_accumulation_steps
            is_even = self._batches_per_epoch is not None and self._batches_per_epoch % passes == 0
            self.model_wrapped = DistributedModel(
                self.model, backward_passes_per_step=passes if is_even else 1
            )
            trainer_trl.check_model(self, self.model_wrapped)
        wrapped: DistributedModel = self.model_wrapped
        return wrapped

    def create_optimizer(self, model: nn.Module | None = None) -> DistributedOptimizer:
        if not isinstance(self.optimizer, DistributedOptimizer):
            super().create_optimizer(self._wrap_model(self.model))
            if not isinstance(self.optimizer, DistributedOptimizer):
                self.optimizer = distributed_optimizer(self.optimizer, self.dynamic_loss_args)
        optimizer: DistributedOptimizer = self.optimizer
        return optimizer

    # ---- steps

    def training_step(
        self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        divisor = 1  # that of the plain trainer, also where the model does not use the number
        if not self._divides_itself(num_items_in_batch):
            divisor = self.current_gradient_accumulation_steps
        num_items_in_batch = self._divisor(model, inputs, num_items_in_batch)
        is_dpo = trainer_trl.is_dpo(self)
        if is_dpo:
            inputs = self._with_references(inputs)
        cut, size = self._to_cut(inputs), num_samples(inputs)
        with trainer_trl.collecting_metrics(self), _references_if(self, is_dpo):
            loss, found = _train(self, model, cut, num_items_in_batch, size, divisor)
        trainer_trl.add_metrics(self, found, inputs, self.accelerator.replica_group)
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
        is_dpo = trainer_trl.is_dpo(self)
        has_loss = is_dpo or has_labels or (not names and bool(returns_loss))
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        items = self._get_num_items_in_batch([inputs], self.args.device) if has_loss else None
        items = self._divisor(self._wrap_model(self.model), inputs, items)
        ignored = None if prediction_loss_only else tuple(ignore_keys)
        if is_dpo:
            inputs = self._with_references(inputs)
        cut, size = self._to_cut(inputs), num_samples(inputs)
        with (
            torch.no_grad(),
            trainer_trl.collecting_metrics(self),
            _references_if(self, is_dpo),
        ):
            loss, outputs, found = _predict(self, model, cut, items, size, has_loss, ignored)
        trainer_trl.add_metrics(self, found, inputs, self.accelerator.replica_group)
        mean = loss.reduce_mean().detach() if has_loss else None
        if mean is not None and items is None:  # the trainer takes the mean over replicas
            weight = float(_num_counted(self._wrap_model(self.model), inputs))
            weights = comm.allgather(weight, self.accelerator.replica_group)
            mean = mean * (weight * len(weights) / sum(weights) if any(weights) else 1.0)
        if prediction_loss_only:
            return mean, None, None
        logits = _concat(outputs, cut)
        names = ["input_ids"] if is_dpo else names
        labels = tuple(inputs.get(name) for name in names) if has_loss else None
        if labels is not None and len(labels) == 1:
            labels = labels[0]
        return mean, logits[0] if len(logits) == 1 else logits, labels

    def _divisor(self, model: DistributedModel, inputs: dict[str, Any], num_items: Any) -> Any:
        """Returns the number of labels by which the loss is divided; None for a mean."""
        if num_items is not None and self._is_divided is None:
            self._is_divided = trainer_losses.is_divided(self, model, inputs)
        return num_items if self._is_divided else None

    def _divides_itself(self, num_items: Any) -> bool:
        """Returns whether ``Trainer`` divides a loss by the tokens of all accumulated batches."""
        if getattr(self, "loss_is_scaled_for_ga", None) is not None:
            return bool(self.loss_is_scaled_for_ga)
        counts = self.model_accepts_loss_kwargs and num_items is not None
        return counts or self.compute_loss_func is not None

    def _to_cut(self, inputs: dict[str, Any]) -> dict[str, Any]:
        is_dpo = trainer_trl.is_dpo(self)
        token = getattr(getattr(self.model, "config", None), "image_token_id", None)
        count = self._config.microbatches
        return to_cut(inputs, count, has_pairs=is_dpo, image_token=token)

    # ---- references of DPO

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """Returns log-probabilities of the chosen and rejected sequences under the reference.

        Collective over the ranks of a replica. The reference is the trainer's reference model,
        else `model` with the adapters of the reference.

        Args:
            model: model of TRL; the distributed one is used instead.
            inputs: batch of pairs.
        """
        own = self.ref_model
        if own is not None and not isinstance(own, DistributedModel):
            own = self.ref_model = DistributedModel(own.requires_grad_(False))
        reference = self._wrap_model(self.model) if own is None else own
        cut = self._to_cut(inputs)
        with trainer_trl.showing_reference(self, reference):
            if own is None and not reference.partitioned:
                # The policy is laid out for the adapters that are trained, not for the reference's.
                _reference(self, reference, cut)
            with trainer_trl.reference_adapters(self, own):
                chosen, rejected = _reference(self, reference, cut)
        return chosen.concat(), rejected.concat()

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:
        trainer_trl.check_data_set(self, dataset, name)
        return super()._precompute_ref_logps(dataset, name, batch_size)  # type: ignore[misc]

    def _own_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        return super().compute_ref_log_probs(model, inputs)  # type: ignore[misc]

    def _with_references(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns a batch of pairs with log-probabilities of the reference."""
        names = ("ref_chosen_logps", "ref_rejected_logps")
        if names[0] in inputs:
            return inputs
        with torch.no_grad():
            found = self.compute_ref_log_probs(self.model, inputs)
        return inputs | dict(zip(names, found, strict=True))

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
        is_adapted = adapters.is_adapted(self.model)  # frozen parameters are not saved again
        checkpoint.save_checkpoint(
            output_dir, _TAG, optimizer=self.optimizer,
            model=None if is_adapted else self.model_wrapped,
        )  # fmt: skip
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if not _has_own(resume_from_checkpoint) or adapters.is_adapted(self.model):
            self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder: str) -> None:
        """Loads the model alone."""
        wrapped = self._wrap_model(self.model)
        if adapters.is_adapted(self.model):
            adapters.load(wrapped, self.model, folder)
        elif _has_own(folder):
            checkpoint.resume_from_checkpoint(folder, _TAG, load_optimizer=False, model=wrapped)
        else:
            checkpoint.resume_from_checkpoint(
                folder, partial=False, load_optimizer=False, model=wrapped
            )

    def _load_optimizer_and_scheduler(self, folder: str | None) -> None:
        """Loads both; the schedule exists already, and loaded values of groups replace its own."""
        if folder is None:
            return
        whole = Path(folder, _OPTIMIZER)
        if _has_own(folder):
            is_adapted = adapters.is_adapted(self.model)
            checkpoint.resume_from_checkpoint(
                folder, _TAG, strict=not is_adapted, model=self.model_wrapped,
                optimizer=self.optimizer,
            )  # fmt: skip
        elif whole.is_file():
            state = torch.load(whole, map_location="cpu", mmap=True, weights_only=True)
            self.optimizer.load_state_dict(state)
        scheduler = Path(folder, SCHEDULER_NAME)
        if scheduler.is_file():
            self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))


class SMPTrainer(SMPTrainerMixin, Trainer):
    """A ``Trainer`` for a `DistributedModel`; see `SMPTrainerMixin`."""


def _references_if(
    trainer: SMPTrainerMixin, is_dpo: bool
) -> contextlib.AbstractContextManager[None]:
    return trainer_trl.given_references(trainer) if is_dpo else contextlib.nullcontext()


def _has_own(folder: str) -> bool:
    """Returns whether the folder has a checkpoint of smp beside the model."""
    return Path(folder, f"{_TAG}_partial").is_dir()


def _weight(
    trainer: SMPTrainerMixin,
    model: DistributedModel,
    inputs: dict[str, Any],
    num_items: Any,
    size: int,
    *_: Any,
) -> float | Tensor:
    """Returns the weight of a microbatch's loss in the mean over microbatches.

    A loss that is divided by a number of tokens is a sum: the weight is the microbatch's share of
    the batch's samples. Other losses are means: the weight is the number of labels or samples.
    """
    inputs = restored(inputs)
    if num_items is not None:
        return num_samples(inputs) / size
    return _num_counted(model, inputs)


def _num_counted(model: DistributedModel, inputs: dict[str, Any]) -> float | Tensor:
    """Returns the number of labels or samples over which the loss of a batch is a mean."""
    rule, labels = rule_of(model.get_module()), inputs.get("labels")
    if rule is None or not isinstance(labels, Tensor) or labels.is_floating_point():
        return num_samples(inputs)
    return rule.count(labels)


_AXES = {f"inputs.{PAIRS}": 0}


@step(non_split_inputs=["num_items"], input_split_axes=_AXES, weight=_weight)  # type: ignore[untyped-decorator]
def _train(
    trainer: SMPTrainerMixin,
    model: DistributedModel,
    inputs: dict[str, Any],
    num_items: Any,
    size: int,
    divisor: int,
) -> tuple[Tensor, trainer_trl.Found | None]:
    """Runs forward and backward of one microbatch out of a batch of ``size`` samples."""
    inputs = restored(inputs)
    items = _share(trainer, num_items, inputs, size)
    with trainer.compute_loss_context_manager():
        loss: Tensor = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
    found = trainer_trl.take_metrics(trainer, inputs)
    loss = loss / divisor
    model.backward(loss)
    return loss, found


@step(non_split_inputs=["num_items"], input_split_axes=_AXES, weight=_weight)  # type: ignore[untyped-decorator]
def _predict(
    trainer: SMPTrainerMixin,
    model: nn.Module,
    inputs: dict[str, Any],
    num_items: Any,
    size: int,
    has_loss: bool,
    ignored: tuple[str, ...] | None,
) -> tuple[Tensor | None, Any, trainer_trl.Found | None]:
    """Returns loss, outputs and metrics of one microbatch; no outputs if ``ignored`` is None."""
    inputs = restored(inputs)
    items = _share(trainer, num_items, inputs, size)
    with trainer.compute_loss_context_manager():
        if not has_loss:
            loss, outputs, found = None, model(**inputs), None
        elif ignored is None:
            loss = trainer.compute_loss(model, dict(inputs), num_items_in_batch=items)
            return loss, None, trainer_trl.take_metrics(trainer, inputs)
        else:
            loss, outputs = trainer.compute_loss(
                model, dict(inputs), return_outputs=True, num_items_in_batch=items
            )
            found = trainer_trl.take_metrics(trainer, inputs)
    if ignored is None:
        return loss, None, found
    if isinstance(outputs, dict):
        left_out = {*ignored, "loss"} if has_loss else set(ignored)
        kept = tuple(value for key, value in outputs.items() if key not in left_out)
        return loss, kept, found
    return loss, tuple(outputs[1:] if has_loss else outputs), found


@step(input_split_axes=_AXES, weight="samples")  # type: ignore[untyped-decorator]
def _reference(
    trainer: SMPTrainerMixin, model: nn.Module, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of the reference for one microbatch of pairs."""
    with torch.no_grad():
        chosen, rejected = trainer._own_ref_log_probs(model, restored(inputs))
    return chosen, rejected


def _share(trainer: SMPTrainerMixin, num_items: Any, inputs: dict[str, Any], size: int) -> Any:
    """Returns a microbatch's share of the number of tokens, by which its loss is divided.

    So the mean over microbatches and replicas is divided by all tokens, and terms that are not
    divided stay means.
    """
    if num_items is None:
        return None
    is_of_all = trainer.args.average_tokens_across_devices
    replicas = trainer.accelerator.num_replicas if is_of_all else 1
    return num_items * (num_samples(inputs) / (size * replicas))


def _concat(outputs: Any, cut: dict[str, Any]) -> Any:
    """Concatenates outputs of all microbatches of a batch."""
    return pytree.tree_map_only(
        StepOutput,
        lambda o: joined_outputs(o.outputs, cut),
        outputs,
        is_leaf=lambda o: isinstance(o, StepOutput),
    )
