"""Compares the casts of 16-bit training with those of transformers when it loads in 16 bits."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

from smp.modules.training_dtypes import plan_dtypes
from tests.zoo.catalogue import families
from tests.zoo.configs import VARIANTS, tiny

transformers = pytest.importorskip("transformers", minversion="5.0")

# Families with parameters, or buffers, that stay in float32 in both dtypes, in one, or in none.
KNOWN = (
    "llama", "deepseek_v3", "ernie4_5_moe", "t5", "gpt_oss", "rwkv", "olmo_hybrid", "xlnet",
    "detr", "gemma3", "wav2vec2_conformer", "voxtral", "kimi_linear", "blip_2", "granite_speech5",
)  # fmt: skip


def makers() -> list[str]:
    """Families of transformers; known ones first."""
    others = [family for family in families() if family not in KNOWN]
    return [*KNOWN, *(others if os.environ.get("SMP_GRID") == "all" else others[::8])]


def find(family: str) -> tuple[Any, Any]:
    """A class of a family and a tiny configuration with which it can be made."""
    reasons = []
    for entry in families().get(family, []):
        for variant in VARIANTS:
            try:
                config = tiny(entry.load().config_class(), variant)
                with torch.device("meta"):
                    entry.load()(copy.deepcopy(config))
                return entry.load(), config
            except Exception as error:  # configurations and models raise what they like
                reasons.append(f"{entry.name}: {type(error).__name__}: {error}")
    pytest.skip(f"no configuration of {family}: {reasons[:3]}")


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    tensors = [*model.named_parameters(remove_duplicate=False)]
    tensors += model.named_buffers(remove_duplicate=False)
    return {name: tensor.dtype for name, tensor in tensors}


def differences(family: str) -> list[str]:
    """Tensors of one family that we give another dtype than transformers does."""
    cls, config = find(family)
    found = []
    for half in (torch.bfloat16, torch.float16):
        torch.manual_seed(1)
        ours = cls(copy.deepcopy(config))
        state = {name: value.clone() for name, value in ours.state_dict().items()}
        loaded = cls.from_pretrained(
            None, config=config, state_dict=state, dtype=half, ignore_mismatched_sizes=True
        )
        theirs = dtypes_of(loaded)
        draws = torch.get_rng_state()
        plan_dtypes(ours, half).cast(ours)
        assert torch.equal(torch.get_rng_state(), draws), "a random number was drawn"
        assert torch.get_default_dtype() == torch.float32
        mine = dtypes_of(ours)
        assert half in mine.values() and mine.keys() == theirs.keys()
        found += [
            f"{name}: {mine[name]}, transformers {theirs[name]}, in {half}"
            for name in mine
            # Where a whole module is kept, transformers makes its counters floating, too.
            if mine[name] != theirs[name] and mine[name].is_floating_point
        ]
    return found


@pytest.mark.sample(keep=len(KNOWN))
@pytest.mark.parametrize("family", makers())
def test_16_bit_training_casts_what_transformers_casts(family: str) -> None:
    assert differences(family) == []
