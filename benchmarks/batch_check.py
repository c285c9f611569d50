"""Measures the cost of the check of the loss behind a first step, in forwards of the batch.

Processor time of each rank, by turns: a step with the check, a step without, and a forward of the
batch without gradients. The processor time of the slowest rank counts.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from workers import Worker

import smp
from smp.observe.batch_check.check import BatchCheckObserver
from smp.world import runtime


def main() -> None:
    worker = Worker("batch_check")
    config = worker.config
    worker.start({"pipeline_parallel_degree": config["num_ranks"], "microbatches": 4})
    torch.manual_seed(0)
    own = GPT2Config(**config["gpt2"], use_cache=False, bos_token_id=0, eos_token_id=0)
    model = smp.DistributedModel(GPT2LMHeadModel(own))
    outcomes = runtime.current().observers.of_kind(BatchCheckObserver).outcomes
    ids = torch.randint(own.vocab_size, (config["batch_size"], own.n_positions))

    @smp.step
    def train(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    @smp.step
    def evaluate(ids: Tensor) -> Tensor:
        return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]

    def checked() -> None:
        outcomes.clear()
        train(ids)

    @torch.no_grad()
    def forward() -> None:
        evaluate(ids)

    spent_s: dict[str, list[float]] = {}
    for turn in range(worker.warmup + worker.repeats):
        for name, run in (("checked", checked), ("step", lambda: train(ids)), ("forward", forward)):
            smp.barrier()
            started_s = time.process_time()
            run()
            if turn >= worker.warmup:
                spent_s.setdefault(name, []).append(time.process_time() - started_s)
            model.zero_grad()
    mine = {f"{name}_s": statistics.median(seconds) for name, seconds in spent_s.items()}
    mine["forwards"] = (mine["checked_s"] - mine["step_s"]) / mine["forward_s"]
    ranks = smp.allgather(mine, smp.WORLD)
    assert set(outcomes.values()) == {"equal"}
    worker.emit("smp", max(ranks, key=lambda rank: rank["checked_s"]))
    smp.shutdown()


if __name__ == "__main__":
    main()
