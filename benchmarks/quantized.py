"""Steps of a 4-bit model with adapters over two ranks, beside one layer after the other.

Usage: smp run -n 2 benchmarks/quantized.py [--steps N]. The baseline is plain transformers and PEFT
in the first rank while the second one waits: with ``device_map`` over two devices one computes at a
time, so its steps take at least as long, and transfers besides. Both take turns, step by step.

Beside the times there is a ratio of CPU times, for a machine with other work: of the baseline, and
of the fuller rank of the pipeline, with the time in which the pipeline is filled and drained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import smp

HIDDEN, INNER, LAYERS, BATCH, LENGTH = 384, 1024, 8, 16, 256
MICROBATCHES = 8
WARM_UP = 2


def sizes() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=6, use_cache=False,
    )  # fmt: skip


def quantization() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).train()


def batch() -> Tensor:
    return torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def in_pipeline(folder: str) -> Callable[[], float]:
    from transformers import LlamaForCausalLM

    with smp.delay_param_initialization():
        model = adapted(smp.quantize(LlamaForCausalLM(sizes()), quantization(), weights=folder))
    wrapped = smp.DistributedModel(model)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained))

    @smp.step
    def train_step(model: Any, ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    def step() -> float:
        loss = float(train_step(wrapped, batch()).reduce_mean().detach())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def one_after_the_other(folder: str) -> Callable[[], float]:
    from transformers import LlamaForCausalLM

    model: Any = adapted(
        LlamaForCausalLM.from_pretrained(
            folder, quantization_config=quantization(), device_map="cpu", dtype=torch.float32
        )
    )
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step() -> float:
        total = 0.0
        for ids in batch().chunk(MICROBATCHES):
            loss = model(input_ids=ids, labels=ids).loss / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def timed(step: Callable[[], float]) -> tuple[float, list[float], float]:
    """Returns seconds of a step, CPU seconds of the ranks, and the loss."""
    smp.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    loss = step()
    own = time.process_time() - cpu
    smp.barrier()
    return time.perf_counter() - begin, smp.allgather(own, smp.WORLD), loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    smp.init({"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "ddp": True})
    folder: str = smp.allgather(tempfile.mkdtemp(), smp.WORLD)[0]
    is_first = smp.rank() == 0
    if is_first:
        from transformers import LlamaForCausalLM

        LlamaForCausalLM(sizes()).save_pretrained(folder)
    smp.barrier()
    pipeline = in_pipeline(folder)
    alone = one_after_the_other(folder) if is_first else lambda: 0.0
    together, apart = [], []
    for _ in range(arguments.steps + WARM_UP):
        together.append(timed(pipeline))
        apart.append(timed(alone))
    if is_first:
        assert abs(together[0][2] - apart[0][2]) < 1e-3, "both compute one loss"
        times = [statistics.median(s for s, _, _ in own[WARM_UP:]) for own in (apart, together)]
        pairs = list(zip(apart[WARM_UP:], together[WARM_UP:], strict=True))
        filled = (MICROBATCHES + 1) / MICROBATCHES
        print(json.dumps({
            "benchmark": "quantized", "case": "nf4, two ranks", "steps": arguments.steps,
            "one_after_the_other_s": round(times[0], 3), "pipeline_s": round(times[1], 3),
            "ratio": round(statistics.median(a[0] / t[0] for a, t in pairs), 2),
            "ratio_of_cpu_times": round(
                statistics.median(a[1][0] / (filled * max(t[1])) for a, t in pairs), 2
            ),
        }))  # fmt: skip
    smp.shutdown()


if __name__ == "__main__":
    main()
