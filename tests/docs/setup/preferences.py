"""A small Llama with a reference, a tokenizer of words, and pairs of texts."""

from __future__ import annotations

import math
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["model", "pairs", "reference", "tokenizer"]

_WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(13))]
_tokenizer = Tokenizer(
    models.WordLevel({word: i for i, word in enumerate(_WORDS)}, unk_token="<unk>")
)
_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=_tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)


def _model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                    num_attention_heads=2, bos_token_id=1, eos_token_id=1)
    )  # fmt: skip


model, reference = _model(1), _model(2)
pairs = Dataset.from_list(
    [{"prompt": f"w{i} w1", "chosen": f" w{i} w2 w3", "rejected": " w4"} for i in range(12)]
)


def after(names: dict[str, Any]) -> None:
    """Checks that policy and reference are in a pipeline, and that rewards have moved."""
    assert names["smp"].pp_size() == 2
    trainer = names["trainer"]
    assert trainer.state.global_step == 9  # 3 epochs of 3 batches
    assert trainer.ref_model.partitioned and trainer.model_wrapped.partitioned
    assert math.isfinite(trainer.evaluate(pairs)["eval_rewards/margins"])
