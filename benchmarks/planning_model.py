"""A model that `planning` trains: a GPT-2 of transformers, as a user has it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


def make_model(shape: Mapping[str, int]) -> nn.Module:
    """The same weights in each process and at each call.

    Args:
        shape: `n_layer`, `n_embd`, `n_head`, `n_positions`, `vocab_size`.
    """
    torch.manual_seed(0)
    config = GPT2Config(
        **shape,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def make_batch(shape: Mapping[str, int], samples: int) -> Tensor:
    """Token ids `[samples, n_positions]`, which are the labels as well."""
    generator = torch.Generator().manual_seed(1)
    size = (samples, shape["n_positions"])
    return torch.randint(shape["vocab_size"], size, generator=generator)
