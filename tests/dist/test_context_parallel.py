"""Blocks that compute parts of sequences (``context_parallel_degree``) train like one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.dist.training import Run, init, make_model
from tests.harness import train_step_of
from tests.reference.data import compute_loss, make_batch


def count_calls(rank: int, run: Run) -> dict[str, tuple[int, int, list[str]]]:
    """Calls of blocks in parts and with whole sequences in one step, and reasons of the latter."""
    import smp

    init(run)
    model: Any = make_model(run)
    step = train_step_of(model, lambda model, batch: compute_loss(run.case, model, batch))
    step(make_batch(run.case, run.dtype, smp.dp_rank(), 0))
    blocks = model._engine.sequences.blocks
    return {block.name: (block.num_cut, block.num_whole, block.problems) for block in blocks}


CASES = [
    "hf/gpt2",
    "hf/gptj",
    "hf/gpt_neo",
    "hf/gpt_neox",
    "hf/llama",
    "hf/qwen2",
    "hf/mistral",
    "hf/bert",
    "hf/roberta",
    "hf/t5",
    "hf/vit",
    "nn/transformer",
    "cnn",
    "moe",
    "tree",
]


@pytest.mark.parametrize("case", CASES)
def test_tmp(pool: Pool, case: str) -> None:
    run = Run(case, 1, 1, cp=2)
    try:
        for x in pool.run(2, count_calls, run)[:1]:
            for k, v in list(x.items())[:4]:
                print(case, k, v)
    except Exception as e:
        print(case, "FAILED", str(e)[-1500:])
