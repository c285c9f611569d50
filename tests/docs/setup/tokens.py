"""A small GPT-2 over two processes, padded batches, and the loss of the plain script."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import smp

__all__ = ["cross_entropy", "smp"]

smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
torch.manual_seed(0)
_ids = torch.randint(2, 64, (8, 16))
_is_text = torch.arange(16) < torch.randint(2, 17, (8, 1))
_batch = {"input_ids": _ids, "labels": _ids.masked_fill(~_is_text, -100)}
_config = GPT2Config(
    vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, use_cache=False,
    bos_token_id=0, eos_token_id=1, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
)  # fmt: skip
_model = GPT2LMHeadModel(_config)


def after(names: dict[str, Any]) -> None:
    """The loss is that of the whole batch."""
    plain = copy.deepcopy(_model)(**_batch).loss.item()
    model = smp.DistributedModel(_model)
    loss = names["train_step"](model, _batch).reduce_mean().item()
    assert loss == pytest.approx(plain, rel=1e-5)
