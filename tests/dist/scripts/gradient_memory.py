"""Ranks measure the bytes that a training step takes beside parameters.

Usage: gradient_memory.py FOLDER, under the allocation meter of the benchmarks. Every rank writes
``FOLDER/rank<i>.json``: the peak of steps with and without `update_in_backward`, and the bytes of
all gradients and of a bucket.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import smp

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))

from allocation_meter import AllocationMeter  # noqa: E402

LAYERS, WIDTH, STEPS = 16, 512, 3
BUCKET_BYTES = 4 * (WIDTH + 1) * WIDTH + 1024  # a layer


def peak_of(meter: AllocationMeter, is_on: bool) -> int:
    """Returns the most bytes that steps take over those of the parameters alone."""
    smp.init({"ddp": True, "update_in_backward": is_on})
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    gc.collect()
    live = meter.live()
    model = smp.DistributedModel(net, bucket_cap_mb=BUCKET_BYTES / 2**20)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3))

    @smp.step
    def train_step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    most = 0
    for step in range(STEPS):
        x = torch.randn(4, WIDTH)
        if step > 0:
            meter.restart()
        train_step(x)
        optimizer.step()
        if step > 0:
            most = max(most, meter.peak() - live)
        optimizer.zero_grad()
    smp.shutdown()
    return most


def main() -> None:
    torch.set_num_threads(1)
    meter = AllocationMeter()
    told = {
        "peak": {str(is_on): peak_of(meter, is_on) for is_on in (False, True)},
        "gradient_bytes": 4 * LAYERS * (WIDTH + 1) * WIDTH,
        "bucket_bytes": BUCKET_BYTES,
    }
    path = Path(sys.argv[1]) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
