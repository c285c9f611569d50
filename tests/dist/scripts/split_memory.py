"""Ranks of a tensor-parallel group measure what a 4-layer GPT holds.

Usage: split_memory.py CASES FOLDER, under the allocation meter of the benchmarks; cases are JSON,
a list of ``[optimize, prescaled]``. Every rank writes ``FOLDER/rank<i>.json``: for each case the
bytes of its parameters, and of what the layers keep between forward and backward. The numbers that
the expected bytes depend on are in there, too.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import smp

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from allocation_meter import AllocationMeter  # noqa: E402

LAYERS, HIDDEN, HEADS, SEQUENCE, SAMPLES, VOCABULARY = 4, 256, 8, 256, 4, 1024
SHAPE = {
    "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "sequence": SEQUENCE, "samples": SAMPLES,
    "vocabulary": VOCABULARY,
}  # fmt: skip


def make_model() -> smp.nn.DistributedTransformerLMHead:
    return smp.nn.DistributedTransformerLMHead(
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_size=HIDDEN // HEADS,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        vocab_size=VOCABULARY,
        num_positions=SEQUENCE,
        attention_dropout_prob=0.0,
        hidden_dropout_prob=0.1,
        causal_mask_size=SEQUENCE,
        pre_layernorm=True,
        post_layernorm=False,
    ).bfloat16()


def measure(meter: AllocationMeter, optimize: str, prescaled: bool) -> dict[str, Any]:
    tp = int(os.environ["WORLD_SIZE"])
    config = {"tensor_parallel_degree": tp, "ddp": True, "optimize": optimize}
    smp.init({**config, "prescaled_batch": prescaled})
    gc.collect()
    live = meter.live()
    model = make_model()
    parameter_bytes = meter.live() - live
    samples = SAMPLES if prescaled else SAMPLES // tp
    length = SEQUENCE // tp if prescaled and optimize == "memory" else SEQUENCE
    rows = SAMPLES if optimize == "speed" else samples
    kept = 0
    for _ in range(2):  # gradients of parameters are new in the first one only
        x = torch.randn(rows, length, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        live = meter.live()
        out: Tensor = model.transformer((x, None))[0]
        kept = meter.live() - live
        out.sum().backward()
        del out
    smp.shutdown()
    return {"parameters": parameter_bytes, "activations": kept}


def main() -> None:
    torch.set_num_threads(1)
    meter = AllocationMeter()
    cases = json.loads(sys.argv[1])
    results = [measure(meter, optimize, prescaled) for optimize, prescaled in cases]
    path = Path(sys.argv[2]) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps({"shape": SHAPE, "results": results}))


if __name__ == "__main__":
    main()
