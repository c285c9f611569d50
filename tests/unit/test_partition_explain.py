"""Explanations: figures of ranks and boundaries, reasons, and what a move would cost."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import nn

from smp.partition.contexts import set_partition
from smp.partition.decide import decide
from smp.partition.decision import Decision
from smp.partition.explain import Explanation, explain
from smp.partition.tree import ModuleIndex, build_tree


@dataclass(frozen=True)
class Config:
    auto_partition: bool = True
    default_partition: int = 0
    memory_weight: float | None = 0.5
    pipeline: str = "interleaved"
    microbatches: int = 4
    active_microbatches: int | None = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(8, 8, bias=False)
        self.act = nn.ReLU()
        self.mlp = nn.Linear(8, 8, bias=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(8, 8)
        self.h = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.wte.weight


def traced() -> ModuleIndex:
    """Costs and values as a trace would find them: a chain through all linears."""
    index = build_tree(Model())
    idx_of = {names[0]: idx for idx, names in enumerate(index.names)}
    chain = ["wte", *(f"h.{i}.{part}" for i in range(3) for part in ("attn", "mlp")), "head"]
    index.tree.add_value(0, 10, [idx_of["wte"]], False)
    for name, reader in zip(chain, [*chain[1:], ""], strict=True):
        index.tree.set_costs(idx_of[name], 10.0, 100)
        index.tree.add_value(idx_of[name], 50, [idx_of[reader]], True)
    index.tree.set_order([0, *(idx_of[name] for name in chain)])
    index.tree.compute_per_byte = 0.001
    return index


def decision(config: Config | None = None) -> Decision:
    index = traced()
    return decide(index.modules[0], config or Config(), 2, index=index)


def explained(module: str) -> tuple[Decision, Explanation]:
    made = decision()
    return made, explain(made, module)


def test_figures_of_ranks_and_boundaries_add_up() -> None:
    made = decision()
    explanation = explain(made)
    assert [rank.param_bytes for rank in explanation.ranks] == list(made.load_bytes)
    assert sum(rank.compute_share for rank in explanation.ranks) == pytest.approx(1)
    assert set(explanation.boundaries) == {(0, 1), (1, 0)}
    assert explanation.crossing_bytes == sum(explanation.boundaries.values()) > 0
    moved = sum(rank.transfer_bytes for rank in explanation.ranks)
    assert moved == 2 * explanation.crossing_bytes
    assert explanation.largest_load == max(rank.load for rank in explanation.ranks)
    assert explanation.traced
    first, last = explanation.ranks
    assert first.memory_bytes > 4 * first.param_bytes, "activations of two microbatches"
    assert last.activation_bytes == last.memory_bytes - 4 * last.param_bytes


def test_text_has_table_boundaries_and_assignments() -> None:
    text = str(explain(decision()))
    assert text.startswith("Partition assignments:\npp_rank 0: ")
    assert "pp_rank  parameters  activations" in text
    assert "\n  0 -> 1: " in text and "\n  1 -> 0: " in text
    assert "not traced" not in text


def test_untraced_decision_says_that_it_knows_parameters_only() -> None:
    explanation = explain(decide(Model(), Config(), 2))
    assert not explanation.traced
    assert "Only parameters are known here" in str(explanation)


def test_move_is_what_the_other_place_would_cost() -> None:
    made, explanation = explained("h.0")
    assert explanation.module is not None
    (move,) = explanation.module.moves
    assert move.pp_rank == 1 - explanation.module.pp_rank
    # The same from scratch: a decision with that block elsewhere.
    index = made.index
    idxs = list(made.partition_idxs)
    for idx, names in enumerate(index.names):
        if names[0].startswith("h.0"):
            idxs[idx] = move.pp_rank
    marks = dict(zip(index.modules, idxs, strict=True))
    config = Config(auto_partition=False)
    by_hand = decide(index.modules[0], config, 2, marks.__getitem__, index=index)
    assert move.largest_load == pytest.approx(explain(by_hand).largest_load)
    assert move.largest_load > explanation.largest_load
    assert "largest load" in str(explanation) and "between ranks" in str(explanation)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "runs where the step begins"),
        ("wte", "placed in the order of execution"),
        ("head", "stays with 'wte'"),
        ("h", "modules below it are on ranks 0, 1"),
        ("h.0.act", "has no parameters and goes with 'h.0'"),
        ("h.0.attn", "placed in the order of execution"),
    ],
)
def test_reason_is_the_rule_that_applied(name: str, reason: str) -> None:
    module = explained(name)[1].module
    assert module is not None and reason in module.reason


def test_whole_module_is_with_its_parts() -> None:
    made = decision()
    whole = next(
        f"h.{i}"
        for i in range(3)
        if len({p for n, p in made.partition_of_name.items() if n.startswith(f"h.{i}")}) == 1
    )
    module = explain(made, whole).module
    assert module is not None and "everything below it is on this rank" in module.reason


def test_root_cannot_move_and_says_so() -> None:
    explanation = explained("")[1]
    assert explanation.module is not None
    assert [bool(move.refusal) for move in explanation.module.moves] == [True]
    assert "on 1: not possible: the root" in str(explanation)


def test_marks_are_given_as_the_reason() -> None:
    model = Model()
    set_partition(model.h, 1)
    made = decide(model, Config(auto_partition=False), 2)
    module = explain(made, "h.1.mlp").module
    assert module is not None and "set_partition" in module.reason


def test_set_partition_is_given_as_the_reason_in_auto_mode() -> None:
    index = traced()
    model = index.modules[0]
    set_partition(model.h[0].mlp, 1)  # type: ignore[index, union-attr, operator]
    set_partition(model.wte, 1)  # type: ignore[arg-type]
    made = decide(model, Config(), 2, index=index)
    for name, reason in (
        ("h.0.mlp", "set_partition puts it here"),
        ("wte", "set_partition puts it here"),
        ("head", "stays with 'wte', which set_partition puts here"),
        ("h.1.attn", "placed in the order of execution"),
    ):
        module = explain(made, name).module
        assert module is not None and reason in module.reason, name
        assert module.pp_rank == 1 or name == "h.1.attn"


def test_unknown_module_is_an_error() -> None:
    with pytest.raises(ValueError, match="no module 'h.9'"):
        explain(decision(), "h.9")
