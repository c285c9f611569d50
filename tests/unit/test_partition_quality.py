"""Quality of the automatic partition of real architectures, traced without memory."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoConfig

from smp import _C

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
def traced(name: str) -> Any:
    return benchmark().traced(name)


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["gpt2-xl", "gpt-j-6b", "llama-8b", "t5-3b"])
def test_slowest_rank_is_near_the_exact_contiguous_optimum(name: str, ranks: int) -> None:
    result = benchmark().quality(name, traced(name), ranks)
    assert result.load >= 0.9 / ranks, "loads add up to about 1"
    assert result.load <= 1.02 * result.exact
    assert result.load <= result.equal * 1.001, "worse than as many blocks on each rank"
    assert result.solve_s < 2
    for memory_weight in (0.0, 0.2, 1.0):
        result = benchmark().quality(name, traced(name), ranks, memory_weight)
        assert result.load <= 1.02 * result.exact, memory_weight


def test_exact_reference_is_the_best_of_all_cuts() -> None:
    loads = [[3.0, 1.0, 4.0, 1.0, 5.0], [6.0, 2.0, 8.0, 2.0, 10.0]]
    assert benchmark().exact_ends(loads) == [4, 5]
    assert benchmark().exact_ends([loads[0]] * 3) == [2, 4, 5]


def test_blocks_are_whole_when_that_is_as_good() -> None:
    assert benchmark().quality("llama-8b", traced("llama-8b"), 4).cut_blocks == 0
    assert benchmark().quality("gpt2-xl", traced("gpt2-xl"), 16).cut_blocks > 0


# ---- where a small model with a large head is cut --------------------------------------


@cache
def small(kind: str) -> Any:
    """Eight blocks and a head of two thirds of a block, which is not tied."""
    sizes = {"n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 128, "vocab_size": 4096}
    rotary = {"rotary_dim": 32} if kind == "gptj" else {}
    config = AutoConfig.for_model(
        kind, use_cache=False, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
        **sizes, **rotary,
    )  # fmt: skip
    return benchmark().traced_model(config, sequence=128)


def placed(kind: str, memory_weight: float, ranks: int) -> tuple[dict[str, int], _C.Evaluation]:
    """Rank of each unit in the order of execution, and what that costs."""
    index = small(kind).index
    options = _C.PartitionOptions(
        ranks, memory_weight=memory_weight, kept_microbatches=list(range(ranks, 0, -1))
    )
    assignment = _C.solve_partition(index.tree, options)
    units = _C.unit_places(index.tree)
    places = {
        index.names[idx][0]: assignment.partition_idxs[idx]
        for idx in index.tree.execution_order()
        if units[idx] == idx
    }
    return places, _C.evaluate_partition(index.tree, assignment, options)


@pytest.mark.parametrize("kind", ["gpt2", "gptj"])
def test_two_ranks_share_the_work_of_a_model_with_a_head_in_the_middle_of_a_block(
    kind: str,
) -> None:
    places, cost = placed(kind, 0.0, 2)
    assert {name for name, rank in places.items() if rank == 0} >= {
        "transformer.wte",
        "transformer.h.3.mlp.fc_out" if kind == "gptj" else "transformer.h.3.mlp.c_proj",
        "transformer.h.4.ln_1",
    }
    assert {rank for name, rank in places.items() if name.startswith("transformer.h.4.")} == {0, 1}
    assert places["transformer.h.5.ln_1"] == places["lm_head"] == 1
    assert max(cost.compute) <= 1.03 * sum(cost.compute) / 2


@pytest.mark.parametrize("memory_weight", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("kind", ["gpt2", "gptj"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_stages_ascend_in_the_order_of_execution(
    kind: str, ranks: int, memory_weight: float
) -> None:
    in_order = list(placed(kind, memory_weight, ranks)[0].values())
    assert in_order == sorted(in_order)
    assert set(in_order) == set(range(ranks))


def test_the_loss_is_where_the_logits_are() -> None:
    model = small("gpt2")
    root = model.trace.costs[0]
    work = root.forward_flops + root.backward_flops
    _, cost = placed("gpt2", 0.8, 2)
    units = sum(model.index.tree.compute(i) for i in range(1, len(model.index.modules)))
    assert sum(cost.compute) == pytest.approx(units + work)
    logits = 128 * 4096 * 4
    assert cost.activation_bytes[1] > logits, "what the loss keeps"
    assert max(cost.boundary_bytes) < logits, "logits do not come to the driver"
