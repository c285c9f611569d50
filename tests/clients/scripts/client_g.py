"""Client G: the Trainer of transformers 4.30, as it is, on small models.

Without the variables of the service it is an ordinary training in one process, the reference.
"""

from __future__ import annotations

import argparse
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

VOCABULARY, LENGTH, LAYERS, CLASSES = 60, 12, 4, 3
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class OnCpu(TrainingArguments):
    """The one thing that has to be different where there is no GPU."""

    @cached_property
    def _setup_devices(self) -> torch.device:
        self.distributed_state = None
        self._n_gpu = 1
        return torch.device("cpu")


class WrapsFirst(Trainer):
    """For tensor parallelism: this release makes the optimizer before it keeps the wrapped model."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        self.model_wrapped = super()._wrap_model(model, training, dataloader)
        return self.model_wrapped


def model_of(kind: str) -> nn.Module:
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=LAYERS, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 20,
        "initializer_range": 0.2,
    }  # fmt: skip
    if kind == "roberta":
        config = RobertaConfig(**sizes, **NO_DROPOUT, num_labels=CLASSES, classifier_dropout=0.0)
        return RobertaForSequenceClassification(config)
    return BertForMaskedLM(BertConfig(**sizes, **NO_DROPOUT))


def samples_of(kind: str, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Every sample has equally many counted labels, so means of microbatches are means."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        ids = torch.randint(4, VOCABULARY, (LENGTH,), generator=generator)
        ids[1::2] = ids[::2]  # something to be learnt
        labels = ids.clone()
        if kind == "roberta":
            labels = ids[0] % CLASSES
        elif kind == "bert":
            masked = torch.randperm(LENGTH, generator=generator)[:4]
            labels = torch.full_like(ids, -100)
            labels[masked] = ids[masked]
            ids[masked] = 3
        samples.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return samples


def accuracy(prediction: Any) -> dict[str, float]:
    logits, labels = prediction.predictions, prediction.label_ids
    counted = labels != -100
    right = logits.argmax(-1) == labels
    return {"accuracy": float(right[counted].mean()), "checksum": float(np.abs(logits).sum())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="gpt2")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--num_eval", type=int, default=8)
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--resume", default="")
    parser.add_argument("--split", type=int, default=0)
    parser.add_argument("--evaluate_first", type=int, default=0)
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
    trainer = (WrapsFirst if args.split else Trainer)(
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
        "fp16": bool(training.fp16),
        "num_local": 0,
    }
    if is_parallel:
        wrapped = trainer.model_wrapped
        values["num_local"] = sum(1 for _ in wrapped.local_parameters())
        values["num_split"] = sum(map(wrapped.is_distributed_parameter, wrapped.parameters()))
    rank = smp.rank() if is_parallel else 0
    Path(os.environ["SM_CHANNEL_TRAIN"], f"result_{rank}.json").write_text(
        json.dumps(values, default=float)
    )


if __name__ == "__main__":
    main()
