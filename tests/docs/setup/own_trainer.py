"""A trainer with a loss of its own, and what it is made of."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import smp

__all__ = ["MyTrainer", "arguments", "model", "train_dataset"]

smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})


class MyTrainer(Trainer):
    num_losses = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        MyTrainer.num_losses += 1
        return super().compute_loss(*args, **kwargs)


torch.manual_seed(1)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
               eos_token_id=1)
)  # fmt: skip
arguments = TrainingArguments(
    "own", use_cpu=True, max_steps=3, per_device_train_batch_size=4, report_to=[],
    save_strategy="no",
)  # fmt: skip
train_dataset = [{"input_ids": ids, "labels": ids} for ids in torch.randint(2, 32, (24, 12))]


def after(names: dict[str, Any]) -> None:
    """Checks that the trainer's own loss ran for each microbatch."""
    assert names["trainer"].state.global_step == 3
    assert MyTrainer.num_losses >= 6
