"""Samples for a small GPT-2; the folder `gpt2` replaces the hub's model of this name."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["eval_dataset", "train_dataset"]

torch.manual_seed(1)
_own = f"gpt2-{os.getpid()}"
GPT2LMHeadModel(
    GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
               eos_token_id=1)
).save_pretrained(_own)  # fmt: skip
try:
    os.rename(_own, "gpt2")
except OSError:
    assert os.path.isdir("gpt2")  # another rank was first

_ids = torch.randint(2, 32, (24, 12))
_samples = [{"input_ids": ids, "labels": ids} for ids in _ids]
train_dataset, eval_dataset = _samples[:16], _samples[16:]


def after(names: dict[str, Any]) -> None:
    """Checks that the model has learnt, over a pipeline."""
    trainer = names["trainer"]
    assert names["smp"].pp_size() == 2
    assert trainer.state.global_step == 6  # 3 epochs of 2 batches
    loss = trainer.evaluate()["eval_loss"]
    assert math.isfinite(loss) and loss < math.log(32) + 0.5
