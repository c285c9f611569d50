"""Ranks send and write the tensors of a model, and measure what they hold meanwhile.

Usage: stream_memory.py FOLDER CONFIG, on ranks under the allocation meter of the benchmarks. Every
rank writes ``FOLDER/rank<i>.json``: for each way, the peak above what was held before, and the
bytes of the model and of its largest tensor.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from allocation_meter import AllocationMeter  # noqa: E402

import smp  # noqa: E402
from smp.checkpoint import gathering, safetensors_stream  # noqa: E402
from smp.checkpoint.archive import WriteOptions  # noqa: E402
from tests.harness import samples_of, train_step_of, wrapped  # noqa: E402

WIDTH, NUM_LAYERS = 1024, 16
PIECE_BYTES = BUFFER_BYTES = 256 << 10


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.repeat(1, WIDTH // x.shape[1])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def consume(model: smp.DistributedModel, receivers: int | None) -> None:
    for _, tensor in smp.stream_parameters(model, receivers=receivers):
        assert bool(tensor.isfinite().all())


def main() -> None:
    torch.set_num_threads(1)
    folder, config = Path(sys.argv[1]), json.loads(sys.argv[2])
    gathering._PIECE_BYTES = PIECE_BYTES
    write, options = safetensors_stream.write, WriteOptions(buffer_bytes=BUFFER_BYTES)
    safetensors_stream.write = lambda path, tensors: write(path, tensors, options)
    model = wrapped(config, Wide())
    train_step_of(model)(samples_of(0, torch.float32))
    meter = AllocationMeter()

    def peak_of(act: Callable[[], object]) -> int:
        gc.collect()
        smp.barrier()
        before = meter.restart()
        act()
        return meter.peak() - before

    shard = (NUM_LAYERS // 4) * WIDTH * WIDTH * 4
    found = {
        "one": peak_of(lambda: consume(model, 0)),
        "all": peak_of(lambda: consume(model, None)),
        "files": peak_of(
            lambda: smp.save_huggingface(model, folder / "files", max_shard_bytes=shard)
        ),
        "whole": peak_of(model.state_dict),
        "model": NUM_LAYERS * WIDTH * WIDTH * 4,
        "tensor": WIDTH * WIDTH * 4,
    }
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


main()
