"""Partition files: written, edited, read again, and refused with a line number."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from smp.partition import partition_file
from smp.partition.decide import decide
from smp.partition.decision import Decision
from smp.partition.tree import build_tree


@dataclass(frozen=True)
class Config:
    auto_partition: bool = True
    default_partition: int = 0
    memory_weight: float | None = None
    pipeline: str = "interleaved"
    microbatches: int = 4
    active_microbatches: int | None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Linear(8, 8)
        self.act = nn.ReLU()
        self.mlp = nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self, num_blocks: int = 12) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, 8)
        self.h = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.wte.weight


def again(decision: Decision, path: Path) -> Decision:
    partition_file.write(decision, path)
    model = decision.modules[0]
    return decide(
        model, Config(), decision.num_partitions, file=path, num_chunks=decision.num_chunks
    )


def read(text: str, tmp_path: Path, model: nn.Module, pp_size: int = 2) -> Decision:
    path = tmp_path / "plan"
    path.write_text(text)
    return decide(model, Config(), pp_size, file=path)


def test_file_is_short_and_gives_the_same_decision(tmp_path: Path) -> None:
    decision = decide(Model(), Config(), 2)
    path = tmp_path / "plan"
    assert again(decision, path).hash == decision.hash
    lines = path.read_text().splitlines()
    assert lines[:2] == ["smp partition v1", "partitions 2"]
    entries = [" ".join(line.split()) for line in lines if not line.startswith("#")][2:]
    assert entries == ["wte 0", "h.[0-5] 0", "h.[6-11] 1", "head 0"]
    assert list(tmp_path.iterdir()) == [path], "no partial file is left"


def test_edited_file_moves_modules_and_what_they_contain(tmp_path: Path) -> None:
    text = """smp partition v1
    partitions 2
    h          1      # all of them,
    h.[0-3]    0      # but these not
    h.2.mlp    1
    wte        0
    head       0
    """
    decision = read(text, tmp_path, Model())
    places = decision.partition_of_name
    assert [places[f"h.{i}"] for i in range(12)] == [0] * 4 + [1] * 8
    assert (places["h.2.attn"], places["h.2.mlp"]) == (0, 1)
    assert places["h.2"] == 0, "a cut module is on the driver"
    assert places["h.5.act"] == 1, "what has no parameters follows"
    assert decision.decided_by == "file"


def test_chunks_are_kept(tmp_path: Path) -> None:
    decision = decide(Model(), Config(), 2, num_chunks=2)
    assert set(decision.chunk_idxs) == {0, 1}
    assert again(decision, tmp_path / "plan").hash == decision.hash


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_decision_is_read_as_it_was_written(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def build(depth: int) -> nn.Module:
        kind = data.draw(st.integers(0, 4 if depth < 3 else 2))
        if kind == 0:
            return nn.ReLU()
        if kind <= 2:
            return nn.Linear(data.draw(st.integers(1, 9)), 3)
        wrapper = nn.Sequential if kind == 3 else nn.ModuleList
        return (
            wrapper([build(depth + 1) for _ in range(3)])
            if kind == 4
            else nn.Sequential(*(build(depth + 1) for _ in range(3)))
        )

    model = nn.Sequential(nn.Linear(2, 2), *(build(0) for _ in range(4)), nn.Linear(2, 2))
    leaves = [m for m in model.modules() if isinstance(m, nn.Linear)]
    if data.draw(st.booleans()):
        leaves[-1].bias = leaves[0].bias
    size = data.draw(st.integers(1, min(4, len(leaves) - 1)))
    decision = decide(model, Config(), size)
    path = tmp_path_factory.mktemp("plan") / "plan"
    assert again(decision, path).partition_idxs == decision.partition_idxs


HEAD = "smp partition v1\npartitions 2\n"
REST = "wte 0\nhead 0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"line 1: expected 'smp partition v1', got ''"),
        ("smp partition v2\n", r"line 1: expected 'smp partition v1', got 'smp partition v2'"),
        ("smp partition v1\nwte 0\n", r"line 2: expected 'partitions 2'"),
        ("smp partition v1\npartitions two\n", r"line 2: expected 'partitions <number>'"),
        ("smp partition v1\npartitions 4\n", r"it is for 4 partitions, this run has 2"),
        (HEAD + "chunks 3\n", r"it is for 3 chunks, this run has 1"),
        (HEAD + "h\n", r"line 3: expected '<module> <rank>', got 'h'"),
        (HEAD + "h first\n", r"line 3: expected '<module> <rank>'"),
        (HEAD + "\n# x\nh 2\n", r"line 5: rank 2 must be in \[0, 2\)"),
        (HEAD + "h 1.1\n", r"line 3: chunk 1 must be in \[0, 1\)"),
        (HEAD + "h 1\nhaed 0\n", r"line 4: the model has no module 'haed'; did you mean 'head'"),
        (HEAD + "h.[10-12] 1\n", r"line 3: the model has no module 'h.12'"),
        (HEAD + "h.3 1\nh.[0-5] 0\n", r"line 4: module 'h.3' is in line 3 already"),
        (HEAD + REST + "h.[0-10] 1\n", r"no line is about module 'h.11.attn'; add one"),
        (
            HEAD + "h 1\nwte 0\nhead 1\n",
            r"line 5: module 'head' must be where 'wte' is \(rank 0, l",
        ),
    ],
)
def test_mistakes_name_line_and_cause(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(text, tmp_path, Model())


def test_module_that_stays_whole_cannot_be_torn(tmp_path: Path) -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"line 5: module '0.out_proj' must be where '0' is"):
        read(HEAD + "0 0\n1 1\n0.out_proj 1\n", tmp_path, model)


def test_head_that_is_tied_may_be_left_out(tmp_path: Path) -> None:
    places = read(HEAD + "h 1\nwte 0\n", tmp_path, Model()).partition_of_name
    assert (places["wte"], places["head"], places["h.0"]) == (0, 0, 1)


def test_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        partition_file.read(tmp_path / "none", build_tree(Model()), 2)
