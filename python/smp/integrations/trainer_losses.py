"""Finds out what the loss of a trainer is: a sum divided by a number of labels, or a mean.

A `Trainer` passes the number of labels of all accumulated batches to each model whose forward takes
further keyword arguments, and to ``compute_loss_func``. Some do not use it (BERT): their loss stays
a mean over the labels of the microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer

import smp._C as _C
from smp.integrations import trainer_trl
from smp.model import DistributedModel
from smp.partition.stand_in import reads_number
from smp.world.log import first_rank_log


def is_divided(trainer: Any, model: DistributedModel, inputs: Mapping[str, Any]) -> bool:
    """Returns whether the loss of a trainer is divided by the number of labels that it is given.

    ``loss_is_scaled_for_ga`` of the trainer counts, if it is set. Else ``compute_loss`` runs once,
    by shapes alone. If it cannot, the loss counts as divided, with a warning.

    Args:
        trainer: the trainer.
        model: model of the trainer.
        inputs: a batch.
    """
    stated = getattr(trainer, "loss_is_scaled_for_ga", None)
    if stated is not None:
        return bool(stated)
    root, device = model.get_module(), torch.device(trainer.args.device)
    # Trainers of TRL take the loss of `Trainer` and read values for their metrics.
    is_of_trl = trainer_trl.is_of_trl(trainer)
    compute: Any = Trainer.compute_loss.__get__(trainer) if is_of_trl else trainer.compute_loss

    def loss_of(faked: Callable[[Any], Any], number: Tensor) -> Tensor:
        loss: Tensor = compute(root, faked(dict(inputs)), num_items_in_batch=number)
        return loss

    try:
        return reads_number(root, device, loss_of)
    except Exception as error:
        first_rank_log.warning(
            "%s%s: whether the loss is divided by num_items_in_batch cannot be found out without "
            "values (%s: %s), so it counts as divided. If it is a mean, set "
            "loss_is_scaled_for_ga = False on the trainer",
            _C.rank_prefix(), type(trainer).__name__, type(error).__name__,
            (str(error).splitlines() or [""])[0],
        )  # fmt: skip
        return True
