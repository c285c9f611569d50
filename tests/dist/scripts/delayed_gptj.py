"""Starts a GPT-J of six billion parameters without memory for it.

Usage: delayed_gptj.py FILE. Builds, traces, partitions for eight pipeline ranks and plans the
shards of one of them over eight ranks; then makes one stage of a narrower model of equally many
layers. Writes as JSON: seconds of each part of both, resident bytes, and counts.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import GPTJConfig, GPTJForCausalLM

import smp
from smp import _C, data_parallel
from smp.initial.initialise import initialise_delayed
from smp.partition.decide import decide
from smp.partition.decision import Decision
from smp.partition.trace import trace
from smp.partition.tree import build_tree
from smp.world import runtime

NUM_STAGES, NUM_SHARDS, STAGE = 8, 8, 3
CPU = torch.device("cpu")
CONFIG = SimpleNamespace(
    auto_partition=True,
    default_partition=0,
    memory_weight=None,
    pipeline="interleaved",
    microbatches=8,
    active_microbatches=None,
)


class Laps:
    """Seconds of the processor since the last lap, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.process_time()

    def end(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = now - self._began
        self._began = now


def decided(model: nn.Module, length: int, laps: Laps) -> Decision:
    ids = torch.zeros(1, length, dtype=torch.long)
    traced = trace(model, (), {"input_ids": ids, "labels": ids}, device=CPU)
    laps.end("trace")
    decision = decide(model, CONFIG, NUM_STAGES, index=build_tree(model, traced))
    laps.end("partition")
    return decision


def parameters_of(decision: Decision, stage: int) -> list[tuple[str, nn.Parameter]]:
    """Returns one stage's parameters, with their names in the model."""
    owners = decision.partition_of
    return [
        (f"{name}.{key}" if name else key, parameter)
        for name, module in decision.modules[0].named_modules()
        for key, parameter in module.named_parameters(recurse=False)
        if owners[module] == stage
    ]


def plan(decision: Decision) -> tuple[int, int]:
    """Elements that a rank of the stage holds, and those of the stage."""
    named = parameters_of(decision, STAGE)
    rank = runtime.current().rank
    reductions = [data_parallel.reduction_of(rank, parameter) for _, parameter in named]
    records = data_parallel.make_records(named, reductions)
    buckets = _C.plan_shards(records, 25 << 20, NUM_SHARDS, _C.ShardLayout.PER_PARAMETER)
    held = sum(holding.numel for bucket in buckets for holding in bucket.holdings[0])
    return held, sum(parameter.numel() for _, parameter in named)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def large(told: dict[str, Any]) -> None:
    laps = Laps()
    with smp.model_creation(dtype=torch.bfloat16):
        model = GPTJForCausalLM(GPTJConfig(use_cache=False))
    laps.end("build")
    decision = decided(model, 2048, laps)
    told["held"], told["of_stage"] = plan(decision)
    laps.end("plan")
    told["seconds"] = laps.seconds
    told["parameters"] = sum(p.numel() for p in model.parameters())
    told["on_meta"] = all(p.is_meta for p in model.parameters())
    told["stages"] = len(set(decision.partition_idxs))
    told["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def narrow(told: dict[str, Any]) -> None:
    laps = Laps()
    with smp.model_creation():
        model = GPTJForCausalLM(GPTJConfig(n_embd=512, n_head=8, rotary_dim=64, use_cache=False))
    laps.end("build")
    decision = decided(model, 128, laps)
    told["narrow_seconds"] = laps.seconds
    local = {parameter for _, parameter in parameters_of(decision, STAGE)}
    before = resident_bytes()
    initialise_delayed(model, local.__contains__, CPU)
    told["grown_bytes"] = resident_bytes() - before
    told["stage_bytes"] = sum(p.numel() * p.element_size() for p in local)
    told["model_bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
    told["made"] = [sum(not p.is_meta for p in model.parameters()), len(local)]


def main() -> None:
    torch.set_num_threads(1)
    smp.init({"delayed_parameter_initialization": True})
    told: dict[str, Any] = {}
    large(told)
    narrow(told)
    Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
