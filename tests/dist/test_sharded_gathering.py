"""The time in which sharded parameters are whole: allowed uses, and the moment of each release."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from smp.model import engine_of
from smp.modules.materialize import is_placeholder
from tests.dist.pool import WITHOUT_CHECKS, Outcome, Pool
from tests.dist.sharded_training import SHARDED, stats_of
from tests.harness import forward_step, train_step_of
from tests.reference.models import randomise_

WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


class Blocks(nn.Module):
    """A base class of the other models."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 1)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.run(self.inlet(x)))


class Functional(Blocks):
    """Reads parameters of its children, before they ran, after, and without ever calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)
        self.list = nn.ParameterList([torch.zeros(WIDTH), torch.zeros(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.inlet.weight) + self.list[0]
        x = self.run(self.inlet(x)) @ self.scale.weight.sin() @ self.list[1]
        x = F.linear(x, self.blocks[1].first.weight[:WIDTH])
        return self.head(x) + F.linear(x, self.head.weight)


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self) -> Tensor:
        return self.table


class Giving(Blocks):
    """A module returns its parameter; another keeps a value that the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Given()

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x @ self.given())
        for block in self.blocks:
            x = x + torch.tanh(block.first(x)).mean(-1, keepdim=True)
        return self.head(x @ self.given().t())


class Checkpointed(Blocks):
    reentrant = False

    def run(self, x: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=self.reentrant)
        x = checkpoint(lambda x: self.blocks[2](self.blocks[1](x)), x, use_reentrant=self.reentrant)
        return self.blocks[3](x)


class Reentrant(Checkpointed):
    reentrant = True


class Frozen(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.inlet.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[2].first.weight.requires_grad_(False)


class Changing(Block):
    def forward(self, x: Tensor) -> Tensor:
        x.tanh_()
        return self.second(torch.tanh(self.first(x))).add_(x)


class InPlace(Blocks):
    """Modules change what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Changing() for _ in range(4)])


class Adding(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        y += x  # cuts the node of a view out of the graph
        return y


class ChangedViews(Blocks):
    """Linear layers over three dimensions return views, which are changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adding() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x.view(2, -1, WIDTH))
        assert x._is_view()  # type: ignore[no-untyped-call]
        x += 1.0
        return self.head(self.run(x)).view(-1, 1)


class Wandering(Blocks):
    """Takes another way every second step."""

    def run(self, x: Tensor) -> Tensor:
        self.calls += 1
        order = (0, 1, 2, 3) if self.calls % 4 < 2 else (3, 1, 0)
        for index in order:
            x = self.blocks[index](x)
        return x


MODELS: dict[str, type[Blocks]] = {
    model.__name__: model
    for model in (
        *(Blocks, Functional, Giving, Checkpointed, Reentrant, Frozen, InPlace, ChangedViews),
        Wandering,
    )
}


def build(name: str, seed: int = 1) -> Blocks:
    model = MODELS[name]().double()
    randomise_(model, seed)
    return model


def batch_of(dp_rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(31 * step + dp_rank)
    return torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)


def expected(name: str, steps: int, replicas: int, penalty: bool = False) -> dict[str, Tensor]:
    """Parameters after plain training with the batches of all replicas."""
    model = build(name)
    optimizer = sgd(model)
    for step in range(steps):
        for part in range(2):  # microbatches
            for replica in range(replicas):
                model.calls = 2 * step + part
                x = batch_of(replica, step).chunk(2)[part]
                loss = loss_of(model, x) + (penalty_of(model) if penalty else 0)
                (loss / (2 * replicas)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def penalty_of(model: nn.Module) -> Tensor:
    return 0.1 * (model.head.weight.pow(2).sum() + model.blocks[2].first.bias.pow(2).sum())


def assert_params(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12, msg=name)


def init(**config: Any) -> None:
    import smp

    keys = {"ddp": True, "sharded_data_parallel_degree": 2, "microbatches": 2, **SHARDED}
    smp.init({**keys, **config})


def wrap(name: str) -> Any:
    import smp

    return smp.DistributedModel(build(name, seed=1 + smp.dp_rank()))


def train(model: Any, steps: int, penalty: bool = False) -> None:
    import smp

    optimizer = smp.DistributedOptimizer(sgd(model))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        if penalty:
            loss = loss + penalty_of(model.get_module())
        model.backward(loss)
        return loss

    for step in range(steps):
        train_step(batch_of(smp.dp_rank(), step))
        optimizer.step()
        optimizer.zero_grad()


def train_model(rank: int, name: str, steps: int, config: dict[str, Any]) -> dict[str, int]:
    init(**config)
    model = wrap(name)
    train(model, steps)
    stats = stats_of(model)
    assert_params(model.state_dict(), expected(name, steps, 2))
    assert stats["live_elements"] == 0
    return stats


@pytest.mark.parametrize("name", sorted(MODELS))
def test_whatever_reads_parameters_finds_them(pool: Pool, name: str) -> None:
    (stats, other) = pool.run(2, train_model, name, 4, {})
    assert stats == other, "ranks that share parameters gather alike"
    if name == "Wandering":
        assert stats["num_deviations"] > 0
    else:
        assert stats["num_deviations"] == 0
        assert stats["num_hits"] > 0


def numel_of(*names: str) -> int:
    model = build("Blocks")
    return sum(p.numel() for n in names for p in model.get_submodule(n).parameters())


def test_no_more_than_the_limit_is_gathered_ahead(pool: Pool) -> None:
    block = numel_of("blocks.0")
    stats = pool.run(2, train_model, "Blocks", 3, {"sdp_max_live_parameters": 1})[0]
    assert stats["num_hits"] == 0
    assert stats["peak_live_elements"] == block, "one unit at a time"
    limit = 2 * block
    stats = pool.run(2, train_model, "Blocks", 3, {"sdp_max_live_parameters": limit})[0]
    assert stats["num_hits"] > 0
    assert block < stats["peak_live_elements"] <= limit


def test_recomputing_gathers_no_unit_twice(pool: Pool) -> None:
    """Forward, and backward with what it recomputes: two gathers of each unit."""
    for name in ("Checkpointed", "Reentrant"):
        options = {"microbatches": 1}
        stats = pool.run(2, train_model, name, 1, options, env=WITHOUT_CHECKS)[0]
        assert stats["num_gathers"] <= 2 * 6


def train_with_penalty(rank: int) -> None:
    init()
    model = wrap("Blocks")
    train(model, 3, penalty=True)
    assert_params(model.state_dict(), expected("Blocks", 3, 2, penalty=True))


def test_a_step_function_may_read_parameters(pool: Pool) -> None:
    pool.run(2, train_with_penalty)


def slope_of(model: Any, x: Tensor) -> Tensor:
    """Differentiates a gradient once more."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).pow(2).mean() + slope.pow(2).sum()


def train_slopes(rank: int) -> None:
    import smp

    init(microbatches=1)
    model = wrap("Blocks")
    optimizer = smp.DistributedOptimizer(sgd(model))
    train_step = train_step_of(model, lambda model, x: slope_of(model, x))
    plain = build("Blocks")
    plain_optimizer = sgd(plain)
    for step in range(2):
        train_step(batch_of(smp.dp_rank(), step))
        assert stats_of(model)["live_elements"] == 0
        optimizer.step()
        optimizer.zero_grad()
        for replica in range(2):
            (slope_of(plain, batch_of(replica, step)) / 2).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert_params(model.state_dict(), dict(plain.state_dict()))
    with pytest.raises(RuntimeError, match="create_graph=True"):
        slope_of(model, batch_of(0, 0))


def test_gradients_of_gradients_inside_of_steps(pool: Pool) -> None:
    pool.run(2, train_slopes)


def train_plainly(rank: int) -> dict[str, int]:
    """Trains without step functions."""
    import smp

    init()
    model = wrap("Blocks")
    optimizer = smp.DistributedOptimizer(sgd(model))
    plain = build("Blocks")
    with torch.no_grad():
        x = batch_of(7, 7)
        assert torch.equal(model(x), plain(x))
    assert stats_of(model)["live_elements"] == 0
    for step in range(3):
        loss_of(model, batch_of(smp.dp_rank(), step)).backward()
        assert stats_of(model)["live_elements"] == 0
        optimizer.step()
        optimizer.zero_grad()
    assert_params(model.state_dict(), expected("Blocks", 3, 2))
    return stats_of(model)


def test_plain_loops_and_evaluation_outside_of_steps(pool: Pool) -> None:
    assert pool.run(2, train_plainly)[0]["num_hits"] > 0


def keep_small(rank: int) -> None:

    init(sdp_param_persistence_threshold=WIDTH + 1)
    model = wrap("Blocks")
    root = model.get_module()
    evaluate = forward_step(model)
    with torch.no_grad():
        evaluate(batch_of(0, 0))
        gathered = stats_of(model)["gathered_bytes"]
        assert torch.equal(root.blocks[0].second.bias, build("Blocks").blocks[0].second.bias)
        assert is_placeholder(root.blocks[0].second.weight)
        assert stats_of(model)["persistent_elements"] == 5 * WIDTH + WIDTH + 1
        evaluate(batch_of(0, 0))
        small = 8 * stats_of(model)["persistent_elements"]
        again = stats_of(model)["gathered_bytes"] - gathered
        assert again < gathered - small, "what stays whole is not gathered again"
    train(model, 3)
    assert stats_of(model)["persistent_elements"] == 0, "an update makes it stale"
    assert is_placeholder(root.blocks[0].second.bias)
    assert_params(model.state_dict(), expected("Blocks", 3, 2))


def test_small_parameters_stay_whole_until_the_next_update(pool: Pool) -> None:
    pool.run(2, keep_small)


def use_state(rank: int) -> None:
    import smp

    init()
    model = wrap("Frozen")
    other = build("Frozen", seed=5).state_dict()
    model.load_state_dict(other)
    assert_params(model.state_dict(), other)
    partial = model.local_state_dict()
    for name, value in other.items():
        assert torch.equal(partial[name], value)
    whole = model.state_dict(gather_to_rank0=True)
    assert list(whole) == (list(other) if rank == 0 else [])
    root = model.get_module()
    with model.whole_parameters():
        for name, parameter in root.named_parameters():
            assert torch.equal(parameter, other[name])
    assert all(is_placeholder(p) for p in root.parameters())
    for parameter in root.parameters():
        part = parameter.ds_tensor
        held = parameter.reshape(-1).numel() - smp.rdp_rank() * part.numel()
        assert (part[max(held, 0) :] == 0).all(), "zeros behind the end"
    model.cpu()
    for name, parameter in root.named_parameters():
        assert torch.equal(parameter, other[name])
    assert torch.equal(root(batch_of(0, 0)), _loaded(other)(batch_of(0, 0)))


def _loaded(state: dict[str, Tensor]) -> nn.Module:
    model = build("Frozen")
    model.load_state_dict(state)
    return model


def test_states_are_whole(pool: Pool) -> None:
    pool.run(2, use_state)


def lay_out(rank: int) -> None:
    import smp

    init()
    model = wrap("Frozen")
    parameters = list(model.parameters())
    whole = smp.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    flat = whole.fp32_partitioned_groups_flat[0]
    assert flat.data_ptr() == parameters[0].ds_tensor.data_ptr(), "that is how they lie"
    groups = [parameters[1::2], parameters[::2]]
    want = [torch.cat([p.ds_tensor.clone() for p in group]) for group in groups]
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD([{"params": group} for group in groups], lr=1.0)
    )
    flats = optimizer.fp32_partitioned_groups_flat
    for flat, values, group in zip(flats, want, groups, strict=True):
        assert flat.dtype == torch.float64 and torch.equal(flat, values)
        flat.mul_(0.5)
        assert torch.equal(torch.cat([p.ds_tensor for p in group]), flat), "the same memory"
    for parameter, holding in engine_of(model).holdings.items():
        assert holding.master.data_ptr() == holding.piece.data_ptr()
        assert torch.equal(holding.master, parameter.ds_tensor[: holding.numel])
    engine_of(model).after_update()
    state = build("Frozen").state_dict()
    assert_params(model.state_dict(), {name: value * 0.5 for name, value in state.items()})
    norm = sum(flat.square().sum() for flat in flats)
    torch.distributed.all_reduce(norm, group=optimizer.ds_param_shard_group)
    torch.testing.assert_close(norm, sum((v * 0.5).square().sum() for v in state.values()))


def test_masters_of_a_group_lie_behind_each_other(pool: Pool) -> None:
    pool.run(2, lay_out)


class Refuse(Exception):
    pass


def fail_and_go_on(rank: int) -> None:
    import smp

    init()
    model = wrap("Blocks")
    train(model, 2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(Refuse))
        handle = model.get_module().blocks[2].register_forward_pre_hook(refuse)
        stack.callback(handle.remove)
        loss_of(model, batch_of(smp.dp_rank(), 0))
    assert stats_of(model)["live_elements"] == 0
    for step in range(2, 4):
        loss_of(model, batch_of(smp.dp_rank(), step)).backward()


def refuse(module: nn.Module, args: Any) -> None:
    raise Refuse


def test_a_forward_that_fails_everywhere_does_no_harm(pool: Pool) -> None:
    pool.run(2, fail_and_go_on)


def disagree(rank: int) -> None:

    init(microbatches=4)
    model = wrap("Blocks")
    evaluate = forward_step(model)
    with torch.no_grad():
        evaluate(torch.zeros(2 + rank, WIDTH, dtype=torch.float64))


def test_ranks_have_equally_many_microbatches(pool: Pool) -> None:
    outcomes: list[Outcome] = pool.outcomes(2, disagree)
    for outcome in outcomes:
        assert outcome.error == "ValueError"
        assert "sharded_data_parallel_degree" in outcome.message
