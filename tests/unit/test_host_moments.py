"""`FusedAdam` with its moments in host memory: pieces, bits, state dicts, refusals."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.modules.state_bytes import BLOCK
from smp.optim.fused import Batch
from smp.optim.host_moments import cut_into_pieces
from smp.optimizers import FusedAdam
from tests.dist.small_pieces import small_pieces
from tests.unit.test_compact_optimizers import CASES, parameters, set_grads

FORMS = [("fp32", torch.float32, "fp32"), ("fp32", torch.float64, "fp32"), *CASES]
IDS = ["-".join([state, str(dtype)[6:], masters]) for state, dtype, masters in FORMS]


def optimizer_of(params: list[nn.Parameter], form: Any, are_on_host: bool) -> FusedAdam:
    state_dtype, _, masters = form
    optimizer = FusedAdam(params, lr=0.01, state_dtype=state_dtype, masters=masters)
    optimizer.set_moments_on_host(are_on_host)
    return optimizer


@pytest.mark.parametrize("form", FORMS, ids=IDS)
def test_pieces_have_the_bits_of_the_whole(form: Any) -> None:
    """Moves the moments to the host and back, and loads a state dict, between updates."""
    first = parameters(form[1])
    second = [nn.Parameter(p.detach().clone()) for p in first]
    plain, moved = optimizer_of(first, form, False), optimizer_of(second, form, False)
    with small_pieces() as pieces:
        for step in range(5):
            set_grads(first, step)
            set_grads(second, step)
            if step in (1, 4):
                moved.set_moments_on_host(step == 1)
            if step == 3:
                state = copy.deepcopy(moved.state_dict())
                moved = optimizer_of(second, form, True)
                moved.load_state_dict(state)
            plain.step()
            moved.step()
            for mine, other in zip(first, second, strict=True):
                assert torch.equal(mine, other), step
    assert pieces == [7, 7, 7]  # a piece with all the small ones, and 3001 elements by 512
    mine, other = plain.state_dict()["state"], moved.state_dict()["state"]
    for index, entry in mine.items():
        assert entry.keys() == other[index].keys()
        assert entry["step"] == 5
        for name, value in entry.items():
            assert torch.equal(value, other[index][name]), (index, name)


def batch_of(sizes: list[int], begins: list[int]) -> Batch:
    """Returns a batch whose elements are their own numbers."""
    batch = Batch({}, torch.device("cpu"), begins=begins, positions=list(range(len(sizes))))
    for size, begin in zip(sizes, begins, strict=True):
        num_blocks = -(-(begin % BLOCK + size) // BLOCK)
        numbers = torch.arange(begin, begin + size)
        batch.params.append(numbers)
        batch.grads.append(numbers)
        batch.steps.append(torch.zeros(()))
        scales = begin // BLOCK + torch.arange(num_blocks)
        batch.states.append({"exp_avg": numbers, "exp_avg_scale": scales, "step": batch.steps[-1]})
    return batch


@pytest.mark.parametrize("most", [BLOCK, 2 * BLOCK + 7, 5 * BLOCK])
def test_parts_meet_between_blocks_and_cover_everything(most: int) -> None:
    sizes, begins = [1, 0, 700, 255, 3000, 256], [0, 9, 1000, 255, 513, 256]
    found: list[list[Tensor]] = [[] for _ in sizes]
    pieces = cut_into_pieces(batch_of(sizes, begins), most)
    for piece in pieces:
        assert 0 < sum(p.numel() for p in piece.params) <= most
        for i, position in enumerate(piece.positions):
            part, state = piece.params[i], piece.states[i]
            found[position].append(part)
            begin = piece.begins[i]
            end = begin + part.numel()
            assert part.numel() == 0 or part[0] == begin
            assert torch.equal(state["exp_avg"], part) and torch.equal(piece.grads[i], part)
            blocks = torch.arange(begin // BLOCK, -(-end // BLOCK)) if part.numel() else part[:0]
            assert torch.equal(state["exp_avg_scale"], blocks) or not part.numel()
            piece.steps[i].add_(1)
    for parts, size, begin in zip(found, sizes, begins, strict=True):
        assert torch.equal(torch.cat(parts), torch.arange(begin, begin + size))
        assert all((int(part[-1]) + 1) % BLOCK == 0 for part in parts[:-1])


def test_each_parameter_counts_one_step() -> None:
    batch = batch_of([3000, 0, 5], [0, 0, 0])
    for piece in cut_into_pieces(batch, BLOCK):
        for step in piece.steps:
            step.add_(1)
    assert [step.item() for step in batch.steps] == [1, 1, 1]


def test_small_parameters_keep_their_moments() -> None:
    large, small = nn.Parameter(torch.zeros(1 << 16)), nn.Parameter(torch.zeros((1 << 16) - 1))
    optimizer = optimizer_of([large, small], FORMS[0], True)
    assert optimizer._is_away(large) and not optimizer._is_away(small)


def test_other_optimizers_are_refused() -> None:
    smp.init({"offload_optimizer_state": True})
    try:
        model = smp.DistributedModel(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"AdamW updates .*use smp.optimizers.FusedAdam"):
            smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        inner = FusedAdam(model.parameters())
        smp.DistributedOptimizer(inner)
        assert inner.moments_on_host
    finally:
        smp.shutdown()
