"""A small GPT-J in the folder ``my-model``, and batches for it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import GPTJConfig, GPTJForCausalLM

from tests.patience import wait_until

__all__ = ["batches"]

torch.manual_seed(1)
batches = [torch.randint(2, 64, (8, 32)) for _ in range(3)]
_config = GPTJConfig(
    vocab_size=64, n_positions=32, n_embd=32, n_layer=4, n_head=2, rotary_dim=4, use_cache=False,
    bos_token_id=0, eos_token_id=1,
)  # fmt: skip
_folder = Path("my-model")
if os.environ.get("RANK", "0") == "0":
    GPTJForCausalLM(_config).save_pretrained("being-written")
    os.replace("being-written", _folder)
wait_until(_folder.exists, lambda: "the first rank writes no model")


def after(names: dict[str, object]) -> None:
    """The choice is written."""
    assert Path("smp_auto.json").is_file() and callable(names["train"])
