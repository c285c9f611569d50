"""The timelines of the site: what `smp.trace` and `smp simulate` write, made when the site is.

`python -m website.timeline build/site/timelines` makes them with the library; MkDocs, which has an
environment of its own, then embeds them (`embedding`).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = ("traced", "simulated")
_MICROBATCHES = 6
_LAYOUT = {"pipeline_parallel_degree": 2, "microbatches": _MICROBATCHES}


def small_gpt2() -> Any:
    """The model of both."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=512,
            n_positions=64,
            n_embd=192,
            n_layer=8,
            n_head=4,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )  # fmt: skip
    )


def record(stem: Path) -> None:
    """Trains on two ranks and traces two steps; rank 0 writes the files. Collective."""
    import torch

    import smp

    smp.init(_LAYOUT)
    torch.manual_seed(1)
    model = smp.DistributedModel(small_gpt2())
    tokens = torch.randint(512, (4 * _MICROBATCHES, 64))

    @smp.step
    def train_step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        model.backward(loss)
        return loss

    for _ in range(4):  # the first ones partition the model and learn its shapes
        train_step(model, tokens)
    with smp.trace(stem):
        for _ in range(2):
            train_step(model, tokens)


def make(folder: Path) -> None:
    """Writes both pages.

    Raises:
        subprocess.CalledProcessError: one of the programs has failed; it has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    smp = [sys.executable, "-m", "smp"]
    subprocess.run([*smp, "run", "-n", "2", __file__, "--record", str(folder)], check=True)
    keys = [f"{key}={value}" for key, value in _LAYOUT.items()]
    command = [*smp, "simulate", "website.timeline:small_gpt2", "--microbatch", "4"]
    command += ["--config", *keys, "pipeline=zero_bubble"]
    subprocess.run(
        [*command, "--page", str(folder / "simulated.html")],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def embedding(timelines: Path, pages: Path) -> str:
    """The page around the timelines, which are copied next to it.

    Raises:
        FileNotFoundError: one was not made; says how it is.
    """
    folder = pages / "docs" / "timelines"
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        file = timelines / f"{name}.html"
        if not file.is_file():
            raise FileNotFoundError(
                f"{file} does not exist: `make site`, or `python -m website.timeline {timelines}` "
                "with the library, makes it"
            )
        shutil.copyfile(file, folder / file.name)
    return _PAGE


_PAGE = """\
---
hide: [toc]
---

# Timelines

## Of a run

What [`smp.trace`](running.md#seeing-the-pipeline) has recorded while this site was built: two steps
of a small GPT-2 on two ranks of the machine that built it. Hover over a box to see what it is.
[Alone in a window](timelines/traced.html)

<iframe class="timeline" src="../timelines/traced.html" title="Two traced steps"></iframe>

## Before a run

What [`smp simulate`](planning.md#smp-simulate) says of the same model with the schedule
`zero_bubble`, without running it. [Alone in a window](timelines/simulated.html)

<iframe class="timeline" src="../timelines/simulated.html" title="Simulated timeline"></iframe>
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m website.timeline", description=__doc__)
    parser.add_argument("--record", action="store_true", help="this is one of two ranks")
    parser.add_argument("folder", type=Path, help="where the pages go")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.folder / "traced")
    else:
        make(arguments.folder)


if __name__ == "__main__":
    main()
