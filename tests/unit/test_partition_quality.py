"""Quality of the automatic partition of real architectures, traced without memory."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from smp.partition.tree import ModuleIndex

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "partition_quality.py"


@cache
def benchmark() -> ModuleType:
    """The benchmark that prints these figures, so that both mean the same."""
    spec = importlib.util.spec_from_file_location("partition_quality", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@cache
def traced(name: str) -> ModuleIndex:
    index: ModuleIndex = benchmark().traced_index(name)[0]
    return index


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["gpt2-xl", "gpt-j-6b", "llama-8b", "t5-3b"])
def test_slowest_rank_is_near_the_exact_contiguous_optimum(name: str, ranks: int) -> None:
    result = benchmark().quality(name, traced(name), ranks)
    assert result.load >= 0.9 / ranks, "loads add up to about 1"
    assert result.load <= 1.02 * result.exact
    assert result.load <= result.equal * 1.001, "worse than as many blocks on each rank"
    assert result.solve_s < 2


def test_exact_reference_is_the_best_of_all_cuts() -> None:
    loads = [[3.0, 1.0, 4.0, 1.0, 5.0], [6.0, 2.0, 8.0, 2.0, 10.0]]
    assert benchmark().exact_ends(loads) == [4, 5]
    assert benchmark().exact_ends([loads[0]] * 3) == [2, 4, 5]


def test_blocks_are_whole_when_that_is_as_good() -> None:
    assert benchmark().quality("llama-8b", traced("llama-8b"), 4).cut_blocks == 0
    assert benchmark().quality("gpt2-xl", traced("gpt2-xl"), 16).cut_blocks > 0
