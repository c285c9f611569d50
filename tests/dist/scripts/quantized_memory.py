"""Ranks that read and quantize their own layers measure what they hold.

Usage: quantized_memory.py FOLDER HOW, under the allocation meter of the benchmarks. FOLDER/base has
the model in full precision. HOW is "pipeline", on two ranks, or "one", plain transformers and PEFT
in one process. Every rank writes ``FOLDER/HOW<rank>.json``: bytes of the parameters that it holds,
peaks of all tensors while the model is made and while it trains, and the losses.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from allocation_meter import AllocationMeter  # noqa: E402

import smp  # noqa: E402
from smp.modules import packed  # noqa: E402

STEPS = 3


def sizes() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=64, hidden_size=384, intermediate_size=1024, num_hidden_layers=32,
        num_attention_heads=6, use_cache=False,
    )  # fmt: skip


def quantization() -> Any:
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).train()


def first_values(model: Any) -> dict[str, Tensor]:
    """Returns values of the adapters' first matrices; the second ones are zeros."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(p.shape, generator=generator) / 16
        for name, p in model.named_parameters()
        if "lora_A" in name
    }


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(4, 64, (4, 4), generator=generator)


def trained_in_pipeline(folder: str, meter: AllocationMeter, found: dict[str, Any]) -> Any:
    from transformers import LlamaForCausalLM

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True})
    with smp.delay_param_initialization():
        model = smp.quantize(LlamaForCausalLM(sizes()), quantization(), weights=folder)
        model = adapted(model)
    wrapped = smp.DistributedModel(model)
    wrapped.load_state_dict(first_values(model), strict=False)

    def placed(*_: Any) -> None:
        found["made"] = meter.peak()
        gc.collect()
        meter.restart()

    wrapped.register_post_partition_hook(placed)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))

    @smp.step
    def train_step(model: Any, ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = float(train_step(wrapped, batch(number)).reduce_mean().detach())
        optimizer.step()
        return loss

    return step, lambda: [p for _, p in wrapped.local_named_parameters()]


def trained_in_one(folder: str, meter: AllocationMeter, found: dict[str, Any]) -> Any:
    from transformers import LlamaForCausalLM

    model = adapted(
        LlamaForCausalLM.from_pretrained(
            folder, quantization_config=quantization(), device_map="cpu", dtype=torch.float32
        )
    )
    model.load_state_dict(first_values(model), strict=False)
    found["made"] = meter.peak()
    gc.collect()
    meter.restart()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        ids = batch(number)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, lambda: list(model.parameters())


def main() -> None:
    torch.set_num_threads(1)
    folder, how = sys.argv[1:]
    meter, found = AllocationMeter(), dict[str, Any]()
    begin = trained_in_pipeline if how == "pipeline" else trained_in_one
    before = meter.restart()
    step, parameters = begin(f"{folder}/base", meter, found)
    found["losses"] = [step(number) for number in range(STEPS)]
    # The library for products keeps buffers for each thread.
    found["trained"] = meter.peak() - before - meter.workspace()
    found["made"] -= before
    found["parameters"] = sum(map(packed.num_bytes, parameters()))
    rank = os.environ.get("RANK", "0")
    (Path(folder) / f"{how}{rank}.json").write_text(json.dumps(found))


main()
