"""Ranks with experts measure what even and uneven loads hold.

Usage: experts_memory.py FOLDER, under the allocation meter of the benchmarks, on some ranks. Every
rank writes ``FOLDER/rank<i>.json``: bytes by load, beside those that were there before: kept
between forward and backward, and the peak of both.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

import smp
from smp.nn import experts

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from allocation_meter import AllocationMeter  # noqa: E402

TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 512, 64, 256, 8, 2


def choices(load: str, rank: int, world_size: int) -> Tensor:
    """Numbers of experts [tokens, k]: as many for each rank, or all for the first one."""
    each = EXPERTS // world_size
    first = torch.zeros(TOKENS, dtype=torch.long)
    if load == "even":
        first = torch.arange(TOKENS) % world_size * each
    return torch.stack([first, first + 1], 1)


def measure(meter: AllocationMeter, module: torch.nn.Module, ids: Tensor) -> dict[str, int]:
    weights = torch.full(ids.shape, 0.5, requires_grad=True)
    found = {}
    for _ in range(2):  # gradients of parameters are new in the first one only
        x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
        gc.collect()
        live = meter.restart()
        y = module(x, ids, weights)
        found["kept"] = meter.live() - live
        y.sum().backward()
        found["peak"] = meter.peak() - live
        del y, x
    return found


def main() -> None:
    torch.set_num_threads(1)
    meter = AllocationMeter()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    smp.init(
        {
            "tensor_parallel_degree": world_size,
            "expert_parallel_degree": world_size,
            "ddp": True,
        }
    )
    config = MixtralConfig(
        vocab_size=32, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=EXPERTS,
    )  # fmt: skip
    with smp.tensor_parallelism():
        plain = MixtralForCausalLM(config)
    smp.DistributedModel(plain)
    module = plain.model.layers[0].mlp.experts
    assert isinstance(module, experts.SpreadExperts)
    results = {}
    for load in ("even", "one rank", "one rank at once"):
        experts.PAIRS_AT_A_TIME = 100 if load.endswith("at once") else 2
        results[load] = measure(meter, module, choices(load, rank, world_size))
    path = Path(sys.argv[1]) / f"rank{rank}.json"
    path.write_text(json.dumps(results))
    smp.shutdown()


if __name__ == "__main__":
    main()
