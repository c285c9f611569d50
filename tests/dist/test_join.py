"""Replicas with different numbers of batches, inside of `model.join()`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.model import engine_of
from tests.dist.pool import Pool, RankFailure
from tests.harness import own_loss, train_step_of

WIDTH, BATCH = 6, 4


class Net(nn.Module):
    """Layers that may lie on two partitions, and a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.5)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(torch.tanh(self.first(x)))).square().mean()
        return result


@dataclass(frozen=True)
class Case:
    """Two replicas, the first with fewer batches."""

    config: tuple[tuple[str, Any], ...] = ()
    num_batches: tuple[int, int] = (2, 5)
    passes: int = 1
    by_all: bool = True
    plain_loop: bool = False
    world_size: int = 2

    def __str__(self) -> str:
        keys = "-".join(f"{key}{value}" for key, value in self.config)
        plain = "plain" if self.plain_loop else "step"
        return f"{keys or 'dp'}-{self.num_batches}-passes{self.passes}-{self.by_all}-{plain}"


def batch_of(replica: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * replica + step)
    return torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)


def make_net() -> nn.Module:
    torch.manual_seed(5)
    return Net().double()


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


def train_reference(case: Case, extra: int) -> tuple[dict[str, Tensor], Tensor]:
    """Trains in one process.

    Returns:
        the parameters, and the running mean of the last replica that has batches.
    """
    model = make_net()
    optimizer = make_optimizer(model)
    means = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(2)]
    num_steps = max(case.num_batches)
    norm = model.get_submodule("norm")
    for step in range(num_steps + extra):
        even = step >= num_steps
        active = [r for r in (0, 1) if even or step < case.num_batches[r]]
        means = [means[active[0]].clone() for _ in range(2)]
        for replica in active:
            norm.running_mean.copy_(means[replica])
            divisor = (2 if case.by_all or even else len(active)) * 1.0
            (model(batch_of(replica, step)) / divisor).backward()
            means[replica] = norm.running_mean.clone()
        if (step + 1) % case.passes == 0:
            optimizer.step()
            optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, means[active[0]]


def train_uneven(rank: int, case: Case, extra: int) -> Any:
    import smp

    smp.init({"ddp": True, "auto_partition": False, **dict(case.config)})
    net = make_net()
    model = smp.DistributedModel(net, backward_passes_per_step=case.passes)
    if smp.pp_size() > 1:
        smp.set_partition(net.last, 1)
    optimizer = smp.DistributedOptimizer(make_optimizer(model))
    replica = smp.rdp_rank()
    step_function = train_step_of(model, own_loss)

    def train(step: int) -> None:
        x = batch_of(replica, step)
        if case.plain_loop:
            model(x).backward()
        else:
            step_function(x)
        if (step + 1) % case.passes == 0:
            optimizer.step()
            optimizer.zero_grad()

    with model.join(divide_by_initial_world_size=case.by_all):
        for step in range(case.num_batches[replica]):
            train(step)
    before = {name: b.detach().clone() for name, b in model.get_module().named_buffers()}
    grads = [p.grad for p in model.parameters()]
    for step in range(max(case.num_batches), max(case.num_batches) + extra):
        train(step)
    params = {name: p.detach().clone() for name, p in model.local_named_parameters()}
    return replica, params, before["norm.running_mean"], sum(g is not None for g in grads)


PP = (("pipeline_parallel_degree", 2), ("microbatches", 1))
CASES = [
    Case(),
    Case(num_batches=(5, 2)),
    Case(num_batches=(3, 3)),
    Case(num_batches=(0, 2)),
    Case(num_batches=(2, 4), passes=2),
    Case(by_all=False),
    Case(plain_loop=True),
    Case(plain_loop=True, by_all=False, num_batches=(4, 1)),
    Case(PP, world_size=4),
    Case(PP, num_batches=(4, 1), by_all=False, world_size=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_equals_that_of_one_process(pool: Pool, case: Case) -> None:
    extra = 2
    expected, _ = train_reference(case, extra)
    results = pool.run(case.world_size, train_uneven, case, extra)
    assert {replica for replica, *_ in results} == {0, 1}
    seen: set[str] = set()
    for _, params, _, num_grads in results:
        for name, value in params.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
        seen |= set(params)
        assert num_grads == 0, "gradients of others must not stay"
    assert seen == set(expected)


@pytest.mark.parametrize("num_batches", [(1, 4), (4, 1)])
def test_buffers_are_those_of_a_replica_that_was_last(
    pool: Pool, num_batches: tuple[int, int]
) -> None:
    case = Case(num_batches=num_batches)
    _, means = train_reference(case, 0)
    for _, _, mean, _ in pool.run(2, train_uneven, case, 0):
        torch.testing.assert_close(mean, means, rtol=1e-9, atol=1e-9)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.inner(x))).square().mean()
        return result


def train_split(rank: int, num_batches: list[int]) -> Any:
    """Trains with a tensor-parallel degree of two, on a number of batches for each rank."""
    import smp

    smp.init({"ddp": True, "tensor_parallel_degree": 2})
    torch.manual_seed(5)
    with smp.tensor_parallelism():
        net = Split().double()
    smp.set_tensor_parallelism(net.last, False)
    model = smp.DistributedModel(net)
    optimizer = smp.DistributedOptimizer(make_optimizer(model))
    model.load_state_dict(Split().double().state_dict())
    step_function = train_step_of(model, own_loss)
    with model.join():
        for step in range(num_batches[rank]):
            step_function(batch_of(rank, step))
            optimizer.step()
            optimizer.zero_grad()
    step_function(batch_of(rank, 9))
    optimizer.step()
    return model.state_dict(), len(list(model.distributed_modules()))


def test_whole_tensor_parallel_groups_may_run_out(pool: Pool) -> None:
    results = pool.run(4, train_split, [1, 1, 3, 3])
    first, num_split = results[0]
    assert num_split == 1
    torch.manual_seed(5)
    Split()
    model = Split().double()
    model.load_state_dict(first)
    for state, _ in results[1:]:
        for name, value in state.items():
            torch.testing.assert_close(value, first[name], rtol=0, atol=0)


def test_unequal_peers_of_tensor_parallelism_are_an_error(pool: Pool) -> None:
    with pytest.raises(RankFailure, match=r"their group \[2, 3\]"):
        pool.run(4, train_split, [2, 2, 2, 1])


def train_half(rank: int) -> Any:
    import smp

    smp.init({"ddp": True, "fp16": True})
    model = smp.DistributedModel(make_net().float())
    inner = make_optimizer(model)
    args = {"init_scale": 2.0**8, "scale_window": 2}
    optimizer = smp.DistributedOptimizer(inner, dynamic_loss_scale=True, dynamic_loss_args=args)
    step_function = train_step_of(model, own_loss)

    def train(step: int) -> None:
        step_function(batch_of(rank, step).float())
        optimizer.step()
        optimizer.zero_grad()

    with model.join():
        for step in range((2, 7)[rank]):
            train(step)
    scale = optimizer.loss_scale
    train(8)
    masters = [m.detach().clone() for group in optimizer.fp32_from_fp16_groups for m in group]
    return scale, masters


def test_masters_and_the_loss_scale_catch_up(pool: Pool) -> None:
    (first_scale, first), (scale, masters) = pool.run(2, train_half)
    assert first_scale == scale > 2.0**8
    assert first and all(torch.equal(a, b) for a, b in zip(first, masters, strict=True))


def refuse(rank: int, config: dict[str, Any], throw: bool) -> str:
    import smp

    smp.init(config)
    model = smp.DistributedModel(make_net())
    step_function = train_step_of(model, own_loss)
    try:
        with model.join(throw_on_early_termination=throw):
            for step in range(1 + rank if throw else 0):
                step_function(batch_of(rank, step))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pipeline_parallel_degree": 2}, "ddp=False"),
        ({"ddp": True, "sharded_data_parallel_degree": 2}, "sharded_data_parallel_degree=2"),
        ({"ddp": True, "shard_optimizer_state": True}, "shard_optimizer_state=True"),
        ({"ddp": True, "layout_independent_dropout": True}, "layout_independent_dropout=True"),
    ],
)
def test_where_replicas_depend_on_each_other_it_is_refused(
    pool: Pool, config: dict[str, Any], words: str
) -> None:
    for message in pool.run(2, refuse, config, False):
        assert f"smp config: {words}: " in message


def test_it_can_raise_when_one_has_run_out(pool: Pool) -> None:
    for message in pool.run(2, refuse, {"ddp": True}, True):
        assert "ranks [0] have run out" in message


def ignore(rank: int) -> None:
    import smp

    smp.init({"microbatches": 2})
    model = smp.DistributedModel(make_net())
    with model.join(enable=False):
        assert engine_of(model).uneven is None


def test_it_can_be_switched_off(pool: Pool) -> None:
    pool.run(1, ignore)
