"""NaN and infinities are located: module, direction, rank, step and microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool

WIDTH, NUM_LAYERS = 4, 4


class Damage(torch.autograd.Function):
    """Multiplies what flows forward and what flows back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: float, back: float) -> Tensor:
        ctx.back = back
        return x * ahead

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.back, None, None


class Layer(nn.Module):
    """Damages outputs and gradients by factors, in calls ``{call: (ahead, back)}``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.act = nn.ReLU(inplace=True)
        self.calls = 0
        self.harm: dict[int, tuple[float, float]] = {}

    def forward(self, x: Tensor) -> Tensor:
        ahead, back = self.harm.get(self.calls, (1.0, 1.0))
        self.calls += 1
        return x + self.act(self.drop(Damage.apply(self.linear(x), ahead, back)))


def make(config: dict[str, Any]) -> tuple[Any, Any, Callable[..., Any]]:
    import smp

    smp.init({"microbatches": 2, "auto_partition": False, "ddp": True, **config})
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for index in range(NUM_LAYERS):
        with smp.partition(index * smp.pp_size() // NUM_LAYERS), smp.tensor_parallelism():
            layers.append(Layer())
    model = smp.DistributedModel(nn.Sequential(*layers))
    optimizer = smp.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01),
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": 2.0**4},
    )

    @smp.step
    def step(x: Tensor, factor: float) -> Tensor:
        loss = model(x).square().mean() * factor
        model.backward(loss)
        return loss

    def train(number: int, factor: float = 1.0) -> float:
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        loss: float = step(x, factor).reduce_mean().item()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, train


HARM = {
    # layer: {call: ahead, back}; two calls in each step, of microbatches 0 and 1
    2: {3: (float("nan"), 1.0), 8: (float("inf"), 1.0)},
    1: {4: (1.0, float("inf"))},
    0: {3: (1.0, float("nan"))},
}
#: step: module, direction, kind, microbatch, words
EXPECTED = {
    1: ("2", "forward", "NaN", 1, "an argument that it gives to '2.drop'"),
    2: ("1.linear", "backward", "NaN", 0, "the gradient that comes back to its output"),
    4: ("2", "forward", "Inf", 0, "an argument that it gives to '2.drop'"),
    5: ("(root)", "forward", "Inf", 0, "the loss made of its output"),
    6: ("3.linear", "forward", "NaN", None, "its parameter 'bias' is not finite"),
}


def harm(model: Any) -> None:
    for index, layer in enumerate(model.get_module()):
        layer.calls, layer.harm = 0, HARM.get(index, {})


def look(rank: int, config: dict[str, Any]) -> dict[int, Any]:
    """Steps with and without harm; what was found, by step."""
    import smp
    from smp.modules.forwards import WrapperKind, is_wrapped
    from smp.world import runtime

    model, optimizer, train = make(config)
    train(0)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = train(0)
    model.load_state_dict(start)
    runtime.current().steps.num_begun = 1  # dropout follows from it
    harm(model)
    with smp.detect_nonfinite() as found:
        assert train(0) == plain, "looking changes no number"
        for step in range(1, 5):
            train(step)
            optimizer.zero_grad()
            model.load_state_dict(start)
        train(5, factor=float("inf"))
        model.load_state_dict(start)
        bias = "3.linear.bias"
        model.load_state_dict({**start, bias: torch.full_like(start[bias], float("nan"))})
        train(6)
    steps = {one.step - 1: one for one in found}
    modules = list(model.get_module().modules())
    assert not any(is_wrapped(module, WrapperKind.CHECKS) for module in modules)
    num_found = len(found)
    train(7)  # makes NaN outside of detect_nonfinite
    assert len(found) == num_found
    return steps


LAYOUTS = (
    {"pipeline_parallel_degree": 2},
    {"pipeline_parallel_degree": 2, "pipeline": "zero_bubble"},
    {"tensor_parallel_degree": 2},
    {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
)


@pytest.mark.parametrize("config", LAYOUTS, ids=lambda config: "-".join(map(str, config.values())))
def test_the_first_module_in_time_is_named_by_all_ranks(pool: Pool, config: dict[str, Any]) -> None:
    pp = config.get("pipeline_parallel_degree", 1)
    for seen in pool.run(2, look, config):
        assert seen.keys() == EXPECTED.keys()
        for step, (module, direction, kind, mb, what) in EXPECTED.items():
            one = seen[step]
            assert (one.module, one.direction, one.kind) == (module, direction, kind), one
            assert what in one.what and one.place.startswith(f"pp {one.global_rank % pp}"), one
            assert mb is None or one.microbatch == mb, one
            if pp == 2 and module[0] in "0123":
                assert one.global_rank == int(module[0]) // 2, one


def overflow(rank: int, config: dict[str, Any]) -> tuple[list[Any], bool, str]:
    """A gradient overflows in 16 bits under its loss scale; then something else fails."""
    import smp

    model, optimizer, train = make({**config, "fp16": True})
    train(0)
    layers = list(model.get_module())
    layers[0].calls, layers[0].harm = 0, {1: (1.0, 1e6)}
    with smp.detect_nonfinite(raises=True) as found:
        train(1)
        was_skipped = optimizer.step_was_skipped
        layers[3].calls, layers[3].harm = 0, {0: (1e30, 1.0)}
        try:
            train(2)
        except FloatingPointError as error:
            return found, was_skipped, str(error)
    return found, was_skipped, "no error"


def test_overflows_of_the_loss_scale_are_located_and_end_no_run(pool: Pool) -> None:
    for found, was_skipped, error in pool.run(2, overflow, {"pipeline_parallel_degree": 2}):
        assert was_skipped
        assert [(one.module, one.kind, one.microbatch, one.step) for one in found] == [
            ("0.linear", "Inf", 1, 1),
            ("3", "Inf", 0, 2),
        ]
        assert found[0].direction == "backward" and "loss scale 16" in found[0].what
        assert "in the forward of module '3'" in error and "global_rank 1 (pp 1 tp 0" in error


def fail(rank: int, config: dict[str, Any]) -> str:
    model, _, train = make(config)
    train(0)
    harm(model)
    try:
        for step in range(2):
            train(step)
    except FloatingPointError as error:
        return str(error)
    return "no error"


def test_the_environment_asks_for_errors(pool: Pool) -> None:
    env = {"SMP_DETECT_NONFINITE": "raise"}
    for error in pool.run(2, fail, {"pipeline_parallel_degree": 2}, env=env):
        assert "NaN in the forward of module '2'" in error and "microbatch 1" in error, error
        assert "global_rank 1 (pp 1 tp 0 rdp 0)" in error
