"""Step time, traffic and idle time on two pipeline stages, next to torch's 1F1B schedule.

Both contenders train the same blocks with AdamW on the same data. torch.distributed.pipelining gets
two hand-made stages. smp gets one model whose blocks are either two `nn.Sequential`s ("halves": one
remote call for the second, one for the head) or separate modules ("blocks": one remote call each,
which is what an unmodified Hugging Face model looks like).
"""

from __future__ import annotations

import torch
from models import Gpt, GptShape, make_batch, make_optimizer, stage_module, token_loss
from timer import compare, measure
from torch import Tensor, distributed
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from workers import Worker, place

import smp
from smp.metrics import difference, server_stats

NUM_STAGES = 2


class SmpContender:
    def __init__(self, shape: GptShape, num_groups: int, batch: tuple[Tensor, Tensor]) -> None:
        torch.manual_seed(0)
        gpt = Gpt(shape, num_groups)
        half = num_groups // NUM_STAGES
        place(gpt, {f"groups.{i}": i // half for i in range(num_groups)} | {"head": 1})
        self.model = smp.DistributedModel(gpt)
        self.optimizer = smp.DistributedOptimizer(make_optimizer(self.model))
        self.batch = batch
        model = self.model

        @smp.step
        def train_step(ids: Tensor, targets: Tensor) -> Tensor:
            loss = model(ids, targets)
            model.backward(loss)
            return loss

        self.train_step = train_step

    def __call__(self) -> float:
        loss = self.train_step(*self.batch).reduce_mean()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)


class TorchContender:
    def __init__(
        self, shape: GptShape, num_microbatches: int, batch: tuple[Tensor, Tensor]
    ) -> None:
        torch.manual_seed(0)
        self.stage_idx = smp.pp_rank()
        module = stage_module(shape, self.stage_idx, NUM_STAGES)
        stage = PipelineStage(module, self.stage_idx, NUM_STAGES, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, num_microbatches, loss_fn=token_loss)
        self.optimizer = make_optimizer(module)
        self.ids, self.targets = batch

    def __call__(self) -> None:
        if self.stage_idx == 0:
            self.schedule.step(self.ids)
        else:
            self.schedule.step(target=self.targets, losses=[], return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    worker = Worker("pipeline_step")
    config = worker.config
    shape, num_microbatches = GptShape(**config["shape"]), config["microbatches"]
    worker.start(
        {
            "pipeline_parallel_degree": NUM_STAGES,
            "microbatches": num_microbatches,
            "pipeline": config["pipeline"],
            "auto_partition": False,
            "default_partition": 0,
        }
    )
    batch = make_batch(shape, config["batch_size"], seed=1)
    num_groups = NUM_STAGES if config["grouping"] == "halves" else shape.num_layers
    ours = SmpContender(shape, num_groups, batch)
    theirs = TorchContender(shape, num_microbatches, batch)
    timings = measure(
        {"smp": ours, "torch_1f1b": theirs}, worker.repeats, worker.warmup, distributed.barrier
    )
    worker.emit("torch_1f1b", timings["torch_1f1b"].summary())
    ratio = compare(timings["smp"], timings["torch_1f1b"])
    worker.emit("smp", timings["smp"].summary() | ratio | traffic(ours, num_microbatches))
    smp.shutdown()


def traffic(ours: SmpContender, num_microbatches: int) -> dict[str, float]:
    """What one step of each rank sends per microbatch, and how long it has nothing to run."""
    before = server_stats()
    ours()
    own = difference(server_stats(), before)
    values = {}
    for pp_rank, counters in enumerate(smp.allgather(own, smp.PP_GROUP)):
        for name in ("bytes_sent", "messages_sent", "remote_calls"):
            values[f"{name}_per_microbatch_pp{pp_rank}"] = counters[name] / num_microbatches
        values[f"idle_ms_pp{pp_rank}"] = counters["idle_s"] * 1e3
    return values


if __name__ == "__main__":
    main()
