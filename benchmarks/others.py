"""Steps of sharded training and of a pipeline on two ranks, beside FSDP2 and DeepSpeed.

``python benchmarks/others.py [--packages FOLDER]``: contenders start in turns, each on two new
processes with the same model, weights and batches; DeepSpeed's are left out if it is not installed
(``pip install --no-deps --target FOLDER deepspeed einops hjson msgpack py-cpuinfo pydantic`` and
what these need). One line of JSON per run: the median seconds of a step on the slowest rank, and
the losses of the first steps, which have to be those of all contenders.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from environment import describe
from models import Block, Embedding, Gpt, GptShape, Head, make_optimizer, token_loss
from torch import Tensor, distributed, nn

RANKS, BATCH, MICROBATCHES, STEPS, WARMUP = 2, 16, 4, 8, 3
SHAPE = GptShape(num_layers=8, hidden=256, seq_len=64)

Step = Callable[[Tensor, Tensor], float]


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Yields whole batches."""
    generator = torch.Generator().manual_seed(0)
    while True:
        ids = torch.randint(SHAPE.vocab_size, (BATCH, SHAPE.seq_len), generator=generator)
        yield ids, ids.roll(-1, 1)


def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(SHAPE, SHAPE.num_layers)


def plain() -> Step:
    """Returns the step of the user's script, in one process on the whole batch."""
    made = model()
    return _steps(made, make_optimizer(made))


def _steps(made: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(ids: Tensor, targets: Tensor) -> float:
        loss = made(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def torch_fsdp2() -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (RANKS,))
    made = model()
    for block in made.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    return _own(_steps(made, make_optimizer(made)))


def _deepspeed() -> Any:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from deepspeed.comm import torch as backend

    backend.build_shm_op = lambda: None  # it would compile; Gloo is what FSDP2 uses as well
    deepspeed.init_distributed("gloo")
    return deepspeed


def _zero(stage: int) -> Step:
    made = model()
    engine, *_ = _deepspeed().initialize(
        model=made,
        optimizer=make_optimizer(made),
        config={
            "train_micro_batch_size_per_gpu": BATCH // RANKS,
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
        },
    )

    def step(ids: Tensor, targets: Tensor) -> float:
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return _own(step)


def deepspeed_zero2() -> Step:
    return _zero(2)


def deepspeed_zero3() -> Step:
    return _zero(3)


def deepspeed_pipeline() -> Step:
    deepspeed = _deepspeed()
    whole = model()
    parts = {kind: [m for m in whole.modules() if type(m) is kind] for kind in (Embedding, Block)}
    head = next(m for m in whole.modules() if isinstance(m, Head))
    last = Head(SHAPE)
    last.load_state_dict(head.state_dict())
    layers = [*parts[Embedding], *parts[Block], last]
    piped = deepspeed.pipe.PipelineModule(layers, num_stages=RANKS, loss_fn=token_loss)
    engine, *_ = deepspeed.initialize(
        model=piped,
        optimizer=make_optimizer(piped),
        config={
            "train_micro_batch_size_per_gpu": BATCH // MICROBATCHES,
            "gradient_accumulation_steps": MICROBATCHES,
        },
    )

    def step(ids: Tensor, targets: Tensor) -> float:
        pieces = zip(ids.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        return float(engine.train_batch(iter(pieces)))

    return step


def _ours(config: dict[str, Any], reads_own: bool) -> Step:
    import smp

    smp.init({"ddp": True, **config})
    made = smp.DistributedModel(model())
    optimizer = smp.DistributedOptimizer(make_optimizer(made))

    @smp.step
    def train_step(ids: Tensor, targets: Tensor) -> Tensor:
        loss = made(ids, targets)
        made.backward(loss)
        return loss  # type: ignore[no-any-return]

    def step(ids: Tensor, targets: Tensor) -> float:
        loss = float(train_step(ids, targets).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return _own(step) if reads_own else step


def smp_sharded_state() -> Step:
    return _ours({"shard_optimizer_state": True}, True)


def smp_sharded() -> Step:
    config = {"sharded_data_parallel_degree": RANKS, "sdp_gradient_clipping": 0.0}
    return _ours(config, True)


def smp_pipeline() -> Step:
    return _ours({"pipeline_parallel_degree": RANKS, "microbatches": MICROBATCHES}, False)


def _own(step: Step) -> Step:
    """Returns a step on this rank's half of a batch, with the mean loss of the ranks."""

    def run(ids: Tensor, targets: Tensor) -> float:
        rank = int(os.environ["RANK"])
        loss = torch.tensor(step(ids.chunk(RANKS)[rank], targets.chunk(RANKS)[rank]))
        if distributed.is_initialized():
            distributed.all_reduce(loss)
            return float(loss) / RANKS
        import smp

        return sum(smp.allgather(float(loss), smp.CommGroup.WORLD)) / RANKS

    return run


CONTENDERS = {
    one.__name__: one
    for one in (
        *(plain, torch_fsdp2, deepspeed_zero3, smp_sharded, deepspeed_zero2, smp_sharded_state),
        *(deepspeed_pipeline, smp_pipeline),
    )
}


def run(contender: str) -> None:
    step, source = CONTENDERS[contender](), batches()
    losses, spent = [], []
    for _ in range(WARMUP + STEPS):
        ids, targets = next(source)
        begin_s = time.perf_counter()
        losses.append(step(ids, targets))
        spent.append(time.perf_counter() - begin_s)
    record = {"step_s": statistics.median(spent[WARMUP:]), "losses": losses[:WARMUP]}
    if os.environ["RANK"] == "0":
        print(json.dumps(record), flush=True)
    if distributed.is_initialized():  # else a rank may find that the other has gone
        distributed.barrier()
        distributed.destroy_process_group()


def measure(contender: str, packages: str | None) -> dict[str, Any]:
    paths = [packages] if packages else []
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), *paths]),
    }
    ranks = 1 if contender == "plain" else RANKS
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        + [f"--nproc-per-node={ranks}", __file__, contender],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{contender} failed:\n{done.stderr[-3000:]}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"step_s"'))
    return {"benchmark": "others", "contender": contender, **json.loads(line)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--packages", help="folder with DeepSpeed")
    parser.add_argument("contender", nargs="?", choices=CONTENDERS, help="one run, on a rank")
    arguments = parser.parse_args()
    if arguments.contender is not None:
        return run(arguments.contender)
    names = [n for n in CONTENDERS if arguments.packages or not n.startswith("deepspeed")]
    expected: list[float] | None = None
    for repeat in range(arguments.repeats):
        for name in names:
            record = measure(name, arguments.packages)
            expected = expected or record["losses"]
            torch.testing.assert_close(record["losses"], expected, rtol=1e-4, atol=0)
            print(json.dumps({**record, "repeat": repeat, "environment": describe()}), flush=True)


if __name__ == "__main__":
    main()
