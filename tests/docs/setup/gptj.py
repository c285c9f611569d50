"""A small GPT-J in a folder of Hugging Face, and batches for it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPTJConfig, GPTJForCausalLM

import smp

__all__ = ["GPTJForCausalLM", "LambdaLR", "batch", "config", "loader", "model", "path", "smp"]
__all__ += ["torch", "train_step"]

torch.manual_seed(1)
config = GPTJConfig(
    vocab_size=32, n_positions=16, n_embd=16, n_layer=4, n_head=2, rotary_dim=4, use_cache=False,
    bos_token_id=0, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
model = GPTJForCausalLM(config)
path = f"plain{os.getpid()}"
model.save_pretrained(path)
loader = []
for _ in range(3):
    ids = torch.randint(2, 32, (8, 12))
    mask = torch.arange(12) < torch.randint(2, 13, (8, 1))  # lengths differ from sample to sample
    labels = ids.masked_fill(~mask, -100)
    loader.append({"input_ids": ids, "attention_mask": mask.long(), "labels": labels})
batch = loader[0]


@smp.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss)
    return loss


def after(names: dict[str, Any]) -> None:
    """Prints the last loss; the model has learnt something, on as many ranks as there are."""
    model = names["model"]
    if isinstance(model, smp.DistributedModel):
        if "loss" not in names:
            train_step(model, batch)
        assert model.partitioned and smp.size() == 2
        assert any(True for _ in model.local_parameters())
    if "loss" in names:
        print(f"loss {names['loss'].item()}")
