"""Measures the way from ``python train.py`` to the end of the first step, with a model on disk.

``python benchmarks/auto_start.py FOLDER`` writes a GPT-J with random weights into the folder,
unless it is there. Contenders start in turns, each in new processes: `smp.launch` with
`smp.auto` on two ranks, the same by the file of the first (``plan=``), and ``from_pretrained``
in one process. One line of JSON per run: seconds on the clock from the start of Python to the
end of the step, CPU seconds of all ranks, the loss, and for each rank the bytes of its
parameters and its largest resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from environment import describe
from transformers import GPTJConfig, GPTJForCausalLM

import smp

CONTENDERS = ("smp_auto", "smp_auto_plan", "from_pretrained")
RANKS, BATCH, LENGTH = 2, 2, 64
BEGIN = "AUTO_START_BEGIN_S"


def save(folder: Path, layers: int, width: int) -> None:
    """Writes the model; values are random."""
    config = GPTJConfig(
        n_layer=layers, n_embd=width, n_head=16, rotary_dim=64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTJForCausalLM(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="500MB")


def batch() -> torch.Tensor:
    return torch.arange(LENGTH).repeat(BATCH, 1) + torch.arange(BATCH)[:, None]


@smp.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss  # type: ignore[no-any-return]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def auto(folder: str, given: dict[str, Any]) -> None:
    model, optimizer = smp.auto(folder, sgd, batch=BATCH, seq=LENGTH, **given)
    loss = train_step(model, batch()[smp.rdp_rank() :: smp.rdp_size()]).reduce_mean()
    optimizer.step()
    facts = result(float(loss), sum(p.numel() * 4 for p in model.local_parameters()))
    gathered = smp.allgather(facts, smp.CommGroup.WORLD)
    if smp.rank() == 0:
        print(json.dumps(gathered))


def plain(folder: str) -> None:
    model: Any = GPTJForCausalLM.from_pretrained(folder).train()
    optimizer = sgd(model.parameters())
    loss = model(input_ids=batch(), labels=batch()).loss
    loss.backward()
    optimizer.step()
    print(json.dumps([result(loss.item(), sum(p.numel() * 4 for p in model.parameters()))]))


def result(loss: float, num_bytes: int) -> dict[str, float]:
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM:"))
    return {
        "first_step_s": time.time() - float(os.environ[BEGIN]),
        "cpu_s": time.process_time(),
        "loss": loss,
        "parameter_bytes": num_bytes,
        "resident_peak_bytes": 1024 * int(peak.split()[1]),
    }


def measure(contender: str, folder: Path, repeat: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, str(folder), "--run", contender],
        env={**os.environ, "OMP_NUM_THREADS": "1", BEGIN: str(time.time())},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("[{"))
    ranks = json.loads(line)
    return {
        "benchmark": "auto_start",
        "contender": contender,
        "repeat": repeat,
        "first_step_s": max(rank["first_step_s"] for rank in ranks),
        "cpu_s": sum(rank["cpu_s"] for rank in ranks),
        "ranks": ranks,
        "environment": describe(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", choices=CONTENDERS, help="one run, for this script itself")
    arguments = parser.parse_args()
    folder, file = str(arguments.folder), str(arguments.folder / "smp_auto.json")
    if arguments.run == "from_pretrained":
        plain(folder)
    elif arguments.run is not None:
        given = {"file": file} if arguments.run == "smp_auto" else {"plan": file}
        smp.launch(auto, RANKS, folder, {**given, "config": {"pipeline_parallel_degree": RANKS}})
    else:
        if not arguments.folder.exists():
            save(arguments.folder, arguments.layers, arguments.width)
        for repeat in range(arguments.repeats):
            for contender in CONTENDERS:
                print(json.dumps(measure(contender, arguments.folder, repeat)), flush=True)


if __name__ == "__main__":
    main()
