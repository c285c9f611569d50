"""Replicas with different numbers of batches, inside of `model.join()`."""

from __future__ import annotations

import re
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
SHARDED = (("shard_optimizer_state", True),)
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
    Case(SHARDED),
    Case(SHARDED, num_batches=(5, 2), by_all=False),
    Case(SHARDED, num_batches=(3, 3)),
    Case(SHARDED, num_batches=(0, 2)),
    Case(SHARDED, num_batches=(2, 4), passes=2),
    Case((*PP, *SHARDED), world_size=4),
    Case((*PP, *SHARDED), num_batches=(4, 1), by_all=False, world_size=4),
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


def train_split(rank: int, num_batches: list[int], shards: bool = False) -> Any:
    """Trains with a tensor-parallel degree of two, on a number of batches for each rank."""
    import smp

    smp.init({"ddp": True, "tensor_parallel_degree": 2, "shard_optimizer_state": shards})
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
    sharded = pool.run(4, train_split, [1, 1, 3, 3], True)
    first, num_split = results[0]
    for state, _ in sharded:
        for name, value in state.items():
            torch.testing.assert_close(value, first[name], rtol=1e-9, atol=1e-9)
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


# ---- sharded optimizer state: replicas without a batch make the others' updates, too


@dataclass(frozen=True)
class Loop:
    """A training loop, with what it does beside steps and updates by name."""

    name: str
    config: tuple[tuple[str, Any], ...] = ()
    num_batches: tuple[int, int] = (2, 6)
    world_size: int = 2

    def __str__(self) -> str:
        return "-".join([self.name, *(key for key, _ in self.config), str(self.num_batches)])


def run_loop(loop: Loop, model: nn.Module, optimizer: Any, replica: int, train: Any) -> None:
    """Runs a loop, in one process (``train`` of all replicas) or on one of them.

    The learning rate halves with each update; gradients of two steps may be added up by hand, and
    those of a step may be dropped.
    """
    names = loop.name.split("+")
    for step in range(loop.num_batches[replica]):
        train(step)
        if "dropped" in names and step % 3 == 2:
            optimizer.zero_grad(set_to_none="zeros" not in names)
            continue
        if "summed" in names and step % 2 == 0:
            continue
        if "norm" in names:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if "some" in names:
            nn.utils.clip_grad_norm_(list(model.parameters())[:2], 0.02)
        if "value" in names:
            nn.utils.clip_grad_value_(list(model.parameters()), 0.004)
        optimizer.step()
        optimizer.zero_grad(set_to_none="zeros" not in names)
        if "rate" in names:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5


def train_loop_alone(loop: Loop) -> dict[str, Tensor]:
    model = make_net()
    optimizer = make_optimizer(model)
    norm = model.get_submodule("norm")
    longest = loop.num_batches.index(max(loop.num_batches))
    means = [torch.zeros(WIDTH, dtype=torch.float64) for _ in range(2)]

    def train(step: int) -> None:
        active = [r for r in (0, 1) if step < loop.num_batches[r]]
        means[:] = [means[active[0]].clone()] * 2
        for replica in active:
            norm.running_mean.copy_(means[replica])
            (model(batch_of(replica, step)) / 2).backward()
            means[replica] = norm.running_mean.clone()

    run_loop(loop, model, optimizer, longest, train)
    return {name: p.detach() for name, p in model.named_parameters()}


def train_loop(rank: int, loop: Loop) -> Any:
    import smp
    from smp.storage.flat_parameters import FlatParameters

    config = {"ddp": True, "auto_partition": False, "shard_optimizer_state": True}
    smp.init({**config, **dict(loop.config)})
    net = make_net()
    model = smp.DistributedModel(net)
    if smp.pp_size() > 1:
        smp.set_partition(net.last, 1)
    optimizer = smp.DistributedOptimizer(make_optimizer(model))
    step_function = train_step_of(model, own_loss)
    replica = smp.rdp_rank()
    with model.join():
        run_loop(
            loop, model, optimizer, replica, lambda step: step_function(batch_of(replica, step))
        )
    assert isinstance(engine_of(model).storage, FlatParameters)
    params = {name: p.detach().clone() for name, p in model.local_named_parameters()}
    return params, optimizer.param_groups[0]["lr"], optimizer.local_state_dict()


LOOPS = [
    Loop("norm+rate"),
    Loop("norm+some+rate", PP, world_size=4),
    Loop("norm+rate", (("optimizer_state", "tensors"),), num_batches=(5, 2)),
    Loop("value+zeros", num_batches=(5, 1)),
    Loop("summed+dropped"),
    Loop("summed+dropped+zeros+norm", num_batches=(7, 3)),
    Loop("dropped", num_batches=(1, 3)),  # the last one ends with it
]


@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_sharded_updates_equal_those_of_one_process(pool: Pool, loop: Loop) -> None:
    expected = train_loop_alone(loop)
    start = make_net()
    results = pool.run(loop.world_size, train_loop, loop)
    seen: set[str] = set()
    for params, rate, _ in results:
        assert rate == results[0][1]
        for name, value in params.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
            assert not torch.equal(value, start.get_parameter(name))
        seen |= set(params)
    assert seen == set(expected)
    if "rate" in loop.name:
        assert results[0][1] == 0.05 * 0.5 ** max(loop.num_batches)


def train_sharded_half(rank: int) -> Any:
    import smp

    smp.init({"ddp": True, "fp16": True, "shard_optimizer_state": True})
    model = smp.DistributedModel(make_net().float())
    inner = smp.optimizers.FusedAdam(model.parameters(), lr=0.05)
    args = {"init_scale": 2.0**8, "scale_window": 2}
    optimizer = smp.DistributedOptimizer(inner, dynamic_loss_scale=True, dynamic_loss_args=args)
    step_function = train_step_of(model, own_loss)
    with model.join():
        for step in range((2, 7)[rank]):
            step_function(batch_of(rank, step).float())
            optimizer.clip_master_grads(0.5)
            optimizer.step()
            optimizer.zero_grad()
    scale = optimizer.loss_scale
    step_function(batch_of(rank, 8).float())
    optimizer.step()
    return scale, [p.detach().clone() for p in model.parameters()]


def test_sharded_masters_and_the_loss_scale_keep_up(pool: Pool) -> None:
    (first_scale, first), (scale, params) = pool.run(2, train_sharded_half)
    assert first_scale == scale > 2.0**8
    assert first and all(torch.equal(a, b) for a, b in zip(first, params, strict=True))


def train_sharded_odd(rank: int, what: str) -> str:
    import smp

    smp.init({"ddp": True, "shard_optimizer_state": True})
    model = smp.DistributedModel(make_net())
    optimizer = smp.DistributedOptimizer(make_optimizer(model))
    step_function = train_step_of(model, own_loss)
    with model.join():
        for step in range((1, 4)[rank]):
            x = batch_of(rank, step)
            if what == "a backward outside of a step function":
                model(x).backward()
            elif what == "optimizer.step with a closure":
                optimizer.step(lambda batch=x: step_function(batch).reduce_mean())
            else:
                step_function(x)
            if what == "a change of gradients by code of the script":
                for master in optimizer.param_groups[0]["params"]:
                    if master.grad is not None:
                        master.grad.mul_(0.5)
            optimizer.step()
            if what != "gradients that stay after optimizer.step()":
                optimizer.zero_grad()
            if what == "writing to parameters":
                with torch.no_grad():
                    next(model.parameters()).mul_(0.5)
            if what == "a GradScaler":
                torch.amp.GradScaler("cpu").unscale_(optimizer)
    return ""


@pytest.mark.parametrize(
    "what",
    [
        "writing to parameters",
        "a change of gradients by code of the script",
        "gradients that stay after optimizer.step()",
        "a backward outside of a step function",
        "optimizer.step with a closure",
    ],
)
def test_what_shadows_of_shards_cannot_do_is_refused(pool: Pool, what: str) -> None:
    words = f"{what} inside of join() with shard_optimizer_state=True: replicas without a batch"
    with pytest.raises(RankFailure, match=re.escape(words)):
        pool.run(2, train_sharded_odd, what)
