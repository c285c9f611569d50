"""Makes the objects that a script for Accelerate has before its loop."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["loader", "model", "optimizer", "scheduler"]

torch.manual_seed(1)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
               eos_token_id=1)
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
_ids = torch.randint(2, 32, (16, 12))
loader = torch.utils.data.DataLoader([{"input_ids": i, "labels": i} for i in _ids], batch_size=4)


def after(names: dict[str, Any]) -> None:
    """Two updates of two batches each, over a pipeline."""
    assert names["smp"].pp_size() == 2
    steps = {int(state["step"]) for state in names["optimizer"].state.values()}
    assert steps == {2}
