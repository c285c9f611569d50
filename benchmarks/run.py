"""Runs the short benchmarks: ``python benchmarks/run.py [--only NAME] [--out FILE]``.

Each benchmark is a script of its own that this one starts on one or two processes, one thread each,
on the CPU. Every result is one JSON line, in the file and in short on the screen. `pipeline.py` is
run by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allocation_meter import preloaded
from environment import REPO, describe
from workers import MARK

FOLDER = Path(__file__).resolve().parent
MODEL = {"num_layers": 8, "hidden": 256, "num_heads": 4, "vocab_size": 4096, "seq_len": 128}
TINY = {"num_layers": 2, "hidden": 32, "num_heads": 2, "vocab_size": 64, "seq_len": 16}
BLOCKS = {"num_layers": 6, "hidden": 256, "vocab_size": 2048, "batch_size": 4, "seq_len": 128}
SPLIT = {"num_layers": 4, "hidden": 1024, "num_heads": 16, "vocab_size": 64, "seq_len": 128}
TIMEOUT_S = 900
HIDDEN = ("shape", "mixtral", "llama", "qwen3", "payload_bytes", "messages")  # in headlines


@dataclass(frozen=True)
class Job:
    script: str
    num_processes: int
    config: dict[str, Any] = field(default_factory=dict)
    repeats: int = 20


def overhead_job(num_ranks: int) -> Job:
    return Job(
        "remote_overhead",
        num_ranks,
        {"num_ranks": num_ranks, "calls": 10_000, "calls_per_step": 200},
    )


# 30 million parameters, so that what is moved weighs as much as what is computed.
WIDE = {"num_layers": 8, "hidden": 512, "num_heads": 8, "vocab_size": 4096, "seq_len": 128}


# Experts are nine tenths of the parameters.
MIXTURE = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 512,
}  # fmt: skip


LLAMA = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 512,
}  # fmt: skip


def check_job(num_ranks: int) -> Job:
    gpt2 = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096, "n_positions": 128}
    return Job("batch_check", num_ranks, {"num_ranks": num_ranks, "gpt2": gpt2, "batch_size": 16})


def planned_job(optimizer: bool) -> Job:
    config = {"llama": LLAMA, "batch_size": 4, "sequence": 128, "optimizer": optimizer}
    return Job("planned", 2, config, 10)


# One layer below a head that is most of the model.
WORDY = {
    "vocab_size": 32768, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip


def head_job(dtype: str, prescaled: bool) -> Job:
    config = {"dtype": dtype, "prescaled": prescaled, "batch_size": 4, "sequence": 128}
    return Job("planned_head", 2, {"qwen3": WORDY, **config}, 10)


def memory_job(subject: str, num_ranks: int) -> Job:
    config = {"subject": subject, "num_ranks": num_ranks, "shape": WIDE, "batch_size": 2}
    return Job("memory", num_ranks, config, 15)


def matrix_job(num_ranks: int) -> Job:
    config = {"num_ranks": num_ranks, "shape": WIDE, "batch_size": 2}
    return Job("matrix_optimizers", num_ranks, config, 10)


HEAD = {"tokens": 1024, "hidden": 256, "vocab_size": 16000}
DTYPES = ("float32", "bfloat16")

LONG = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 65536,
}  # fmt: skip
# Small enough for 16384 and 32768 tokens on two cores.
LONGER = {**LONG, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4,
          "num_key_value_heads": 2, "num_hidden_layers": 2}  # fmt: skip


def context_job(tokens: int, repeats: int, ring: int = 1, llama: Any = LONG) -> Job:
    config = {"llama": llama, "tokens": tokens, "ring": ring}
    return Job("context_parallel", 2, config, repeats)


# Bytes and number of messages per turn.
MESSAGES = [[64, 500], [4096, 500], [524288, 100], [8388608, 10]]

JOBS = (
    Job("transport", 2, {"messages": MESSAGES}),
    overhead_job(2),
    overhead_job(3),
    Job("data_parallel_step", 2, {"shape": MODEL, "batch_size": 8, "microbatches": 1}, 15),
    Job("data_parallel_step", 2, {"shape": MODEL, "batch_size": 8, "microbatches": 4}, 15),
    Job("fused_ops", 1, {"dtype": "float32"}, 30),
    Job("fused_ops", 1, {"dtype": "bfloat16"}, 30),
    *(Job("linear_cross_entropy", 1, {"dtype": dtype, **HEAD}, 10) for dtype in DTYPES),
    Job("fused_optimizers", 1, {"num_parameters": 100_000_000, "num_threads": 1}, 15),
    Job("fused_optimizers", 1, {"num_parameters": 100_000_000, "num_threads": 2}, 15),
    matrix_job(2),
    Job("overhead", 1, {"shape": MODEL, "batch_size": 8, "microbatches": 4}, 15),
    Job("overhead", 1, {"shape": TINY, "batch_size": 8, "microbatches": 4}, 200),
    check_job(1),
    check_job(2),
    Job("tensor_parallel", 2, {"shape": SPLIT, "batch_size": 4}, 10),
    planned_job(optimizer=False),
    planned_job(optimizer=True),
    context_job(4096, 6),
    context_job(8192, 4),
    context_job(4096, 6, ring=2),
    context_job(8192, 4, ring=2),
    context_job(16384, 3, llama=LONGER),
    context_job(16384, 3, ring=2, llama=LONGER),
    context_job(32768, 2, llama=LONGER),
    Job("experts", 2, {"mixtral": MIXTURE, "batch_size": 4, "sequence": 128}, 15),
    *(head_job("float32", prescaled) for prescaled in (False, True)),
    head_job("bfloat16", False),
    *(Job("compiled", 1, {"model": name, **BLOCKS}, 10) for name in ("gpt2", "gptj", "llama")),
    memory_job("replicas", 2),
    memory_job("sharded_optimizer", 2),
    memory_job("sharded_data", 2),
    memory_job("sharded_data", 4),
    memory_job("checkpointing", 1),
)


def launch(
    script: str,
    num_processes: int,
    config: dict[str, Any],
    environment: Mapping[str, str],
    timeout_s: float,
    arguments: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Results of one worker script; raises RuntimeError with its output if it failed."""
    launcher = []
    if num_processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone"]
        launcher += [f"--nproc-per-node={num_processes}"]
    command = [sys.executable, *launcher, str(FOLDER / f"{script}.py")]
    command += [f"--config={json.dumps(config)}", *arguments]
    done = subprocess.run(
        command,
        env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script} {config} failed:\n{done.stdout}\n{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise RuntimeError(f"{script} {config} printed no result:\n{done.stdout}")
    return [json.loads(line.removeprefix(MARK)) for line in lines]


def run_job(job: Job, repeats: int) -> list[dict[str, Any]]:
    """Results of one benchmark."""
    arguments = [f"--repeats={repeats}"]
    environment: Mapping[str, str] = os.environ
    if job.script in ("memory", "planned_head", "context_parallel"):
        environment = preloaded(environment, REPO / "build" / "bench")
    return launch(job.script, job.num_processes, job.config, environment, TIMEOUT_S, arguments)


def headline(result: dict[str, Any]) -> str:
    config = {k: v for k, v in result["config"].items() if k not in HIDDEN}
    if "shape" in result["config"]:
        config["hidden"] = result["config"]["shape"]["hidden"]
    skipped = {"benchmark", "contender", "config", "environment", "repeats", "warmup"}
    values = {k: v for k, v in result.items() if k not in skipped}
    words = [f"{k}={v}" for k, v in config.items()]
    words += [f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()]
    return f"{result['benchmark']} {result['contender']}: " + " ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=REPO / "build" / "bench" / "results.jsonl")
    parser.add_argument("--only", help="run the benchmarks whose name contains this")
    parser.add_argument("--repeats", type=int, help="for all; default: as listed in JOBS")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in JOBS if args.only is None or args.only in job.script]
    if not jobs:
        parser.error(f"no benchmark is called {args.only!r}: {sorted({j.script for j in JOBS})}")
    environment = describe()
    num_failed = 0
    with args.out.open("a", encoding="utf-8") as file:
        for job in jobs:
            try:
                results = run_job(job, args.repeats or job.repeats)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                num_failed += 1
                print(f"FAILED {error}", file=sys.stderr, flush=True)
                continue
            for result in results:
                file.write(json.dumps(result | {"environment": environment}) + "\n")
                file.flush()
                print(headline(result), flush=True)
    print(f"results are in {args.out}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
