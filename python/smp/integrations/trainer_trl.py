"""Trainers of TRL under `SMPTrainerMixin`: what is refused, references of DPO, and metrics.

TRL is not imported here. Its trainers are recognised by the classes that a trainer derives from.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import Trainer

import smp._C as _C
from smp.integrations.adapters import is_adapted
from smp.world import comm

_SFT, _DPO = "SFTTrainer", "DPOTrainer"
_BASES = ("_BaseTrainer", "BaseTrainer")
# Losses of DPO that are no mean over pairs, with what they are instead.
_WHOLE_BATCH_LOSSES = {
    "aot": "sorts the pairs of a batch",
    "aot_unpaired": "sorts the pairs of a batch",
    "sft": "is a mean over tokens",
}
# Options of TRL, and of trainers that have taken over its names.
_REFUSED_OPTIONS = {
    "activation_offloading": "use offload_activations of smp.init",
    "predict_with_generate": "evaluate losses, and generate from the saved folder",
    "sync_ref_model": "the reference model is frozen",
}


def is_dpo(trainer: Any) -> bool:
    """Returns whether a trainer is TRL's ``DPOTrainer``."""
    return _DPO in _classes(type(trainer))


def is_of_trl(trainer: Any) -> bool:
    """Returns whether a trainer derives from one of TRL."""
    return bool(_classes(type(trainer)))


def check_class(cls: type) -> None:
    """Raises TypeError if a class derives from a trainer of TRL that is not supported."""
    for name in _classes(cls):
        if name not in (_SFT, _DPO):
            raise TypeError(
                f"class {cls.__name__}: {name} of TRL is not supported by smp, which runs "
                f"{_SFT} and {_DPO}; of the others, those that generate text while they train "
                "(GRPO, RLOO, online DPO, with or without vLLM) need a whole model on each process"
            )


def check_options(trainer: Any) -> None:
    """Raises ValueError if the arguments of a trainer ask for what smp does not do."""
    name = type(trainer).__name__
    for option, remedy in _REFUSED_OPTIONS.items():
        if getattr(trainer.args, option, False):
            raise ValueError(
                f"{_C.rank_prefix()}{name}: {option}=True is not supported by smp; {remedy}"
            )
    if not is_dpo(trainer):
        return
    for loss_type in trainer.args.loss_type:
        if loss_type in _WHOLE_BATCH_LOSSES:
            raise ValueError(
                f"{_C.rank_prefix()}{name}: loss_type '{loss_type}' "
                f"{_WHOLE_BATCH_LOSSES[loss_type]}, so its microbatches have another loss than "
                "the batch; use a loss that is a mean over pairs, such as 'sigmoid' or 'ipo'"
            )
    if trainer._is_vision_dataset:
        raise ValueError(
            f"{_C.rank_prefix()}{name}: pairs with images are not supported by smp; their pixels "
            "have no row for each sequence"
        )


def check_model(trainer: Any, wrapped: nn.Module) -> None:
    """Raises ValueError if the head whose weights TRL reads is split, or called in two ways.

    Args:
        trainer: trainer.
        wrapped: distributed model, in which marked modules are replaced.
    """
    if not _classes(type(trainer)):
        return
    split = [n for n, p in wrapped.named_parameters() if hasattr(p, "_smp_placement")]
    if split:
        raise ValueError(
            f"{_C.rank_prefix()}{type(trainer).__name__}: {split[0]} is split over tensor-parallel "
            "ranks, and TRL computes its loss from the whole weights of the head; create the model "
            "outside of smp.tensor_parallelism, and use pipeline_parallel_degree or "
            "sharded_data_parallel_degree"
        )
    smooths = getattr(trainer.args, "label_smoothing_factor", 0) > 0
    has_own = getattr(trainer, "compute_loss_func", None) is not None
    if not is_dpo(trainer) and (smooths or has_own) and comm.pp_size() > 1:
        option = "label_smoothing_factor" if smooths else "compute_loss_func"
        raise ValueError(
            f"{_C.rank_prefix()}{type(trainer).__name__}: with {option} TRL calls the model once "
            "for the loss, where the head runs on the last pipeline rank, and once for metrics, "
            "where the weights of the head are read on the first one; leave it out, or use "
            "pipeline_parallel_degree 1"
        )


def check_data_set(trainer: Any, dataset: Any, name: str) -> None:
    """Raises ValueError if other ranks cannot read what rank 0 computes of a data set.

    TRL writes log-probabilities of the reference into a file beside the data set. One in memory has
    a folder of its own in each process.
    """
    if comm.size() > 1 and not getattr(dataset, "cache_files", True):
        raise ValueError(
            f"{_C.rank_prefix()}{type(trainer).__name__}: precompute_ref_log_probs needs a data "
            f"set in files that all ranks read, and '{name}' is in memory; use save_to_disk on one "
            "rank and datasets.load_from_disk on all, or precompute_ref_log_probs=False"
        )


def _classes(cls: type) -> list[str]:
    """Returns the names of the trainers of TRL that a class derives from."""
    return [
        base.__name__
        for base in cls.__mro__
        if base.__module__.partition(".")[0] == "trl"
        and issubclass(base, Trainer)
        and base.__name__ not in _BASES
    ]


# ---- references of DPO


@contextlib.contextmanager
def showing_reference(trainer: Any, reference: nn.Module) -> Iterator[None]:
    """Shows a ``DPOTrainer`` a reference model, so that it does not switch adapters itself.

    TRL switches them around each call of the model. Microbatches are in a pipeline at the same
    time, and other ranks have other layers: `reference_adapters` switches around the whole step.
    """
    own = trainer.ref_model
    trainer.ref_model = reference
    try:
        yield
    finally:
        trainer.ref_model = own


@contextlib.contextmanager
def reference_adapters(trainer: Any, own: nn.Module | None) -> Iterator[None]:
    """Switches to the adapters of the reference on every rank: those named "ref", else none.

    Parameters that are frozen stay so, and the others are trained afterwards.

    Args:
        trainer: a ``DPOTrainer``.
        own: the trainer's reference model; None: the policy is the reference, with other adapters.
    """
    model = trainer.model
    if own is not None or not is_adapted(model):
        yield
        return
    is_trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore() -> None:  # PEFT freezes adapters that are not active
        for parameter, requires_grad in is_trained:
            parameter.requires_grad_(requires_grad)

    active, has_copy = model.active_adapter, "ref" in model.peft_config
    if has_copy:
        model.set_adapter("ref")
    try:
        with contextlib.nullcontext() if has_copy else model.disable_adapter():
            restore()
            yield
    finally:
        if has_copy:
            model.set_adapter(active)
        restore()


@contextlib.contextmanager
def given_references(trainer: Any) -> Iterator[None]:
    """Lets a ``DPOTrainer`` take log-probabilities of the reference from its batches."""
    own = trainer.precompute_ref_logps
    trainer.precompute_ref_logps = True
    try:
        yield
    finally:
        trainer.precompute_ref_logps = own


# ---- metrics

Found = dict[str, tuple[float, float]]


class _ListsOfThread(threading.local):
    """Lists of metrics by mode, for each microbatch its own: it has a thread while it runs."""

    def __init__(self) -> None:
        self._lists: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def __getitem__(self, mode: str) -> dict[str, list[float]]:
        return self._lists[mode]


@contextlib.contextmanager
def collecting_metrics(trainer: Any) -> Iterator[None]:
    """Lets a trainer append metrics of a microbatch to lists of its own; see `take_metrics`."""
    if not _classes(type(trainer)):
        yield
        return
    own, num_tokens = trainer._metrics, trainer._total_train_tokens
    trainer._metrics = _ListsOfThread()
    try:
        yield
    finally:
        trainer._metrics, trainer._total_train_tokens = own, num_tokens


def take_metrics(trainer: Any, inputs: Mapping[str, Any]) -> Found | None:
    """Returns the metrics of the microbatch that the trainer has just computed, with weights.

    Args:
        trainer: trainer.
        inputs: microbatch.

    Returns:
        value and the number of what it is a mean over, by name; None if TRL has no part in it.
    """
    if not _classes(type(trainer)):
        return None
    lists = trainer._metrics["train" if trainer.model.training else "eval"]
    found = {name: values[-1] for name, values in lists.items() if name != "num_tokens"}
    lists.clear()
    weights = _weights(trainer, inputs)
    return {
        name: (float(value), weights.get(name, weights["rows"])) for name, value in found.items()
    }


def _weights(trainer: Any, inputs: Mapping[str, Any]) -> dict[str, float]:
    """Returns what metrics of a microbatch are means over, by name; "rows" for all others."""
    rows = float(len(inputs["input_ids"]))
    if not is_dpo(trainer):
        tokens = float((inputs["labels"][..., 1:] != -100).sum())
        return {"rows": rows, "entropy": tokens, "mean_token_accuracy": tokens}
    chosen, rejected = inputs["completion_mask"][:, 1:].chunk(2)
    num_chosen, num_rejected = float(chosen.sum()), float(rejected.sum())
    return {
        "rows": rows, "entropy": num_chosen + num_rejected, "mean_token_accuracy": num_chosen,
        "logits/chosen": num_chosen, "logits/rejected": num_rejected,
    }  # fmt: skip


def add_metrics(
    trainer: Any,
    found: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None,
    inputs: Mapping[str, Any],
    group: Any,
) -> None:
    """Appends the metrics of the global batch to those of the trainer. Collective.

    Args:
        trainer: trainer.
        found: values and weights of the microbatches of this replica, by name.
        inputs: batch of this replica.
        group: group of the replicas.
    """
    if found is None:
        return
    mode = "train" if trainer.model.training else "eval"
    sums = {
        name: (sum(v * w for v, w in zip(values, weights, strict=True)), sum(weights))
        for name, (values, weights) in found.items()
    }
    mask = inputs.get("attention_mask")
    num_tokens = int(mask.sum()) if isinstance(mask, Tensor) else inputs["input_ids"].numel()
    gathered = comm.allgather((sums, num_tokens), group)
    own = trainer._metrics[mode]
    for name in sums:
        total, weight = (sum(part[name][i] for part, _ in gathered) for i in (0, 1))
        own[name].append(total / weight if weight else 0.0)
    if mode == "train":
        trainer._total_train_tokens += sum(tokens for _, tokens in gathered)
    own["num_tokens"] = [trainer._total_train_tokens]
