"""Scripts that train distributed models with PyTorch's own optimizers and scaler, unwrapped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from tests.dist.pool import Pool, RankFailure
from tests.harness import (
    WIDTH,
    Config,
    Layers,
    assert_near,
    layouts,
    own_samples,
    samples_of,
    train_step_of,
    wrapped,
)

STEPS = 5
LAYOUTS = layouts("one", "replicas", "pipeline", "sharded state", "sharded") | {
    "pipeline and sharded state": (
        4,
        {"pipeline_parallel_degree": 2, "shard_optimizer_state": True},
    ),
}
PIECES = ["sharded state", "sharded", "pipeline and sharded state"]


class Weighted(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

    def forward(self, y: Tensor) -> Tensor:
        return (y * self.weight).square().mean()


class Both(nn.Module):
    def __init__(self, net: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.net, self.criterion = net, criterion

    def forward(self, x: Tensor) -> Any:
        return self.criterion(self.net(x))


# ---- the scaler --------------------------------------------------------------------------------


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def with_overflow(parameter: Tensor) -> list[int]:
    """Makes the gradient of step 1 infinite; returns the place where the step's number belongs."""
    now = [0]
    parameter.register_hook(lambda grad: grad * float("inf") if now[0] == 1 else grad)
    return now


def scaler_of() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)


def fused(parameters: Any) -> torch.optim.Optimizer:
    """Gets the scale, and whether there is an overflow, from the scaler."""
    return torch.optim.AdamW(parameters, lr=0.05, fused=True)


OPTIMIZERS = {"sgd": sgd, "fused": fused}


def scaled_reference(name: str) -> tuple[dict[str, Tensor], list[float]]:
    net = Layers().double()
    optimizer, scaler, scales = OPTIMIZERS[name](net.parameters()), scaler_of(), []
    now = with_overflow(net.layers[3].weight)  # type: ignore[arg-type]
    for step in range(STEPS):
        now[0] = step
        optimizer.zero_grad()
        scaler.scale(net(samples_of(step)).square().mean()).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return dict(net.state_dict()), scales


def train_scaled(rank: int, config: Config, name: str, wraps: bool, unscales: bool) -> Any:
    import smp

    net = Layers().double()
    now = with_overflow(net.layers[3].weight)  # type: ignore[arg-type]
    model = wrapped(config, net)
    own = OPTIMIZERS[name](model.parameters())
    optimizer = smp.DistributedOptimizer(own) if wraps else own
    scaler, scales = scaler_of(), []
    train_step = train_step_of(model, lambda model, x: scaler.scale(model(x).square().mean()))
    for step in range(STEPS):
        now[0] = step
        optimizer.zero_grad()
        train_step(own_samples(step))
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model.state_dict(), scales


@pytest.mark.parametrize(("name", "unscales"), [("sgd", False), ("sgd", True), ("fused", False)])
@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_skip_what_overflows_on_one(
    pool: Pool, layout: str, wraps: bool, name: str, unscales: bool
) -> None:
    if not wraps and layout in PIECES:
        pytest.skip("refused: test_an_optimizer_that_would_find_no_gradient_is_refused")
    size, config = LAYOUTS[layout]
    expected, scales = scaled_reference(name)
    assert scales[1] < scales[0]  # it was skipped
    for values, seen in pool.run(size, train_scaled, config, name, wraps, unscales):
        assert seen == scales
        assert_near([values], expected)


def scaler_after_the_end(rank: int) -> bool:
    import smp

    before = torch.amp.GradScaler._unscale_grads_
    for _ in range(2):
        wrapped({"pipeline_parallel_degree": 2}, Layers())
        assert torch.amp.GradScaler._unscale_grads_ is not before
        smp.shutdown()
    return torch.amp.GradScaler._unscale_grads_ is before


def test_the_scaler_is_pytorchs_own_again_at_the_end(pool: Pool) -> None:
    assert pool.run(2, scaler_after_the_end) == [True, True]


# ---- optimizers that are not wrapped -----------------------------------------------------------


def train_unwrapped(rank: int, config: Config, calls: str = "clip_grad_norm_") -> Any:

    dtype = torch.float32 if "bf16" in config else torch.float64
    model = wrapped(config, Layers().to(dtype))
    optimizer = sgd(model.parameters())
    train_step = train_step_of(model)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(own_samples(step, dtype))
        if calls == "clip_grad_norm_":
            norms.append(float(clip_grad_norm_(model.parameters(), 0.05)))
        elif calls == "read":
            norms.append(float(clip_grad_norm_(model.parameters(), float("inf"))))
        elif calls == "get_total_norm":
            get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        elif calls == "clip_grads_with_norm_":
            clip_grads_with_norm_(model.parameters(), 0.05, torch.tensor(3.0))
        optimizer.step()
    return model.state_dict(), norms


@pytest.mark.parametrize("calls", ["clip_grad_norm_", "read"])
@pytest.mark.parametrize("layout", ["replicas", "pipeline"])
def test_what_is_not_wrapped_is_clipped_by_the_norm_over_all_ranks(
    pool: Pool, layout: str, calls: str
) -> None:
    net = Layers().double()
    optimizer, norms = sgd(net.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        net(samples_of(step)).square().mean().backward()
        most = 0.05 if calls == "clip_grad_norm_" else float("inf")
        norms.append(float(clip_grad_norm_(net.parameters(), most)))
        optimizer.step()
    size, config = LAYOUTS[layout]
    for values, seen in pool.run(size, train_unwrapped, config, calls):
        assert seen == pytest.approx(norms, rel=1e-9)
        assert_near([values], net.state_dict())


@pytest.mark.parametrize("layout", [*PIECES, "bf16"])
def test_an_optimizer_that_would_find_no_gradient_is_refused(pool: Pool, layout: str) -> None:
    size, config = LAYOUTS.get(layout, (2, {"bf16": True}))
    with pytest.raises(RankFailure, match=r"wrap it: smp.DistributedOptimizer\(optimizer\)"):
        pool.run(size, train_unwrapped, config)


@pytest.mark.parametrize("name", ["get_total_norm", "clip_grads_with_norm_"])
def test_halves_of_clipping_are_refused_where_a_rank_has_a_part(pool: Pool, name: str) -> None:
    with pytest.raises(RankFailure, match=rf"torch.nn.utils.{name} sees the gradients of this"):
        pool.run(2, train_unwrapped, LAYOUTS["pipeline"][1], name)
    pool.run(2, train_unwrapped, LAYOUTS["replicas"][1], name)


def test_an_optimizer_that_needs_more_than_a_rank_has_is_refused(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="Adafactor updates elements by"):
        pool.run(2, train_adafactor)


def train_adafactor(rank: int) -> None:
    model = wrapped({"tensor_parallel_degree": 2}, Layers().double())
    optimizer = torch.optim.Adafactor(model.parameters())
    train_step = train_step_of(model)
    train_step(samples_of(0))
    optimizer.step()


def train_replaced(rank: int) -> None:
    import smp

    smp.init({"ddp": True, "tensor_parallel_degree": 2})
    net = Layers().double()
    optimizer = sgd(net.parameters())
    smp.set_tensor_parallelism(net.layers[1])
    model = smp.DistributedModel(net)
    train_step = train_step_of(model)
    train_step(samples_of(0))
    optimizer.step()


def test_parameters_that_were_replaced_are_refused(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="make it from the parameters of the DistributedModel"):
        pool.run(2, train_replaced)


# ---- parameters that no model has --------------------------------------------------------------


def train_criterion(rank: int, config: Config, place: str, wraps: bool = True) -> Any:
    import smp

    net = Layers().double()
    criterion: nn.Module = Weighted()
    model = wrapped(config, Both(net, criterion) if place == "in one module" else net)
    if place == "of its own":
        criterion = smp.DistributedModel(criterion)
    listed = list(model.parameters())
    if place != "in one module":
        listed += list(criterion.parameters())
    optimizer = sgd(listed)
    if wraps:
        optimizer = smp.DistributedOptimizer(optimizer)

    @smp.step
    def train_step(x: Tensor) -> None:
        model.backward(model(x) if place == "in one module" else criterion(model(x)))

    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(own_samples(step))
        optimizer.step()
    values = {name.removeprefix("net."): v for name, v in model.state_dict().items()}
    if place == "of its own":
        values["criterion.weight"] = criterion.state_dict()["weight"]
    return values


def criterion_reference() -> dict[str, Tensor]:
    both = Both(Layers().double(), Weighted())
    optimizer = sgd(both.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        both(samples_of(step)).backward()
        optimizer.step()
    return {name.removeprefix("net."): value for name, value in both.state_dict().items()}


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_a_loss_that_no_model_has_are_refused(
    pool: Pool, layout: str, wraps: bool
) -> None:
    if not wraps and layout in PIECES:
        pytest.skip("refused: test_an_optimizer_that_would_find_no_gradient_is_refused")
    size, config = LAYOUTS[layout]
    words = r"depends on parameter 8 of SGD, of shape \(8,\), which no DistributedModel has"
    with pytest.raises(RankFailure, match=words):
        pool.run(size, train_criterion, config, "in the script", wraps)


def train_criterion_alone(rank: int, config: Config, wraps: bool) -> None:
    """The loss has an optimizer of its own, which no model's parameter is in."""
    import smp

    model, criterion = wrapped(config, Layers().double()), Weighted()
    optimizer = smp.DistributedOptimizer(sgd(model.parameters()))
    other = sgd(criterion.parameters())
    if wraps:
        other = smp.DistributedOptimizer(other)

    train_step = train_step_of(model, lambda model, x: criterion(model(x)))
    for step in range(2):  # the first update finds an unwrapped optimizer
        train_step(own_samples(step))
        optimizer.step()
        other.step()


@pytest.mark.parametrize("wraps", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_of_the_loss_alone_is_no_way_around(
    pool: Pool, layout: str, wraps: bool
) -> None:
    size, config = LAYOUTS[layout]
    words = r"depends on parameter 0 of SGD, of shape \(8,\), which no DistributedModel has"
    with pytest.raises(RankFailure, match=words):
        pool.run(size, train_criterion_alone, config, wraps)


@pytest.mark.parametrize("place", ["in one module", "of its own"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_of_a_loss_in_a_model_are_trained(pool: Pool, layout: str, place: str) -> None:
    if place == "of its own" and "pipeline" in layout:
        pytest.skip("one module is not divided over the ranks of a pipeline")
    size, config = LAYOUTS[layout]
    expected = criterion_reference()
    assert_near(pool.run(size, train_criterion, config, place), expected)


def strangers_outside(rank: int) -> list[bool]:
    """Gradients outside of steps, and of parameters that are in no optimizer, are the script's."""
    import smp

    model = wrapped({}, Layers().double())
    frozen, other = Weighted().requires_grad_(False), Weighted()
    optimizer = smp.DistributedOptimizer(sgd([*model.parameters(), *other.parameters()]))
    train_step = train_step_of(model, lambda model, x: frozen(model(x)) + Weighted()(model(x)))
    for step in range(2):
        optimizer.zero_grad()
        train_step(own_samples(step))
        other(samples_of(step)).backward()
        optimizer.step()
    return [bool((other.weight != Weighted().weight).all())]


def test_gradients_outside_of_steps_are_the_scripts(pool: Pool) -> None:
    assert pool.run(2, strangers_outside) == [[True]] * 2
