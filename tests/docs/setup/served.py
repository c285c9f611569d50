"""A GPT-J that is partitioned, and its tensors where they were sent or written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GPTJForCausalLM

from tests.docs.setup.whole import model, smp

__all__ = ["model", "received", "smp", "torch"]

received: dict[str, Tensor] = {}


def after(names: dict[str, Any]) -> None:
    """Checks that the files, or what rank 0 received, have the model's values."""
    found: Any = received
    if "files" in names:
        assert all(path.is_file() for path in names["files"])
        found = GPTJForCausalLM.from_pretrained("out/hf", dtype="auto").state_dict()
    elif smp.rank() == 0:
        assert names["announced"]["names"] == list(received)
    whole = model.state_dict()
    assert len(found) == len(whole) or smp.rank() > 0
    for name, value in found.items():
        assert torch.equal(value, whole[name].bfloat16()), name
