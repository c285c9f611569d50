"""Regions of tensor parallelism between processes: values, bytes, and what goes wrong."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import smp
from smp.tensor_parallel import regions
from smp.world import runtime
from tests.dist.pool import Pool

WAYS = {
    "shared_memory": {"SMP_SHM": "1"},
    "gloo": {"SMP_SHM": "0"},
    "tcp": {"SMP_SHM": "0", "SMP_TRANSPORT": "tcp"},
}
TRANSPORTS = pytest.mark.parametrize("env", WAYS.values(), ids=WAYS)


def init(size: int) -> None:
    smp.init({"tensor_parallel_degree": size, "ddp": True})


def data(rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


# ---- values ------------------------------------------------------------------------


def mlp(rank: int, size: int) -> dict[str, Tensor]:
    """A column and a row product around own batches; everything of this rank."""
    init(size)
    x = data(rank, 2, 3, 4).requires_grad_()
    up, down = (data(9, 5 * size, 4), data(10, 4, 5 * size))
    up = up[5 * rank : 5 * rank + 5].clone().requires_grad_()
    down = down[:, 5 * rank : 5 * rank + 5].clone().requires_grad_()
    hidden = regions.gathered_linears(x, [up], [None], 0)[0].tanh()
    y = regions.reduce_scatter(hidden @ down.t(), 0)
    y.square().sum().backward()
    assert x.grad is not None and up.grad is not None and down.grad is not None
    return {"y": y.detach(), "x": x.grad, "up": up.grad, "down": down.grad}


@TRANSPORTS
@pytest.mark.parametrize("size", [2, 4])
def test_a_split_mlp_over_own_batches_matches_one_process(
    pool: Pool, size: int, env: dict[str, str]
) -> None:
    got = pool.run(size, mlp, size, env=env)
    x = torch.cat([data(rank, 2, 3, 4) for rank in range(size)]).requires_grad_()
    up = data(9, 5 * size, 4).requires_grad_()
    down = data(10, 4, 5 * size).requires_grad_()
    y = (x @ up.t()).tanh() @ down.t()
    y.square().sum().backward()
    assert x.grad is not None and up.grad is not None and down.grad is not None
    for name, whole, dim in (("y", y, 0), ("x", x.grad, 0), ("up", up.grad, 0)):
        joined = torch.cat([one[name] for one in got], dim)
        torch.testing.assert_close(joined, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.cat([one["down"] for one in got], 1), down.grad, rtol=1e-12, atol=1e-12
    )


def cross_entropy(rank: int, size: int) -> tuple[Tensor, Tensor]:
    init(size)
    sizes = [23 // size + (r < 23 % size) for r in range(size)]
    begin = sum(sizes[:rank])
    logits = data(3, 7, 23)[:, begin : begin + sizes[rank]].clone().requires_grad_()
    targets = torch.tensor([0, 22, -100, 11, 12, 5, 17])
    losses = regions.vocabulary_cross_entropy(
        logits, targets, begin, label_smoothing=0.1, vocab_size=23
    )
    losses.sum().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


@TRANSPORTS
def test_split_cross_entropy_matches_that_of_torch(pool: Pool, env: dict[str, str]) -> None:
    got = pool.run(3, cross_entropy, 3, env=env)
    logits = data(3, 7, 23).requires_grad_()
    targets = torch.tensor([0, 22, -100, 11, 12, 5, 17])
    losses = torch.nn.functional.cross_entropy(
        logits, targets, reduction="none", label_smoothing=0.1
    )
    losses.sum().backward()
    for one, _ in got:
        torch.testing.assert_close(one, losses.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.cat([grad for _, grad in got], 1), logits.grad, rtol=1e-12, atol=1e-12
    )


def sums(rank: int) -> list[Tensor]:
    init(4)
    result = []
    for numel in (5, 40_000, 300_001):
        for dtype in (torch.float32, torch.bfloat16):
            result.append(regions.reduce(data(rank, numel).to(dtype)))
    return result


def test_sums_are_bitwise_alike_on_all_ranks_and_in_each_run(pool: Pool) -> None:
    first, *others = [*pool.run(4, sums), *pool.run(4, sums)]
    for other in others:
        for one, theirs in zip(first, other, strict=True):
            assert torch.equal(one, theirs)


def seeds(rank: int) -> list[int]:
    init(2)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    drawn = [regions.own_seed(), regions.common_seed()]
    torch.set_rng_state(state)
    assert [regions.own_seed(), regions.common_seed()] == drawn
    return [*drawn, regions.own_seed(), regions.common_seed()]


def test_seeds_follow_the_default_generator(pool: Pool) -> None:
    one, other = pool.run(2, seeds)
    assert one[1::2] == other[1::2] and len({*one, *other}) == 6


def under_autocast(rank: int) -> list[torch.dtype]:
    init(2)
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    bias = torch.zeros(3, requires_grad=True)
    before = regions.traffic()[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = regions.gathered_linears(x, [weight], [bias], 0)[0]
    assert regions.traffic()[1] - before == x.numel() * 2  # 16-bit numbers are sent
    y.sum().backward()
    assert x.grad is not None and weight.grad is not None and bias.grad is not None
    return [y.dtype, x.grad.dtype, weight.grad.dtype, bias.grad.dtype]


def test_autocast_reaches_gathered_linears(pool: Pool) -> None:
    for dtypes in pool.run(2, under_autocast):
        assert dtypes == [torch.bfloat16] + 3 * [torch.float32]


# ---- bytes and trials --------------------------------------------------------------


def count(rank: int, size: int) -> list[tuple[int, int]]:
    init(size)
    x = torch.ones(size * 2, 8, requires_grad=True)  # 64 size bytes
    weight = torch.ones(3, 8, requires_grad=True)

    def moved(forward: Any) -> tuple[int, int]:
        calls, num_bytes = regions.traffic()
        forward().sum().backward()
        after = regions.traffic()
        return after[0] - calls, after[1] - num_bytes

    return [
        moved(lambda: regions.copy(x)),
        moved(lambda: regions.reduce(x)),
        moved(lambda: regions.gather(x, 0)),
        moved(lambda: regions.gather(x, 0, grad="own")),
        moved(lambda: regions.reduce_scatter(x, 0)),
        moved(lambda: regions.scatter(x, 0)),
        moved(lambda: regions.exchange(x, 0, 1)),
        moved(lambda: regions.gathered_linears(x, [weight, weight], [None, None], 0)[0]),
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_regions_move_the_bytes_that_they_must(pool: Pool, size: int) -> None:
    whole = 64 * size
    part = whole * (size - 1) // size  # of a reduce-scatter of x, or an exchange
    gather = whole * (size - 1)  # x is a part
    expected = [
        (1, 2 * part),
        (1, 2 * part),
        (2, 2 * gather),
        (1, gather),
        (2, 2 * part),
        (1, part),
        (2, 2 * part),
        (3, 3 * gather),
    ]
    for counted in pool.run(size, count, size):
        assert counted == expected


def keep(rank: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    init(2)
    kept: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    x, weight = torch.randn(2, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    logits = torch.randn(7, 6, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        regions.gathered_linears(x, [weight, weight], [None, None], 0)
        products, kept = kept, []
        regions.vocabulary_cross_entropy(
            logits, torch.zeros(7, dtype=torch.int64), 6 * rank, vocab_size=12
        )
    return products, kept


def test_graphs_keep_parts_and_nothing_as_large_as_the_logits(pool: Pool) -> None:
    for products, losses in pool.run(2, keep):
        assert products == [(2, 3, 4), (5, 4), (5, 4)]
        assert losses == [(7, 6), (7,), (7,)]  # the logits themselves, two numbers per token


def alone(rank: int) -> None:
    init(2)
    if rank == 0:
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = torch.ones(2, 6, 4, requires_grad=True)
            assert regions.gather(fake, 1).shape == (2, 12, 4)
            y = regions.gathered_linears(fake, [torch.ones(5, 4)], [None], 0)[0]
            assert y.shape == (4, 6, 5)
            y.sum().backward()
            assert regions.exchange(y, 0, 2).shape == (2, 6, 10)
            logits = torch.ones(3, 4)
            targets = torch.zeros(3, dtype=torch.int64)
            assert regions.vocabulary_cross_entropy(logits, targets, 0, vocab_size=8).shape == (3,)
        with regions.alone():
            real = torch.randn(2, 6)
            assert torch.equal(regions.gather(real, 0), torch.cat([real, real]))
            assert torch.equal(regions.reduce(real), real)
            assert regions.common_seed() >= 0
    assert regions.traffic() == (0, 0)
    assert regions.reduce(torch.ones(3)).tolist() == [2, 2, 2]


def test_trial_runs_of_one_rank_communicate_with_nobody(pool: Pool) -> None:
    pool.run(2, alone)


class Handle(Tensor):
    """Represents another tensor, as results of modules on other pipeline ranks do."""

    behind: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [one.behind if isinstance(one, Handle) else one for one in args]
        return func(*args, **(kwargs or {}))


def with_a_handle(rank: int) -> None:
    init(2)
    handle = torch.zeros(3, 4).as_subclass(Handle)
    handle.behind = torch.ones(3, 4)
    assert torch.equal(regions.reduce(handle), torch.full((3, 4), 2.0))
    y = regions.gathered_linears(handle, [torch.ones(2, 4)], [None], 0)[0]
    assert torch.equal(y, torch.full((6, 2), 4.0))


def test_handles_enter_regions_as_what_they_stand_for(pool: Pool) -> None:
    pool.run(2, with_a_handle)


def in_a_world_of_one(rank: int) -> None:
    smp.init({})
    x = torch.randn(4, 6, requires_grad=True)
    assert regions.size() == 1 and regions.rank() == 0
    for y in (
        regions.copy(x),
        regions.reduce(x),
        regions.gather(x, 0),
        regions.reduce_scatter(x, 0),
        regions.scatter(x, 1),
        regions.exchange(x, 0, 1),
    ):
        assert y is x
    weight = torch.randn(3, 6)
    y = regions.gathered_linears(x, [weight], [None], None)[0]
    assert torch.equal(y, torch.nn.functional.linear(x, weight))


def test_a_group_of_one_is_the_identity(pool: Pool) -> None:
    pool.run(1, in_a_world_of_one)


# ---- what goes wrong ---------------------------------------------------------------


def different_lengths(rank: int) -> str:
    init(2)
    text = ""
    try:
        regions.gather(torch.zeros(2, 5 + 2 * rank, 4), 0)
    except ValueError as error:
        text = str(error)
    assert regions.reduce(torch.ones(3)).tolist() == [2, 2, 2]  # the group is as it was
    return text


@TRANSPORTS
def test_different_shapes_are_named_on_every_rank(pool: Pool, env: dict[str, str]) -> None:
    for text in pool.run(2, different_lengths, env=env):
        for part in (
            r"group rank 0: gather of Float\[2, 5, 4\]",
            r"group rank 1: gather of Float\[2, 7, 4\]",
            "pad batches and sequences to one length",
        ):
            assert re.search(part, text), text


def dies(rank: int, how: str) -> None:
    init(2)
    regions.reduce(torch.ones(4))
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        error = RuntimeError("planned")
        runtime.current().rank.report_raised("a test", error)
        raise error
    regions.reduce(torch.ones(4))


@TRANSPORTS
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_peer_that_is_gone_ends_the_wait(pool: Pool, how: str, env: dict[str, str]) -> None:
    waiting, _ = pool.outcomes(2, dies, how, env=env)
    assert "PeerFailure" in waiting.bases, waiting.traceback
    assert "rank 1" in waiting.message


def never_comes(rank: int) -> str:
    os.environ["SMP_TIMEOUT_S"] = "1"
    init(2)
    if rank == 1:
        time.sleep(2.5)
        return ""
    try:
        regions.reduce(torch.ones(4))
    except RuntimeError as error:
        return str(error)
    return "no error"


@TRANSPORTS
def test_a_peer_that_never_comes_is_named_with_the_region(pool: Pool, env: dict[str, str]) -> None:
    text = pool.outcomes(2, never_comes, env=env)[0].value
    assert re.search(r"waited 1000 ms for the reduce over (gloo|tcp):tp", text), text
    assert "run the same modules" in text


def twice(rank: int) -> str:
    init(2)
    x = torch.ones(4, requires_grad=True)
    y = regions.gather(x * x, 0)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    try:
        dx.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_second_derivatives_are_refused(pool: Pool) -> None:
    for text in pool.run(2, twice):
        assert "gather can be differentiated once only" in text
