"""A partitioned model as scripts see it: placeholders, local views, hooks, names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool
from tests.dist.training import Run, init, make_model, strip
from tests.harness import forward_step, train_step_of
from tests.reference.data import make_batch
from tests.reference.models import build

CHAIN = Run("chain", 2, 1, manual=True)


def evaluate_once(model: Any, case: str = "chain") -> Tensor:
    import smp

    evaluate = forward_step(model)
    with torch.no_grad():
        return evaluate(make_batch(case, torch.float64, smp.dp_rank(), 0)["x"]).concat()


def inspect_parameters(rank: int) -> list[str]:
    import smp
    from smp.modules.materialize import is_placeholder

    init(CHAIN)
    plain = dict(build("chain", torch.float64).named_parameters())
    model = make_model(CHAIN)
    before = {strip(n): p for n, p in model.named_parameters()}
    assert list(before) == list(plain)
    assert not model.partitioned
    evaluate_once(model)
    assert model.partitioned
    after = {strip(n): p for n, p in model.named_parameters()}
    local = {strip(n): p for n, p in model.local_named_parameters()}
    assert list(after) == list(plain)
    for name, parameter in after.items():
        assert parameter is before[name], "partition must not replace parameters"
        assert parameter.shape == plain[name].shape and parameter.dtype == plain[name].dtype
        assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
        if name in local:
            assert torch.equal(parameter, plain[name])
        else:
            assert is_placeholder(parameter)
            with pytest.raises(RuntimeError, match="has no values here: it lives on pp_rank"):
                parameter.sum()
            assert parameter.untyped_storage().nbytes() <= 16, "its memory must be free"
    assert 0 < len(local) < len(plain)
    assert list(map(id, model.local_parameters())) == list(map(id, local.values()))
    assert smp.pp_rank() == rank
    return list(local)


def test_parameters_of_other_ranks_are_placeholders_of_true_shape(pool: Pool) -> None:
    first, second = pool.run(2, inspect_parameters)
    assert not set(first) & set(second)
    assert len(first) + len(second) == len(list(build("chain", torch.float64).parameters()))


def inspect_modules(rank: int) -> tuple[list[str], list[str]]:
    init(CHAIN)
    model = make_model(CHAIN)
    evaluate_once(model)
    modules = [strip(name) for name, _ in model.local_named_modules()]
    assert len(list(model.local_modules())) == len(modules)
    root = model.get_module()
    assert type(root).__name__ == "Chain"
    assert model.module.head is root.head, "the wrapper forwards attributes"
    names = [name for name, _ in model.module.named_parameters()]
    assert all(name.startswith("module.") for name in names)
    assert not any(name.startswith("module.module.") for name in names)
    inner: Any = model
    for _ in range(5):
        inner = getattr(inner, "module", inner)
    assert inner is root, "following .module ends at the user's model"
    return modules, names


def test_local_modules_follow_the_manual_partition(pool: Pool) -> None:
    (first, _), (second, _) = pool.run(2, inspect_modules)
    assert "layers.0" in first and "layers.2.linear" in first and "head" in first
    assert "layers.1" in second and "layers.3.norm" in second and "layers.0" not in second


class WithBuffer(torch.nn.Module):
    """Reads a remote child's attributes, as Hugging Face roots do."""

    def __init__(self) -> None:
        import smp

        super().__init__()
        with smp.partition(1):
            self.remote = torch.nn.BatchNorm1d(6)
        self.register_buffer("offset", torch.arange(6.0))
        self.head = torch.nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        assert self.remote.weight.dtype == x.dtype and self.remote.weight.shape == (6,)
        assert self.remote.weight.device == x.device
        return self.head(self.remote(x + self.offset))


def use_buffers(rank: int) -> list[str]:
    import smp

    init(CHAIN)
    torch.manual_seed(3)
    root = WithBuffer().double()
    plain_norm, plain_head = torch.nn.BatchNorm1d(6).double(), torch.nn.Linear(6, 1).double()
    plain_head.load_state_dict(root.head.state_dict())
    model = smp.DistributedModel(root)
    x = make_batch("chain", torch.float64, 0, 0)["x"]
    forward = forward_step(model)
    with torch.no_grad():
        out = forward(x).concat()
        expected = torch.cat(
            [plain_head(plain_norm(part + torch.arange(6.0).double())) for part in x.chunk(4)]
        )
    assert torch.allclose(out, expected, rtol=1e-12)
    full = model.state_dict()
    assert torch.allclose(full["remote.running_mean"], plain_norm.running_mean, rtol=1e-12)
    assert int(full["remote.num_batches_tracked"]) == 4
    return [strip(name) for name, _ in model.local_named_buffers()]


def test_buffers_are_kept_by_the_rank_that_runs_the_module(pool: Pool) -> None:
    first, second = pool.run(2, use_buffers)
    assert "offset" in first and "remote.running_mean" not in first
    assert "remote.running_mean" in second


def use_hooks(rank: int) -> list[str]:
    import smp

    init(CHAIN)
    model = make_model(CHAIN)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    events: list[str] = []

    def note(what: str) -> Any:
        def hook(hooked: Any, hooked_optimizer: Any) -> None:
            assert hooked is model and hooked_optimizer is optimizer
            events.append(f"{what} partitioned={model.partitioned}")

        return hook

    model.register_post_partition_hook(note("partition"))
    model.register_post_step_hook(note("step"))
    removed = model.register_post_partition_hook(note("removed"))
    removed.remove()
    model.get_module().register_forward_pre_hook(
        lambda *_: events.append("forward") if "forward" not in events else None
    )
    evaluate_once(model)
    events.append("-")
    evaluate_once(model)
    model.register_post_partition_hook(note("late"))
    model.register_post_step_hook(note("step 2"))
    evaluate_once(model)
    evaluate_once(model)
    return events


def test_hooks_run_once_at_their_time(pool: Pool) -> None:
    driver, other = pool.run(2, use_hooks)
    expected = ["partition partitioned=True", "step partitioned=True", "-"]
    expected += ["late partitioned=True", "step 2 partitioned=True"]
    assert [e for e in other if e != "forward"] == expected
    assert driver == [expected[0], "forward", *expected[1:]]


def ignore_device_moves(rank: int) -> None:
    init(CHAIN)
    model = make_model(CHAIN)
    assert model.to("cpu") is model
    assert model.to(torch.device("meta")) is model, "moves before partition are ignored"
    assert all(p.device.type == "cpu" for p in model.parameters())
    out = evaluate_once(model)
    full = model.cpu()
    assert torch.allclose(
        full.get_module()(make_batch("chain", torch.float64, 0, 0)["x"])
        if hasattr(full, "get_module")
        else out,
        out,
        rtol=1e-12,
    )


def test_cpu_gathers_the_whole_model(pool: Pool) -> None:
    pool.run(2, ignore_device_moves)


class Derived(torch.nn.Linear):
    """Calls its parent class's forward, remotely."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def call_super(rank: int) -> None:
    import smp

    init(CHAIN)
    torch.manual_seed(0)
    with smp.partition(1):
        derived = Derived(6, 6)
    root = torch.nn.Sequential(torch.nn.Linear(6, 6), derived).double()
    x = make_batch("chain", torch.float64, 0, 0)["x"]
    with torch.no_grad():
        expected = root(x)
    assert torch.allclose(evaluate_once(smp.DistributedModel(root)), expected, rtol=1e-12)


def test_super_forward_does_not_recurse(pool: Pool) -> None:
    pool.run(2, call_super)


def optimizer_before_wrapping(rank: int) -> list[Tensor]:
    import smp

    init(CHAIN)
    plain = build("chain", torch.float64)
    for index, layer in enumerate(plain.layers):
        smp.set_partition(layer, index % 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(optimizer)
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train = train_step_of(model)
    x = make_batch("chain", torch.float64, 0, 0)["x"]
    losses = []
    for _ in range(3):
        losses.append(train(x).reduce_mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    assert abs(optimizer.param_groups[0]["lr"] - 0.0125) < 1e-12
    return losses


def test_optimizer_made_before_wrapping_trains(pool: Pool) -> None:
    for losses in pool.run(2, optimizer_before_wrapping):
        plain = build("chain", torch.float64)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        x = make_batch("chain", torch.float64, 0, 0)["x"]
        for step, loss in enumerate(losses):
            expected = plain(x).square().mean()
            assert torch.allclose(loss, expected, rtol=1e-10)
            optimizer.zero_grad()
            expected.backward()
            optimizer.param_groups[0]["lr"] = 0.1 * 0.5**step
            optimizer.step()
