"""A small GPT-2 in a folder of Hugging Face."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

__all__ = ["GPT2LMHeadModel", "path", "torch"]

torch.manual_seed(1)
path = f"plain{os.getpid()}"
GPT2LMHeadModel(
    GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
               eos_token_id=1)
).save_pretrained(path)  # fmt: skip


def after(names: dict[str, Any]) -> None:
    """The model is split, has its weights and trains."""
    import smp

    model = names["model"]
    assert smp.tp_size() == 2 and any(model.is_distributed_parameter(p) for p in model.parameters())
    whole = smp.nn.huggingface.gpt2.translate_state_dict_to_hf_gpt2(model.state_dict())
    plain = GPT2LMHeadModel.from_pretrained(path).state_dict()
    assert plain and all(torch.equal(value, whole[name]) for name, value in plain.items())
    ids = torch.randint(2, 32, (4, 12))
    model(input_ids=ids, labels=ids).loss.backward()
    names["optimizer"].step()
