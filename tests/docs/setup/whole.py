"""A GPT-J that is partitioned, and its files when they are written."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPTJForCausalLM

from tests.docs.setup import gptj
from tests.docs.setup.gptj import smp, train_step

__all__ = ["model", "smp"]

smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
model = smp.DistributedModel(gptj.model)
train_step(model, gptj.batch)


def after(names: dict[str, Any]) -> None:
    """Checks that both files have the model's values."""
    whole = model.state_dict()
    loaded = GPTJForCausalLM.from_pretrained("out").state_dict()
    full = torch.load("out/full.pt", weights_only=True)
    for name, value in whole.items():
        assert torch.equal(full[name], value) and torch.equal(loaded[name], value), name
