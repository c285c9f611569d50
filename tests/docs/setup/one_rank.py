"""A small GPT-J in a folder of Hugging Face, and samples without padding."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import GPTJConfig, GPTJForCausalLM

import smp

__all__ = ["GPTJForCausalLM", "ids", "mask", "path", "smp"]

torch.manual_seed(1)
config = GPTJConfig(
    vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, rotary_dim=4, use_cache=False,
    bos_token_id=0, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
plain = GPTJForCausalLM(config)
path = f"plain{os.getpid()}"
plain.save_pretrained(path)
ids = torch.randint(2, 32, (4, 12))
mask = torch.ones_like(ids)


def after(names: dict[str, Any]) -> None:
    """The page trains what the plain model is."""
    model, loss = names["model"], plain(input_ids=ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    got = model.get_module().word_embedding.weight.grad
    expected = plain.transformer.wte.weight.grad
    assert got is not None and expected is not None
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert expected.any()
