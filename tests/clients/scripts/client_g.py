"""Client G: the Trainer of transformers 4.30, as it is, on small models.

Without the variables of the service it is an ordinary training in one process, the reference.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import Trainer, TrainingArguments, set_seed

from tests.clients.scripts.trainer_models import accuracy, model_of, samples_of


class OnCpu(TrainingArguments):
    """The one thing that has to be different where there is no GPU."""

    @cached_property
    def _setup_devices(self) -> torch.device:
        self.distributed_state = None
        self._n_gpu = 1
        return torch.device("cpu")


class WrapsFirst(Trainer):
    """Keeps the wrapped model early, for tensor parallelism: 4.30 makes the optimizer first."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        self.model_wrapped = super()._wrap_model(model, training, dataloader)
        return self.model_wrapped


class Scales(Trainer):
    """A trainer with a dynamic loss scale; 4.30 itself asks for none."""

    dynamic_loss_args: ClassVar[dict[str, float]] = {}

    def create_optimizer(self) -> Any:
        import smdistributed.modelparallel.torch as smp

        self.optimizer = smp.DistributedOptimizer(
            super().create_optimizer(),
            dynamic_loss_scale=True,
            dynamic_loss_args=self.dynamic_loss_args,
        )
        return self.optimizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="gpt2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--num_eval", type=int, default=8)
    parser.add_argument("--max_steps", type=int, default=4)
    parser.add_argument("--resume", default="")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--evaluate_first", type=int, default=0)
    parser.add_argument("--init_scale", type=float, default=0)
    args = parser.parse_args()
    output = Path(os.environ["SM_OUTPUT_DATA_DIR"])
    is_parallel = bool(os.environ.get("SM_FRAMEWORK_PARAMS"))
    training = (OnCpu if is_parallel else TrainingArguments)(
        no_cuda=not is_parallel,
        output_dir=str(output),
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        max_steps=args.max_steps,
        learning_rate=2e-2,
        adam_epsilon=1e-3,
        weight_decay=0.01,
        warmup_steps=1,
        max_grad_norm=0.5,
        logging_steps=1,
        evaluation_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the best one is not the last one
        seed=7,
        data_seed=7,
        report_to=[],
        disable_tqdm=True,
        save_safetensors=False,
    )
    set_seed(3)
    # This release loads its random states the way torch did before 2.6.
    torch.serialization.add_safe_globals(
        [np._core.multiarray._reconstruct, np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    )
    if is_parallel:
        import smdistributed.modelparallel.torch as smp
    if args.split and is_parallel:
        with smp.tensor_parallelism():
            model = model_of(args.kind)
    else:
        model = model_of(args.kind)
    Scales.dynamic_loss_args = {"init_scale": args.init_scale}
    trainer = (WrapsFirst if args.split else Scales if args.init_scale else Trainer)(
        model=model,
        args=training,
        train_dataset=samples_of(args.kind, 64, seed=1),
        eval_dataset=samples_of(args.kind, args.num_eval, seed=2),
        compute_metrics=accuracy,
    )
    if args.evaluate_first:  # before there is an optimizer
        trainer.evaluate()
    trainer.train(resume_from_checkpoint=args.resume or None)
    final = trainer.evaluate()
    history = trainer.state.log_history
    values = {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "evaluated": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "accuracies": [entry["eval_accuracy"] for entry in history if "eval_accuracy" in entry],
        "checksums": [entry["eval_checksum"] for entry in history if "eval_checksum" in entry],
        "final": final,
        "best": trainer.state.best_model_checkpoint,
        "files": sorted(str(path.relative_to(output)) for path in output.rglob("*")),
        "is_parallel": is_parallel,
        "has_overflow": bool(getattr(trainer.optimizer, "overflow", False)),
        "loss_scale": getattr(trainer.optimizer, "loss_scale", None),
        "fp16": bool(training.fp16),
        "num_local": 0,
    }
    if is_parallel:
        wrapped = trainer.model_wrapped
        values["num_local"] = sum(1 for _ in wrapped.local_parameters())
        values["num_split"] = sum(map(wrapped.is_distributed_parameter, wrapped.parameters()))
    rank = smp.rank() if is_parallel else 0
    if rank == 0:  # what was saved is what plain transformers loads
        _, info = type(model).from_pretrained(
            trainer.state.best_model_checkpoint, output_loading_info=True
        )
        values["not_loaded"] = [names for names in info.values() if names]
    Path(os.environ["SM_CHANNEL_TRAIN"], f"result_{rank}.json").write_text(
        json.dumps(values, default=float)
    )


if __name__ == "__main__":
    main()
