"""A rank that reads and quantizes its own layers never holds more than its part and a layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_to_the_end

SCRIPT = REPO / "tests" / "dist" / "scripts" / "quantized_memory.py"

for package in ("peft", "bitsandbytes"):
    pytest.importorskip(
        package, reason=f"{package} is not installed; pip install -r requirements/quantized.txt"
    )


@pytest.mark.sample(keep=0)
def test_a_model_larger_than_each_rank_trains_on_two(metered_pool: Pool, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=64, hidden_size=384, intermediate_size=1024, num_hidden_layers=32,
        num_attention_heads=6, use_cache=False,
    )  # fmt: skip
    LlamaForCausalLM(sizes).save_pretrained(tmp_path / "base")
    for how, world_size in (("one", 1), ("pipeline", 2)):
        run_to_the_end(metered_pool, SCRIPT, world_size, [str(tmp_path), how])
    one = json.loads((tmp_path / "one0.json").read_text())
    ranks = [json.loads((tmp_path / f"pipeline{rank}.json").read_text()) for rank in range(2)]
    print(one, ranks)
    layer = 384 * 1024 * 4  # bytes of the largest weight in full precision
    for rank in ranks:
        assert rank["made"] < rank["parameters"] + 3 * layer, "a weight, and what quantizes it"
        assert max(rank["made"], rank["trained"]) < 0.9 * one["parameters"], "larger than a rank"
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert sum(rank["parameters"] for rank in ranks) == pytest.approx(one["parameters"], rel=1e-3)
    assert one["losses"][-1] != one["losses"][0]
