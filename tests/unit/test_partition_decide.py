"""Decisions: automatic, by marks, and what is refused."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from smp.partition.contexts import mark_of, partition, set_partition
from smp.partition.decide import WishError, agree, decide, first_difference, kept_microbatches
from smp.partition.decision import Decision
from smp.partition.trace import trace
from smp.partition.tree import build_tree


@dataclass(frozen=True)
class Config:
    auto_partition: bool = True
    default_partition: int = 0
    memory_weight: float | None = None
    pipeline: str = "interleaved"
    microbatches: int = 4
    active_microbatches: int | None = None


MANUAL = Config(auto_partition=False)


class TiedModel(nn.Module):
    def __init__(self, num_layers: int = 4, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(num_layers)
        )
        self.head = nn.Linear(16, 32, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def on(decision: Decision, partition_idx: int) -> set[str]:
    return {n for n, p in decision.partition_of_name.items() if p == partition_idx and n}


def test_auto_keeps_tied_modules_together_and_balances_the_rest() -> None:
    decision = decide(TiedModel(8), Config(), 2)
    places = decision.partition_of_name
    assert places["embedding"] == places["head"] == places[""] == 0
    assert {places[f"layers.{i}"] for i in range(8)} == {0, 1}
    total = sum(decision.load_bytes)
    assert max(decision.load_bytes) < 0.56 * total
    for i in range(8):
        whole = {p for name, p in places.items() if name.startswith(f"layers.{i}")}
        assert len(whole) == 1, f"layer {i} was cut"


def test_decision_maps_modules_and_all_their_names() -> None:
    model = TiedModel()
    model.again = model.layers[3]
    decision = decide(model, Config(), 2)
    assert set(decision.partition_of) == set(model.modules())
    names = dict(model.named_modules(remove_duplicate=False))
    assert set(decision.partition_of_name) == set(names)
    for name, module in names.items():
        assert decision.partition_of_name[name] == decision.partition_of[module]
    assert decision.modules[0] is model
    assert decision.names == [name for name, _ in model.named_modules()]


def test_modules_without_state_run_where_they_are_called() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4, affine=False))
    decision = decide(nn.Sequential(model, nn.Linear(4, 4)), Config(), 2)
    owners = dict(zip(decision.names, decision.owner_partitions, strict=True))
    assert owners["0.1"] is None
    assert owners["0.2"] == decision.partition_of_name["0"], "buffers live with the parent"
    assert owners["0.0"] is not None


def test_depth_counts_the_partitions_that_the_modules_meet_before() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    for layer, idx in zip(model, (3, 1, 3, 0), strict=True):
        set_partition(layer, idx)
    decision = decide(model, MANUAL, 4)
    assert [decision.depth_of(idx) for idx in range(4)] == [0, 2, 3, 1], "the driver comes first"


def test_same_model_gives_the_same_hash_and_another_does_not() -> None:
    first, second = (decide(TiedModel(), Config(), 2) for _ in range(2))
    assert first.hash == second.hash and first.text == second.text
    assert decide(TiedModel(), Config(), 3).hash != first.hash
    assert decide(TiedModel(tied=False), Config(), 2).hash != first.hash
    assert first.text.startswith("Partition assignments:\npp_rank 0: ")


def test_too_many_partitions_say_how_many_are_possible() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_degree to at most 5"):
        decide(TiedModel(), Config(), 6)


def test_transformer_layers_of_torch_are_not_cut() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=8)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    places = decide(model, Config(), 2).partition_of_name
    assert {p for n, p in places.items() if n.startswith("layers.0")} == {0}
    assert {p for n, p in places.items() if n.startswith("layers.1")} == {1}
    with pytest.raises(ValueError, match="at most 2"):
        decide(model, Config(), 3)


def test_manual_marks_count_and_the_rest_goes_to_the_default() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with partition(0):
                self.first = nn.Linear(4, 4)
            self.middle = nn.Linear(4, 4)
            with partition(2):
                self.last = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
                with partition(0):
                    self.tail = nn.Linear(4, 4)

    decision = decide(Model(), Config(auto_partition=False, default_partition=1), 3)
    assert on(decision, 0) == {"first", "tail"}
    assert on(decision, 1) == {"middle"}
    assert on(decision, 2) == {"last", "last.0", "last.1"}
    assert decision.partition_idxs[0] == 0, "the root is the driver's"
    assert decision.load_bytes == (160, 80, 80)


def test_manual_module_without_parameters_follows_its_parent() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    set_partition(model[0], 1)
    set_partition(model[0][1], 0)
    assert on(decide(model, MANUAL, 2), 1) == {"0", "0.0", "0.1"}


def test_manual_marks_may_leave_a_partition_empty() -> None:
    decision = decide(nn.Linear(2, 2), MANUAL, 2)
    assert decision.load_bytes == (24, 0)
    assert "pp_rank 1: 0 bytes (0.0 %): (no modules)" in decision.text
    assert "pp_rank 0: 24 bytes (100.0 %): (root)" in decision.text


def test_manual_shared_parameters_across_partitions_are_an_error() -> None:
    model = TiedModel()
    set_partition(model.head, 1)
    with pytest.raises(ValueError) as caught:
        decide(model, MANUAL, 2)
    text = str(caught.value)
    assert "'embedding' (partition 0)" in text and "'head' (partition 1)" in text
    assert "'embedding.weight'" in text and "auto_partition=True" in text


def test_manual_cut_inside_a_whole_module_is_an_error() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    set_partition(model[0].out_proj, 1)
    with pytest.raises(ValueError, match=r"'0.out_proj' is set to partition 1.*MultiheadAttention"):
        decide(model, MANUAL, 2)
    set_partition(model[0], 1)
    assert on(decide(model, MANUAL, 2), 1) == {"0", "0.out_proj"}


def test_index_marked_before_init_is_checked_against_the_pipeline() -> None:
    with partition(2):
        model = nn.Linear(2, 2)
    for config in (MANUAL, Config()):
        with pytest.raises(ValueError, match=r"smp config: partition of module .*=2: .*\[0, 2\)"):
            decide(nn.Sequential(model, nn.Linear(2, 2)), config, 2)


def test_contexts_are_ignored_with_one_warning_in_auto_mode(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with partition(1):
        first = nn.Linear(4, 4)
    with partition(0):
        second = nn.Linear(4, 4)
    model = nn.Sequential(first, second)
    set_partition(copied := nn.Linear(4, 4), mark_of(first))  # type: ignore[arg-type]
    model.append(copied)  # a replaced module has the mark of the original
    with caplog.at_level(logging.WARNING, logger="smp"):
        assert decide(model, Config(), 2).partition_idxs == (0, 0, 1, 1)
    assert [r.message for r in caplog.records if "auto_partition is True" in r.message] != []
    assert len(caplog.records) == 1


def test_set_partition_is_honoured_in_auto_mode(caplog: pytest.LogCaptureFixture) -> None:
    model = TiedModel(8)
    set_partition(model.layers[2], 1)
    with caplog.at_level(logging.WARNING, logger="smp"):
        places = decide(model, Config(), 2).partition_of_name
    assert [places[f"layers.{i}"] for i in range(8)] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert places["layers.2.0"] == places["layers.2.1"] == 1, "what is below follows"
    assert caplog.records == []
    set_partition(model.embedding, 1)
    places = decide(model, Config(), 2).partition_of_name
    assert places["embedding"] == places["head"] == 1, "a tied module goes along"
    assert {places[f"layers.{i}"] for i in range(8)} == {0, 1}


def test_set_partition_of_a_module_and_of_one_below_it_in_auto_mode() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), nn.Linear(4, 4)
    )
    set_partition(model[1], 1)
    set_partition(model[1][0], 0)
    places = decide(model, Config(), 2).partition_of_name
    assert [places[f"1.{i}"] for i in range(4)] == [0, 1, 1, 1]
    assert places["0"] == 0 and places["2"] in (0, 1)


def test_set_partition_of_the_root_leaves_no_module_for_the_driver() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    set_partition(model, 1)
    with pytest.raises(ValueError, match=r"\('0' on 1, '1' on 1\) leave 0 others, too few for 2"):
        decide(model, Config(), 2)


def test_shared_parameters_that_are_set_apart_are_refused_in_auto_mode() -> None:
    model = TiedModel()
    set_partition(model.embedding, 0)
    set_partition(model.head, 1)
    with pytest.raises(WishError) as caught:
        decide(model, Config(), 2)
    text = str(caught.value)
    assert "'embedding' (set to 0)" in text and "'head' (set to 1)" in text
    assert "'embedding.weight'" in text


def test_parts_of_a_whole_module_that_are_set_apart_are_refused_in_auto_mode() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4), nn.Linear(4, 4))
    set_partition(model[0], 0)
    set_partition(model[0].out_proj, 1)
    with pytest.raises(WishError, match=r"'0' is set to partition 0 and '0.out_proj' to"):
        decide(model, Config(), 2)


def test_modules_that_are_cut_run_on_the_driver() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(8, 8)), nn.Linear(8, 8)
    )
    places = decide(model, Config(), 4).partition_of_name
    assert [places[name] for name in ("0", "1.0", "1.1", "2")] == [0, 1, 2, 3]
    assert places["1"] == 0


def test_chunks_are_dealt_round_and_part_of_what_ranks_agree_on() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    decision = decide(model, Config(), 2, num_chunks=2)
    assert decision.partition_idxs == (0, 0, 0, 1, 1, 0, 0, 1, 1)
    assert decision.chunk_idxs == (0, 0, 0, 0, 0, 1, 1, 1, 1)
    assert "pp_rank 1 chunk 1: 160 bytes (25.0 %): [6-7]" in decision.text
    assert "7 in chunk 1" in decision.lines
    assert decision.assignment.hash == decision.hash
    with pytest.raises(ValueError, match="2 chunks per rank need auto_partition=True"):
        decide(model, MANUAL, 2, num_chunks=2)


def test_kept_microbatches_are_those_of_the_schedule() -> None:
    assert kept_microbatches(Config(microbatches=2), 4) == [2, 2, 2, 1]
    assert kept_microbatches(Config(microbatches=8, active_microbatches=4), 4) == [4, 3, 2, 1]
    assert kept_microbatches(Config(microbatches=8, active_microbatches=6), 4) == [6, 5, 4, 3]
    assert kept_microbatches(Config(pipeline="simple", microbatches=3), 2) == [3, 3]


@pytest.mark.parametrize("config", [Config(), MANUAL])
def test_memory_limit_is_refused_with_rank_and_figures(config: Config) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if config is MANUAL:
        set_partition(model, 0)
    needed = 4 * (160 if config is MANUAL else 80)
    assert decide(model, config, 2, memory_limits=(needed,) * 2).num_partitions == 2
    with pytest.raises(ValueError, match=rf"pp_rank 0 needs {needed} bytes.* 7 more than"):
        decide(model, config, 2, memory_limits=(needed - 7,) * 2)


def test_first_difference_names_both_sides() -> None:
    assert first_difference(["a on 0", "b on 0"], ["a on 0", "b on 1"], 3) == (
        "rank 0 has b on 0, rank 3 has b on 1"
    )
    assert "rank 0 has 1 modules, rank 2 has 2" in first_difference(["a"], ["a", "b"], 2)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_model_is_covered_with_nothing_lost(data: st.DataObject) -> None:
    def build(depth: int) -> nn.Module:
        kind = data.draw(st.integers(0, 3 if depth < 3 else 2))
        if kind == 0:
            return nn.ReLU()
        if kind in (1, 2):
            return nn.Linear(data.draw(st.integers(1, 9)), 3, dtype=torch.float64)
        return nn.Sequential(*(build(depth + 1) for _ in range(data.draw(st.integers(0, 4)))))

    model = nn.Sequential(nn.Linear(2, 2), *(build(0) for _ in range(4)), nn.Linear(2, 2))
    decision = decide(model, Config(), 2)
    assert sum(decision.load_bytes) == sum(p.nbytes for p in model.parameters())
    held = [0, 0]
    for module, partition_idx in decision.partition_of.items():
        held[partition_idx] += sum(p.nbytes for p in module.parameters(recurse=False))
    assert tuple(held) == decision.load_bytes
    assert min(held) > 0


class FakeRanks:
    """Answers `allgather` as if another rank had given something else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, other: Decision) -> None:
        module = importlib.import_module("smp.partition.decide")
        self._answers: list[object] = [other.digest, other.lines]
        monkeypatch.setattr(module.comm, "allgather", self._allgather)

    def _allgather(self, own: object, group: object) -> list[object]:
        return [own, self._answers.pop(0)]


def test_equal_decisions_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeRanks(monkeypatch, decide(TiedModel(), Config(), 2))
    agree(decide(TiedModel(), Config(), 2), world_size=2)


def test_different_decisions_name_rank_and_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TiedModel()
    set_partition(model.layers[1], 1)
    FakeRanks(monkeypatch, decide(model, MANUAL, 2))
    with pytest.raises(ValueError) as caught:
        agree(decide(TiedModel(), MANUAL, 2), world_size=2)
    assert "ranks [1] have another model or partition" in str(caught.value)
    assert "rank 0 has layers.1 on 0, rank 1 has layers.1 on 1" in str(caught.value)


def test_a_forward_that_replaces_modules_is_refused_by_name() -> None:
    class Switching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(self.second) is nn.Linear:  # as BigBird does with its attention
                self.second = nn.Sequential(self.second, nn.ReLU())
            return self.second(self.first(x))

    model = Switching()
    result = trace(model, (torch.randn(2, 4),), {}, device=torch.device("cpu"))
    assert type(model.second) is nn.Linear
    with pytest.raises(ValueError, match="puts other modules into the place of 'second'"):
        decide(model, Config(), 2, index=build_tree(model, result))


def test_log_has_three_lines_of_stages_in_words_and_mib() -> None:
    lines = [
        "pp_rank 0 chunk 0: 3145728 bytes (60.4 %): (root), (transformer), wte",
        "pp_rank 1 chunk 0: 0 bytes (0.0 %): (no modules)",
        "pp_rank 0 chunk 1: 16900 bytes (19.6 %): h.[1-2]",
        f"pp_rank 1 chunk 1: 16900 bytes (20.0 %): {', '.join(['module'] * 100)}",
    ]
    decision = Decision(None, 2, (), (), "\n".join(["Partition assignments:", *lines]), 0)  # type: ignore[arg-type]
    first, more, last = decision.words(["0", "1 3"])
    assert first == (
        "stage 0 on rank 0: 3.00 MiB of parameters, 60 % of all: the model itself, transformer "
        "itself, wte"
    )
    assert more == "and 2 stages between; smp.explain_partition() has all of them"
    assert last.startswith("stage 3 on ranks 1 3: 0.02 MiB of parameters, 20 % of all: module, ")
    assert last.endswith(" ...") and len(last) < 200
    decision = Decision(None, 2, (), (), "\n".join(["Partition assignments:", *lines[:2]]), 0)  # type: ignore[arg-type]
    assert decision.words(["0", "1"])[1].endswith("0.00 MiB of parameters, 0 % of all: no modules")
