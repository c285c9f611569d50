"""Steps of a quantized model over two ranks, in a pipeline and one rank after the other.

Usage: smp run -n 2 benchmarks/quantized.py [--rounds N]. Both ways alternate in one run. One after
the other is what one microbatch gives: the way of ``device_map``, in which one device computes.
Beside the times there is a ratio of CPU times, for a machine with other work: the sum of both ranks
by that of the fuller rank in a pipeline, with the time in which it is filled and drained.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import Tensor

import smp

HIDDEN, INNER, LAYERS, BATCH, LENGTH = 384, 1024, 8, 16, 256
MICROBATCHES = 8


def sizes() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=64, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=6, use_cache=False,
    )  # fmt: skip


def seconds(folder: str, microbatches: int, steps: int) -> list[tuple[float, list[float]]]:
    """Returns the time of some steps and the CPU times of the ranks, without the first two."""
    from peft import LoraConfig, get_peft_model
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    smp.init({"pipeline_parallel_degree": 2, "microbatches": microbatches, "ddp": True})
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    with smp.delay_param_initialization():
        model = smp.quantize(LlamaForCausalLM(sizes()), config, weights=folder)
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])).train()
    wrapped = smp.DistributedModel(model)
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(trained))

    @smp.step
    def train_step(model: Any, ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    ids = torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    found = []
    for _ in range(steps + 2):
        smp.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        train_step(wrapped, ids)
        optimizer.step()
        optimizer.zero_grad()
        own = time.process_time() - cpu
        smp.barrier()
        found.append((time.perf_counter() - begin, smp.allgather(own, smp.WORLD)))
    smp.shutdown()
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    smp.init({"ddp": True})
    folder: str = smp.allgather(tempfile.mkdtemp(), smp.WORLD)[0]
    is_first = smp.rank() == 0
    if is_first:
        from transformers import LlamaForCausalLM

        LlamaForCausalLM(sizes()).save_pretrained(folder)
    smp.barrier()
    smp.shutdown()
    times: dict[int, list[tuple[float, list[float]]]] = {1: [], MICROBATCHES: []}
    for _ in range(arguments.rounds):
        for microbatches, own in times.items():
            own += seconds(folder, microbatches, arguments.steps)
    if is_first:
        alone, together = times[1], times[MICROBATCHES]
        seconds_of = [statistics.median(total for total, _ in own) for own in (alone, together)]
        filled = (MICROBATCHES + 1) / MICROBATCHES
        cpu_alone = statistics.median(sum(cpu) for _, cpu in alone)
        cpu_together = statistics.median(filled * max(cpu) for _, cpu in together)
        print(json.dumps({
            "case": "nf4, two ranks", "one_after_the_other_s": round(seconds_of[0], 3),
            "pipeline_s": round(seconds_of[1], 3),
            "ratio": round(seconds_of[0] / seconds_of[1], 2),
            "ratio_of_cpu_times": round(cpu_alone / cpu_together, 2),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
