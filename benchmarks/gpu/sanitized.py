"""Runs each operator and optimizer once, at odd sizes, for `compute-sanitizer` to check."""

from __future__ import annotations

import argparse
import itertools

import torch
from torch import nn

from smp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad
from tests.gpu.fused_cases import cases, run

WIDTHS = (7, 1030, 9000)  # a warp, a block and a large block per row
DTYPES = (torch.float32, torch.bfloat16)
SIZES = (1, 513, 65537)


def run_operators(device: str) -> int:
    """Forward and backward; returns how many there were."""
    num_runs = 0
    for width, dtype in itertools.product(WIDTHS, DTYPES):
        for function, inputs in cases(width).values():
            run(function, [x.to(device, dtype) for x in inputs])
            num_runs += 1
    return num_runs


def run_optimizers(device: str) -> int:
    """A step each, of misaligned parameters with 16-bit copies, behind the norm of gradients."""
    optimizers = (FusedAdam, FusedLAMB, FusedNovoGrad)
    for optimizer in optimizers:
        params = [nn.Parameter(torch.randn(n + 1, device=device)[1:]) for n in SIZES]
        for p in params:
            p.grad = torch.randn_like(p)
            p._smp_copy = torch.zeros_like(p, dtype=torch.bfloat16)  # type: ignore[attr-defined]
        torch.ops.smp.sum_of_squares([p.grad for p in params])
        optimizer(params, lr=0.1).step()
    return len(optimizers)


def run_all(device: str) -> int:
    """Everything; returns how many runs that were."""
    num_runs = run_operators(device) + run_optimizers(device)
    if device == "cuda":
        torch.cuda.synchronize()
    return num_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    print(f"{run_all(parser.parse_args().device)} runs")


if __name__ == "__main__":
    main()
