"""Start, arguments and results of the worker processes of all benchmarks."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import smp

MARK = "RESULT "


class Worker:
    """A process of a benchmark; rank 0 prints the results for `run.py`."""

    def __init__(self, benchmark: str) -> None:
        torch.set_num_threads(1)
        parser = argparse.ArgumentParser()
        parser.add_argument("--config", type=json.loads, default={})
        parser.add_argument("--repeats", type=int, default=20)
        parser.add_argument("--warmup", type=int, default=3)
        args = parser.parse_args()
        self.benchmark = benchmark
        self.config: dict[str, Any] = args.config
        self.repeats: int = args.repeats
        self.warmup: int = args.warmup

    def start(self, config: Mapping[str, Any]) -> None:
        """``smp.init`` with ``ddp``, so that torch's process group exists for the others."""
        smp.init({"ddp": True, **config})

    def emit(self, contender: str, values: Mapping[str, Any]) -> None:
        """Prints one result on rank 0; other ranks print nothing."""

        if smp.rank() == 0:
            result = {
                "benchmark": self.benchmark,
                "contender": contender,
                "num_processes": smp.size(),
                "repeats": self.repeats,
                "warmup": self.warmup,
                "config": self.config,
                **values,
            }
            print(MARK + json.dumps(result), flush=True)


def place(model: nn.Module, partition_of: Mapping[str, int]) -> None:
    """Sets the partition of submodules by name."""
    for name, partition in partition_of.items():
        smp.set_partition(model.get_submodule(name), partition)
