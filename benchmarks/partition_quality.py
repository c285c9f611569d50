"""Compares the automatic partition of real models with the best split by hand; measures its time.

    python benchmarks/partition_quality.py [--model NAME]... [--ranks N]...

Each model is built without memory and traced with fake tensors (one sequence of 512 tokens). A line
of JSON per number of ranks has the largest load by the partitioner's objective, relative to

* ``exact``: the exact contiguous optimum over attention and MLP units (dynamic programming over
  their costs), evaluated with the same objective, and
* ``equal``: as many blocks on each rank, embedding on the first and head on the last.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
)

from smp import _C
from smp.partition.costs import Trace
from smp.partition.trace import trace
from smp.partition.tree import ModuleIndex, build_tree

SEQUENCE = 512


def _config(kind: str, **values: object) -> PretrainedConfig:
    return AutoConfig.for_model(kind, use_cache=False, **values)


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {
    "gpt2-xl": lambda: _config("gpt2", n_embd=1600, n_layer=48, n_head=25),
    "gpt-j-6b": lambda: _config("gptj"),
    "llama-8b": lambda: _config(
        "llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "t5-3b": lambda: _config(
        "t5",
        decoder_start_token_id=0,
        d_model=1024,
        d_kv=128,
        d_ff=16384,
        num_layers=24,
        num_heads=32,
    ),
}


@dataclass(frozen=True)
class Traced:
    """A module tree with the costs that a trace has found, which took some time."""

    index: ModuleIndex
    trace: Trace
    seconds: float


@dataclass(frozen=True)
class Quality:
    """Largest loads of one model over one number of ranks; 1 / ranks would be perfect balance."""

    model: str
    ranks: int
    load: float
    exact: float
    equal: float
    crossing_bytes: int
    equal_crossing_bytes: int
    cut_blocks: int
    solve_s: float

    @property
    def ratio(self) -> float:
        return self.load / self.exact


def traced(name: str) -> Traced:
    """Traces one of `SHAPES`."""
    return traced_model(SHAPES[name]())


def traced_model(config: PretrainedConfig, sequence: int = SEQUENCE) -> Traced:
    """The training forward of a model of the library with one sequence, traced."""
    start = time.perf_counter()
    seq2seq = config.is_encoder_decoder
    with torch.device("meta"):
        model = (AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM).from_config(config)
    ids = torch.zeros(1, sequence, dtype=torch.long)
    call = {"input_ids": ids, "labels": ids}
    result = trace(model, (), call, device=torch.device("cpu"))
    return Traced(build_tree(model, result), result, time.perf_counter() - start)


def _block_of(index: ModuleIndex, idx: int) -> tuple[int, str]:
    """Node of the block that a module is in, or -1, and its name inside of the block."""
    block, node = -1, idx
    while index.parents[node] >= 0:
        if isinstance(index.modules[index.parents[node]], nn.ModuleList):
            block = node  # the outermost list is that of blocks
        node = index.parents[node]
    if block < 0:
        return -1, ""
    return block, index.names[idx][0].removeprefix(index.names[block][0] + ".")


def _items(index: ModuleIndex, places: list[int]) -> list[list[int]]:
    """Units (by their first node) in the order of execution, as halves of blocks and the rest."""
    items: list[list[int]] = []
    previous: tuple[int, str] = (-1, "")
    for place in places:
        block, name = _block_of(index, place)
        part = ".".join(name.split(".")[:2]) if name.startswith("layer.") else name.split(".")[0]
        after_norm = "norm" in previous[1] or previous[1].startswith("ln")
        joins = block >= 0 and block == previous[0] and (part == previous[1] or after_norm)
        if joins:
            items[-1].append(place)
        else:
            items.append([place])
        previous = (block, part)
    return items


class _Reference:
    """The costs of items, and what splits of them cost."""

    def __init__(self, model: Traced, options: _C.PartitionOptions) -> None:
        self._index = index = model.index
        self._options = options
        tree = index.tree
        units = _C.unit_places(tree)
        self.places = [idx for idx in tree.execution_order() if units[idx] == idx]
        self.items = _items(index, self.places)
        self._item_of = {place: i for i, item in enumerate(self.items) for place in item}
        self._costs = [[0.0, 0.0, 0.0] for _ in self.items]
        # A module above units goes with the first of them, what has none with its parent.
        first_below: dict[int, int] = {}
        for idx in range(len(units) - 1, -1, -1):
            if units[idx] >= 0:
                first_below[idx] = self._item_of[units[idx]]
            if idx in first_below and idx > 0:
                parent = index.parents[idx]
                first_below[parent] = min(
                    first_below.get(parent, first_below[idx]), first_below[idx]
                )
        for idx in range(len(units)):
            first_below.setdefault(idx, first_below[max(index.parents[idx], 0)])
            cost = self._costs[first_below[idx]]
            cost[0] += tree.param_bytes(idx)
            cost[1] += tree.activation_bytes(idx)
            cost[2] += tree.compute(idx)
        self._move_away(model.trace, first_below)

    def _move_away(self, trace: Trace, item_of: dict[int, int]) -> None:
        """Moves costs of code of split modules to the rank with the data, the loss above all."""
        node_of = {module: idx for idx, module in enumerate(self._index.modules)}
        items: list[int] = []
        for value in trace.values:
            own = item_of[node_of[trace.modules[value.producer]]]
            items.append(max(own, items[value.sources[-1]]) if value.sources else own)
            for sign, item in ((-1, own), (1, items[-1])):
                self._costs[item][1] += sign * value.activation_bytes
                self._costs[item][2] += sign * value.flops

    def loads(self) -> list[list[float]]:
        """Load of each item on each rank, without transfers."""
        size, options = self._options.num_partitions, self._options
        total = [sum(cost[i] for cost in self._costs) for i in range(3)]
        kept = options.kept_microbatches
        memory = options.state_factor * total[0] + sum(kept) / size * total[1]
        weight = options.memory_weight
        return [
            [
                weight * (options.state_factor * cost[0] + kept[r] * cost[1]) / memory
                + (1 - weight) * cost[2] / total[2]
                for cost in self._costs
            ]
            for r in range(size)
        ]

    def evaluate(self, ends: list[int]) -> _C.Evaluation:
        partitions = [0] * len(self._index.modules)
        begin = 0
        for rank, end in enumerate(ends):
            for item in self.items[begin:end]:
                for place in item:
                    partitions[place] = rank
            begin = end
        size = self._options.num_partitions
        chunks = [0] * len(partitions)
        tree = self._index.tree
        assignment = _C.complete_partition(tree, size, partitions, 1, chunks)
        return _C.evaluate_partition(tree, assignment, self._options)

    def equal_ends(self) -> list[int]:
        """Returns the ends of segments with as many blocks on each rank."""
        size = self._options.num_partitions
        blocks = [_block_of(self._index, item[0])[0] for item in self.items]
        distinct = list(dict.fromkeys(b for b in blocks if b >= 0))
        first = [blocks.index(distinct[round(k * len(distinct) / size)]) for k in range(1, size)]
        return [*first, len(self.items)]


def exact_ends(loads: list[list[float]]) -> list[int]:
    """Ends of the contiguous segments with the smallest largest load, one segment per rank."""
    size, n = len(loads), len(loads[0])
    best = [[float("inf")] * (n + 1) for _ in range(size + 1)]
    cut = [[0] * (n + 1) for _ in range(size + 1)]
    best[0][0] = 0.0
    for k in range(1, size + 1):
        for end in range(k, n + 1):
            total = 0.0
            for begin in range(end - 1, k - 2, -1):
                total += loads[k - 1][begin]
                if total >= best[k][end]:
                    break
                value = max(best[k - 1][begin], total)
                if value < best[k][end]:
                    best[k][end], cut[k][end] = value, begin
    ends = [n]
    for k in range(size, 1, -1):
        ends.insert(0, cut[k][ends[0]])
    return ends


def quality(name: str, model: Traced, ranks: int, memory_weight: float = 0.8) -> Quality:
    """Compares the partition of a traced model with both references."""
    index = model.index
    options = _C.PartitionOptions(
        ranks, memory_weight=memory_weight, kept_microbatches=list(range(ranks, 0, -1))
    )
    start = time.process_time()
    assignment = _C.solve_partition(index.tree, options)
    solve_s = time.process_time() - start
    evaluation = _C.evaluate_partition(index.tree, assignment, options)
    reference = _Reference(model, options)
    exact = reference.evaluate(exact_ends(reference.loads()))
    equal = reference.evaluate(reference.equal_ends())
    ranks_of_block: dict[int, set[int]] = {}
    for place in reference.places:
        block = _block_of(index, place)[0]
        if block >= 0:
            ranks_of_block.setdefault(block, set()).add(assignment.partition_idxs[place])
    return Quality(
        model=name,
        ranks=ranks,
        load=evaluation.largest_load,
        exact=exact.largest_load,
        equal=equal.largest_load,
        crossing_bytes=evaluation.crossing_bytes,
        equal_crossing_bytes=equal.crossing_bytes,
        cut_blocks=sum(len(found) > 1 for found in ranks_of_block.values()),
        solve_s=solve_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", action="append", choices=SHAPES, help="default: all")
    parser.add_argument("--ranks", action="append", type=int, help="default: 2, 4, 8, 16")
    chosen = parser.parse_args()
    for name in chosen.model or SHAPES:
        model = traced(name)
        for ranks in chosen.ranks or (2, 4, 8, 16):
            result = quality(name, model, ranks)
            line = asdict(result) | {"ratio": result.ratio, "trace_s": model.seconds}
            print(
                json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in line.items()})
            )


if __name__ == "__main__":
    main()
