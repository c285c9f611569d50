"""Copies of a state, and the memory that they use again."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from smp import _C
from smp.checkpoint.staging import LaterCopies, Staging


def staged(value: Tensor) -> tuple[Tensor, LaterCopies]:
    staging = Staging()
    staging.begin()
    place = staging.copy([value], {}, later=True)[0]
    return place, staging.end()


def test_large_tensors_are_copied_later_and_who_changes_them_waits() -> None:
    source = torch.arange(100_000.0)
    place, copies = staged(source)
    place.zero_()
    thread = threading.Thread(target=copies.make)

    class BeginsWhenAsked(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert not place.any()
            thread.start()
            return super().wait(timeout)

    copies._are_over = BeginsWhenAsked()
    copies.wait()
    source.add_(1)
    assert torch.equal(place, torch.arange(100_000.0))
    waited_s = copies.waited_s
    assert waited_s > 0
    copies.wait()  # at once
    assert copies.waited_s == waited_s
    thread.join()


def test_a_tensor_that_changes_before_its_copy_is_an_error_and_nobody_hangs() -> None:
    source = torch.zeros(100_000)
    _, copies = staged(source)
    source.add_(1)
    with pytest.raises(RuntimeError, match="changed while it was copied"):
        copies.make()
    copies.wait()


@pytest.mark.parametrize("numel", (1, 16384))
def test_small_tensors_and_those_of_inference_are_copied_at_once(numel: int) -> None:
    with torch.inference_mode():
        source = torch.ones(numel)
    if numel == 1:
        source = torch.ones(numel)
    place, copies = staged(source)
    assert torch.equal(place, source) and not copies._pairs
    copies.make()


@pytest.mark.parametrize("numel", (5, 600_000))
def test_copies_of_every_layout(numel: int) -> None:
    flat = torch.randn(2 * numel, dtype=torch.complex64)
    for source in (
        flat,
        flat[::2],
        flat.view(2, -1).t(),
        flat.conj(),
        flat.view(2, -1)[1:].expand(3, -1),
        flat.imag,
    ):
        into = torch.empty_like(source)
        _C.copy_tensor(into, source)
        assert torch.equal(into, source)
    with pytest.raises(ValueError, match="sizes"):
        _C.copy_tensor(torch.empty(3), torch.empty(4))
    with pytest.raises(ValueError, match="double"):
        _C.copy_tensor(torch.empty(4), torch.empty(4, dtype=torch.float64))


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
