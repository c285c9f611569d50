"""Gradients that a hook of the user's reduces, as with torch's DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp.model import engine_of
from tests.dist.pool import Pool, RankFailure
from tests.harness import own_loss, train_step_of

WIDTH = 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def batch_of(replica: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * replica + step)
    return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def train(rank: int, kind: str, config: dict[str, Any], uses: list[int]) -> Any:
    """Trains with a hook, "none" for no hook; each step with so many backwards per microbatch."""
    import smp

    smp.init({"ddp": True, "microbatches": 2, "auto_partition": False, **config})
    torch.manual_seed(5)
    net = Net().double()
    model = smp.DistributedModel(net, bucket_cap_mb=2 * WIDTH * WIDTH * 8 / 2**20)
    if smp.pp_size() > 1:
        for layer in net.layers[2:]:
            smp.set_partition(layer, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    group = smp.get_dp_process_group()
    seen: list[tuple[int, bool, int, int]] = []
    divisor = smp.dp_size() * 2  # replicas times microbatches

    def average(state: list[Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        names = len(bucket.parameters())
        assert all(
            gradient.shape == parameter.shape
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=False)
        )
        state.append((bucket.index(), bucket.is_last(), names, bucket.buffer().numel()))
        if kind == "in_place":  # before it is sent, as torch's own hooks do
            bucket.buffer().div_(divisor)
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        if kind == "in_place":
            return work.get_future().then(lambda f: f.value()[0])
        # Another tensor, of another dtype, as compressing hooks return it.
        return work.get_future().then(lambda f: f.value()[0].div(divisor))

    if kind != "none":
        register = model.register_comm_hook if kind == "in_place" else model._register_comm_hook
        register(seen, average)

    @smp.step
    def step_function(x: Tensor, num_uses: int) -> Tensor:
        for _ in range(num_uses):
            loss = model(x)
            model.backward(loss)
        return loss

    for step, num_uses in enumerate(uses):
        step_function(batch_of(smp.dp_rank(), step), num_uses)
        optimizer.step()
        optimizer.zero_grad()
    params = {name: p.detach().clone() for name, p in model.local_named_parameters()}
    stats = engine_of(model).gradients.reducers[0].stats
    return params, seen, stats.num_early_buckets, stats.num_late_parameters


PP = {"pipeline_parallel_degree": 2}


@pytest.mark.parametrize("kind", ["in_place", "copy"])
@pytest.mark.parametrize("config", [{}, PP], ids=["dp", "pp"])
def test_a_hook_that_averages_changes_nothing(
    pool: Pool, kind: str, config: dict[str, Any]
) -> None:
    world_size = 4 if config else 2
    expected = pool.run(world_size, train, "none", config, [1, 1, 1])
    hooked = pool.run(world_size, train, kind, config, [1, 1, 1])
    for (plain, *_), (params, seen, early, _) in zip(expected, hooked, strict=True):
        for name, value in params.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-12, atol=1e-12)
        num_buckets = seen[-1][0] + 1
        assert num_buckets >= 2
        assert [index for index, *_ in seen] == list(range(num_buckets)) * 3
        assert [last for _, last, *_ in seen] == ([False] * (num_buckets - 1) + [True]) * 3
        num_params = sum(count for _, _, count, _ in seen[:num_buckets])
        assert num_params == len(params)
        assert early > 0, "hooks run while backward goes on"


def test_what_comes_late_is_a_bucket_without_parameters(pool: Pool) -> None:
    uses = [1, 1, 3]
    expected = pool.run(2, train, "none", {}, uses)
    hooked = pool.run(2, train, "copy", {}, uses)
    for (plain, *_), (params, seen, _, late) in zip(expected, hooked, strict=True):
        assert late > 0
        for name, value in params.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-12, atol=1e-12)
        extra = [entry for entry in seen if entry[2] == 0]
        assert extra and not any(last for _, last, *_ in extra)


def compress(rank: int) -> list[float]:
    """Computes the relative errors of gradients with hooks that come with torch."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    import smp

    errors = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        smp.init({"ddp": True})
        torch.manual_seed(5)
        model = smp.DistributedModel(Net())
        model.register_comm_hook(smp.get_dp_process_group(), hook)
        model(batch_of(rank, 0).float()).backward()
        torch.manual_seed(5)
        plain = Net()
        (sum(plain(batch_of(r, 0).float()) for r in range(2)) / 2).backward()
        largest = max(p.grad.abs().max().item() for p in plain.parameters())
        errors.append(
            max(
                (p.grad - q.grad).abs().max().item() / largest
                for p, q in zip(model.parameters(), plain.parameters(), strict=True)
            )
        )
        smp.shutdown()
    return errors


def test_hooks_of_torch_work_in_a_plain_loop(pool: Pool) -> None:
    for exact, rounded in pool.run(2, compress):
        assert exact < 1e-5 and 1e-6 < rounded < 1e-2


def change(rank: int, config: dict[str, Any], plan: list[str], zero: bool) -> Any:
    """Trains with another hook in each step, as a plan says; "" is a step without a word."""
    import smp

    arguments = {"ddp": True, "microbatches": 2, "auto_partition": False, **config}
    passes = arguments.pop("passes", 1)
    smp.init(arguments)
    torch.manual_seed(5)
    net = Net() if smp.state.cfg.fp16 else Net().double()
    model = smp.DistributedModel(net, backward_passes_per_step=passes)
    if smp.pp_size() > 1:
        for layer in net.layers[2:]:
            smp.set_partition(layer, 1)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    group, divisor, calls = smp.get_dp_process_group(), smp.dp_size() * 2, []

    def hook(state: str, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(state)
        factor = {"mean": 1.0, "double": 2.0}[state] / divisor / passes
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda f: f.value()[0].mul(factor))

    step_function = train_step_of(model, own_loss)
    seen = []
    for step, kind in enumerate(plan):
        if kind:
            model.register_comm_hook(kind, hook)
        calls.clear()
        step_function(batch_of(smp.dp_rank(), step).to(next(net.parameters()).dtype))
        grads = {n: p.grad for n, p in model.local_named_parameters() if p.grad is not None}
        seen.append(({n: g.double().clone() for n, g in grads.items()}, sorted(set(calls))))
        optimizer.step()
        if zero:
            optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("config", [{}, PP], ids=["dp", "pp"])
def test_hooks_come_and_go_between_steps(pool: Pool, config: dict[str, Any], zero: bool) -> None:
    world_size = 4 if config else 2
    plan = ["", "", "mean", "", "mean", ""]
    expected = pool.run(world_size, change, config, [""] * len(plan), zero)
    for plain, hooked in zip(
        expected, pool.run(world_size, change, config, plan, zero), strict=True
    ):
        for step, ((grads, _), (ours, calls)) in enumerate(zip(plain, hooked, strict=True)):
            assert calls == ([] if step < 2 else ["mean"])
            for name, value in ours.items():
                torch.testing.assert_close(value, grads[name], rtol=1e-12, atol=1e-12)


def test_the_last_hook_counts(pool: Pool) -> None:
    for grads in pool.run(2, change, {}, ["mean", "double"], True):
        assert [calls for _, calls in grads] == [["mean"], ["double"]]
    for plain, doubled in zip(
        pool.run(2, change, {}, ["mean"], True),
        pool.run(2, change, {}, ["double"], True),
        strict=True,
    ):
        for name, value in doubled[0][0].items():
            torch.testing.assert_close(value, 2 * plain[0][0][name], rtol=1e-12, atol=1e-12)


def test_a_first_hook_between_accumulated_gradients_is_refused(pool: Pool) -> None:
    accumulating = {"passes": 2}
    pool.run(2, change, accumulating, ["mean", "double", "mean", ""], True)
    with pytest.raises(RankFailure, match="backward_passes_per_step"):
        pool.run(2, change, accumulating, ["", "mean"], True)


def skip_updates(rank: int) -> list[bool]:
    """Trains with a loss scale that overflows, which the optimizer finds in reduced gradients."""
    import smp

    smp.init({"ddp": True, "fp16": True})
    model = smp.DistributedModel(Net())
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), static_loss_scale=2.0**14
    )

    def average(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda f: f.value()[0].div(2))

    @smp.step
    def step_function(x: Tensor, factor: float) -> None:
        model.backward(model(x) * factor)

    overflows = []
    for step in range(3):
        if step == 1:
            model.register_comm_hook(smp.get_dp_process_group(), average)
        step_function(batch_of(rank, step).float(), 1e9 if step == 1 else 1.0)
        overflows.append(optimizer.overflow)
        optimizer.step()
        optimizer.zero_grad()
    return overflows


def test_an_overflow_is_seen_behind_a_new_hook(pool: Pool) -> None:
    assert pool.run(2, skip_updates) == [[False, True, False]] * 2


def misuse(rank: int, how: str) -> None:
    import smp

    smp.init({"ddp": True})
    model = smp.DistributedModel(Net())

    def broken(state: Any, bucket: dist.GradBucket) -> Any:
        if how == "raises":
            raise KeyError("of the hook")
        if how == "no future":
            return bucket.buffer()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(bucket.buffer()[:3])
        return future

    @smp.step
    def inside(x: Tensor) -> None:
        model.register_comm_hook(None, broken)

    if how == "in a step":
        inside(torch.randn(2, WIDTH))
    if how == "in a join":
        with model.join():
            model.register_comm_hook(None, broken)
    model.register_comm_hook(None, broken)
    model(torch.randn(2, WIDTH)).backward()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "communication hook raised KeyError: 'of the hook'"),
        ("no future", "returns a torch.futures.Future"),
        ("short", "elements, got 3"),
        ("in a step", "call register_comm_hook between steps"),
        ("in a join", "call register_comm_hook between steps"),
    ],
)
def test_a_hook_that_fails_is_an_error_that_says_so(pool: Pool, how: str, words: str) -> None:
    with pytest.raises(RankFailure, match=words):
        pool.run(2, misuse, how)


def refuse(rank: int, config: dict[str, Any], arguments: dict[str, Any]) -> str:
    import smp

    smp.init(config)
    model = smp.DistributedModel(Net(), **arguments)
    with pytest.raises(ValueError) as caught:
        model.register_comm_hook(None, lambda state, bucket: None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        ({"pipeline_parallel_degree": 2}, {}, "ddp=False"),
        ({"ddp": True}, {"overlapping_allreduce": False}, "overlapping_allreduce=False"),
        ({"ddp": True, "sharded_data_parallel_degree": 2}, {}, "sharded_data_parallel_degree=2"),
        ({"ddp": True, "shard_optimizer_state": True}, {}, "shard_optimizer_state=True"),
        ({"ddp": True, "tensor_parallel_degree": 2}, {}, "tensor_parallel_degree=2"),
        ({"ddp": True, "context_parallel_degree": 2}, {}, "context_parallel_degree=2"),
    ],
)
def test_where_there_is_no_such_reduction_it_is_refused(
    pool: Pool, config: dict[str, Any], arguments: dict[str, Any], words: str
) -> None:
    for message in pool.run(2, refuse, config, arguments):
        assert f"smp config: {words}: " in message
