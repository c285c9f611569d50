"""Copies of a state, and the memory that they use again."""

from __future__ import annotations

import torch

from smp.checkpoint.staging import Staging


def test_memory_is_used_again_by_equal_tensors() -> None:
    staging = Staging()
    a, b = torch.arange(6.0).view(2, 3), torch.arange(6).t()
    pointers = []
    for step in range(3):
        staging.begin()
        copies = staging.copy({"a": [a, (b, "text")], "again": a}, {})
        staging.end()
        assert copies["again"] is copies["a"][0] and copies["a"][1][1] == "text"
        assert torch.equal(copies["again"], a) and torch.equal(copies["a"][1][0], b)
        a.add_(1)
        assert not torch.equal(copies["again"], a), step
        pointers.append((copies["again"].data_ptr(), copies["a"][1][0].data_ptr()))
    assert pointers[0] == pointers[1] == pointers[2]
    assert pointers[0][0] != a.data_ptr()


def test_what_is_not_needed_any_more_is_let_go_of() -> None:
    staging = Staging()
    staging.begin()
    first = staging.copy([torch.ones(4), torch.zeros(4)], {})
    staging.end()
    pointers = {tensor.data_ptr() for tensor in first}
    assert len(pointers) == 2
    staging.begin()
    (second,) = staging.copy([torch.full((4,), 2.0)], {})
    staging.end()
    assert second.data_ptr() in pointers and second.sum() == 8
    assert [len(kept) for kept in staging._all.values()] == [1] and not staging._free
    staging.begin()
    other = staging.copy([torch.ones(4, dtype=torch.int64), torch.ones(5)], {})
    assert not {tensor.data_ptr() for tensor in other} & pointers
