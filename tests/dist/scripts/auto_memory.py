"""Two ranks load a model by ``smp.auto``, and measure the memory that this takes.

Usage: auto_memory.py FOLDER. Writes models into the folder and starts the ranks. Each rank writes
``FOLDER/rank<i>.json``: bytes of its parameters and of the whole model; the largest growth of its
resident memory until the parameters had their values, and until the second step had ended; and the
peak of the plan. A tiny model goes the same way before, so code and libraries are in memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPTJConfig, GPTJForCausalLM

import smp

SIZES = {"large": (640, 12, 8192), "tiny": (16, 2, 32)}
BATCH, LENGTH = 4, 32


def save(folder: Path, width: int, layers: int, vocabulary: int) -> None:
    config = GPTJConfig(
        vocab_size=vocabulary, n_positions=LENGTH, n_embd=width, n_layer=layers, n_head=4,
        rotary_dim=4, bos_token_id=0, eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = GPTJForCausalLM(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.uniform_(-0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="100MB")


def watch() -> Callable[[], int]:
    """Returns a function that returns the bytes by which resident memory has grown at most."""
    begin = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    return lambda: _status("VmHWM") - begin


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def train(name: str, folder: Path) -> dict[str, Any]:
    file = str(folder / f"{name}.plan.json")
    grown = watch()
    model, optimizer = smp.auto(
        str(folder / name),
        lambda parameters: torch.optim.AdamW(parameters),
        batch=BATCH,
        seq=LENGTH,
        config={"pipeline_parallel_degree": 2},
        file=file,
    )
    loaded: list[int] = []
    model.register_post_partition_hook(lambda *_: loaded.append(grown()))

    @smp.step
    def step(model: Any, ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss  # type: ignore[no-any-return]

    for _ in range(2):
        step(model, torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 32)
        optimizer.step()
        optimizer.zero_grad()
    own = [parameter.numel() * 4 for parameter in model.local_parameters()]
    plan = json.loads(Path(file).read_text())
    result = {
        "part": sum(own),
        "whole": 4 * plan["elements"],
        "loaded": loaded[0],
        "trained": grown(),
        "plan": plan["plan"]["ranks"][smp.pp_rank()]["peak"],
    }
    smp.shutdown()
    return result


def main(folder: Path) -> None:
    train("tiny", folder)
    record = train("large", folder)
    (folder / f"rank{smp.local_rank()}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if not (place / "large").exists():  # the other rank runs this script as well
        for name, sizes in reversed(SIZES.items()):
            save(place / name, *sizes)
    smp.launch(main, 2, place)
