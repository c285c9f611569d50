"""The first training step is compared with one process: healthy models pass, others are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.observe.verification.first_step import outcome_of
from tests.dist.pool import Pool
from tests.dist.training import local_parameters

WIDTH, BATCH = 8, 8


class Block(nn.Module):
    """A residual block with a buffer, a mask, and a mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(self.norm(x)))
        result: Tensor = x + self.batch_norm(self.second(hidden)) * self.scale * mask
        return result


class Net(nn.Module):
    """Blocks, a head, and a loss."""

    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.run_blocks(self.embed(x), mask))
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}

    def run_blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


class StaleBuffer(Net):
    """The root writes to a buffer that another rank reads."""

    def run_blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        self.blocks[2].scale.mul_(0.9)  # type: ignore[union-attr, operator]
        return super().run_blocks(x, mask)


class AuxBlock(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        result = super().forward(x, mask)
        self.aux = result.square().mean()
        return result


class AuxLoss(Net):
    """The root adds up what blocks have left on themselves."""

    block = AuxBlock

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> dict[str, Tensor]:
        out = super().forward(x, mask, target)
        aux = [block.aux for block in self.blocks if hasattr(block, "aux")]
        return {**out, "loss": out["loss"] + torch.stack(aux).sum()}


class FewerOutputs(AuxLoss):
    """Returns what blocks have left on themselves, as far as it is there."""

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> dict[str, Any]:
        out = Net.forward(self, x, mask, target)
        return {**out, "aux": [block.aux for block in self.blocks if hasattr(block, "aux")]}


class Collected(Net):
    """Hooks inside of blocks collect for the root."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        for block in self.blocks:
            block.first.register_forward_hook(lambda *call: self.found.append(call[-1]))

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.found.clear()
        out = super().forward(x, mask, target)
        penalty = sum(found.square().mean() for found in self.found)
        return {**out, "loss": out["loss"] + penalty}


def train(
    rank: int,
    config: dict[str, Any],
    num_steps: int = 2,
    plant: str = "",
    make: str = "Net",
) -> dict[str, Any]:
    """Two steps; what came of the check, and all numbers."""
    import smp

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True, **config})
    torch.manual_seed(3)
    plain = globals()[make]().double()
    if "bf16" in config or "fp16" in config:
        plain.float()
    if plant or make != "Net":
        for module in (*plain.blocks[2:], plain.head):
            smp.set_partition(module, 1)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    if plant:
        PLANTS[plant][0](plain)

    @smp.step
    def step(x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = model(x, mask, target)["loss"]
        model.backward(loss)
        return loss

    losses = []
    error = ""
    try:
        for index in range(num_steps):
            generator = torch.Generator().manual_seed(100 * index + smp.dp_rank())
            draw = {"generator": generator, "dtype": torch.float64}
            mask = torch.rand(BATCH, WIDTH, **draw)
            out = step(torch.randn(BATCH, WIDTH, **draw), mask, torch.randn(BATCH, 3, **draw))
            losses.append([x.item() for x in out.outputs])
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    return {
        "outcome": outcome_of(model),
        "error": error,
        "losses": losses,
        "params": {n: p.detach().clone() for n, p in local_parameters(model).items()},
        "pp": smp.pp_rank(),
    }


def test_replicas_in_one_order_are_left_alone(pool: Pool) -> None:
    config = {"deterministic_server": True}
    for result in pool.run(4, train, config):
        assert result["outcome"].startswith("off: the replicas do all in one order")


LAYOUTS = (
    (2, {}),
    (3, {"pipeline_parallel_degree": 3}),
    (4, {}),
    (4, {"tensor_parallel_degree": 2}),
    (2, {"pipeline": "simple"}),
    (2, {"deterministic_server": True}),
    (2, {"pipeline": "zero_bubble"}),
    (2, {"pipeline": "virtual_interleaved"}),
    (4, {"shard_optimizer_state": True}),
    (2, {"bf16": True}),
    (2, {"fp16": True}),
)


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize(("size", "config"), LAYOUTS, ids=str)
def test_a_healthy_model_is_checked_and_trains_as_without(
    pool: Pool, size: int, config: dict[str, Any]
) -> None:
    config = {**config, "ddp": size > 2 and "tensor_parallel_degree" not in config}
    config["ddp"] = size // config.get("pipeline_parallel_degree", 2) > 1
    runs = [
        pool.run(size, train, config, env={"SMP_CHECK_FIRST_STEP": setting})
        for setting in ("auto", "0")
    ]
    outcomes = [result["outcome"] for result in runs[0]]
    assert outcomes.count("equal") >= config.get("pipeline_parallel_degree", 2), outcomes
    assert set(outcomes) <= {"equal", "off: the first replica is checked"}, outcomes
    assert {r["outcome"] for r in runs[1]} == {"off: SMP_CHECK_FIRST_STEP is 0"}
    for checked, plain in zip(*runs, strict=True):
        assert not checked["error"] and checked["losses"] == plain["losses"]
        for name, value in checked["params"].items():
            assert torch.equal(value, plain["params"][name]), name


# ---- planted differences


def on_owner(change: Callable[[Any], None]) -> Callable[[nn.Module], None]:
    """A change of block 2, on the rank that owns it."""

    def plant(root: Any) -> None:
        import smp

        if smp.pp_rank() == 1:
            change(root.blocks[2])

    return plant


def result(change: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """Another result of block 2, made of its result and its arguments."""

    def plant(block: Any) -> None:
        own = block.forward
        block.forward = lambda x, mask: change(own(x, mask), x, mask)

    return on_owner(plant)


def arguments(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Any:
    """Block 2 gets other arguments."""

    def plant(block: Any) -> None:
        own = block.forward
        block.forward = lambda x, mask: own(*change(x, mask))

    return on_owner(plant)


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """A linear map of block 2 uses something made of its weight."""

    def plant(block: Any) -> None:
        linear = getattr(block, name)
        linear.forward = lambda x: nn.functional.linear(x, change(linear.weight), linear.bias)

    return on_owner(plant)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def other_values(only_replica: int) -> Callable[[nn.Module], None]:
    """A weight that is not the first rank's after the partition."""

    def plant(root: Any) -> None:
        import smp
        from smp.storage.whole import WholeParameters

        place = WholeParameters.place

        def placed(*args: Any) -> None:
            place(*args)
            WholeParameters.place = place  # type: ignore[method-assign]
            if smp.pp_rank() == 1 and smp.rdp_rank() == only_replica:
                with torch.no_grad():
                    root.blocks[2].second.weight.mul_(1.1)

        WholeParameters.place = placed  # type: ignore[method-assign, assignment]

    return plant


def swap_mode(block: Any) -> None:
    block.batch_norm.eval()


def swap_eps(block: Any) -> None:
    block.norm.eps = 1e-3


def drop_bias(block: Any) -> None:
    linear = block.first
    linear.forward = lambda x: nn.functional.linear(x, linear.weight)


def freeze(block: Any) -> None:
    block.first.weight.requires_grad_(False)


def swap_activation(block: Any) -> None:
    def forward(x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.relu(block.first(block.norm(x)))
        made: Tensor = x + block.batch_norm(block.second(hidden)) * block.scale * mask
        return made

    block.forward = forward


def detach_branch(block: Any) -> None:
    def forward(x: Tensor, mask: Tensor) -> Tensor:
        hidden = torch.tanh(block.first(block.norm(x))).detach()
        made: Tensor = x + block.batch_norm(block.second(hidden)) * block.scale * mask
        return made

    block.forward = forward


def halves(made: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    return made.to(torch.float32).to(torch.float64)


def lose_hook(root: Any) -> None:
    import smp

    if smp.pp_rank() == 0:
        root.blocks[2].first.register_forward_hook(lambda module, given, made: made * 1.5)


def replicas_differ(root: Any) -> None:
    other_values(1)(root)


#: what it does, where it is found, and what the message says first
PLANTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "scaled result": (result(lambda made, x, mask: made * 1.01), "module 'blocks.2' on"),
    "missing residual": (result(lambda made, x, mask: made - x), "module 'blocks.2' on"),
    "added constant": (result(lambda made, x, mask: made + 1e-6), "module 'blocks.2' on"),
    "rounded to float32": (result(halves), "module 'blocks.2' on"),
    "NaN": (result(lambda made, x, mask: made * float("nan")), "module 'blocks.2' on"),
    "samples in another order": (result(lambda made, x, m: made.flip(0)), "module 'blocks.2' on"),
    "one element": (
        result(lambda made, x, mask: made.index_fill(0, torch.tensor([1]), 0.0)),
        "module 'blocks.2' on",
    ),
    "swapped arguments": (arguments(lambda x, mask: (mask, x)), "module 'blocks.2.norm' on"),
    "dropped mask": (arguments(lambda x, m: (x, torch.ones_like(m))), "module 'blocks.2' on"),
    "wrong mode": (on_owner(swap_mode), "module 'blocks.2.batch_norm' on"),
    "another epsilon": (on_owner(swap_eps), "module 'blocks.2.norm' on"),
    "no bias": (on_owner(drop_bias), "module 'blocks.2.first' on"),
    "another activation": (on_owner(swap_activation), "module 'blocks.2.second' on"),
    "weights of another rank": (other_values(0), "module 'blocks.2.second' on"),
    "a hook that is lost": (lose_hook, "module 'blocks.2.second' on"),
    "dropped gradient": (weight("first", Tensor.detach), "gradient of 'blocks.2.first.weight'"),
    "gradient twice": (
        weight("first", lambda w: ScaledGradient.apply(w, 2.0)),
        "gradient of 'blocks.2.first.weight'",
    ),
    "gradient of the other sign": (
        weight("second", lambda w: ScaledGradient.apply(w, -1.0)),
        "gradient of 'blocks.2.second.weight'",
    ),
    "a frozen parameter": (on_owner(freeze), "gradient of 'blocks.2.first.weight'"),
    "a detached branch": (on_owner(detach_branch), "gradient of 'blocks.2."),
    "an input without gradient": (
        arguments(lambda x, mask: (x.detach().requires_grad_(), mask)),
        "the gradient of 'blocks.1.",
    ),
    "a scaled gradient of the input": (
        arguments(lambda x, mask: (ScaledGradient.apply(x, 1.001), mask)),
        "the gradient of 'blocks.1.",
    ),
}
LOST = {
    "StaleBuffer": "module 'blocks.2' on",
    "AuxLoss": "output 0 differs",
    "FewerOutputs": "the output is 4 values instead of 6 values",
    "Collected": "output 0 differs",
}


def attempt(rank: int, config: dict[str, Any], make: str, plants: list[str]) -> list[Any]:
    import smp

    found = []
    for plant in plants:
        found.append(train(rank, config, 1, plant, make))
        smp.shutdown()
    return found


MANUAL = {"auto_partition": False, "default_partition": 0, "ddp": False}


@pytest.mark.parametrize("first", range(0, len(PLANTS), 6))
def test_planted_differences_are_refused_and_named(pool: Pool, first: int) -> None:
    plants = list(PLANTS)[first : first + 6]
    by_rank = pool.run(2, attempt, MANUAL, "Net", plants)
    for results in by_rank:
        for plant, found in zip(plants, results, strict=True):
            error = found["error"]
            assert error.startswith("FirstStepDifference"), (plant, found["outcome"], error)
            assert PLANTS[plant][1] in error, (plant, error)


@pytest.mark.parametrize("make", LOST)
def test_state_that_stays_on_its_rank_is_refused(pool: Pool, make: str) -> None:
    for (found,) in pool.run(2, attempt, {**MANUAL, "microbatches": 1}, make, [""]):
        assert found["error"].startswith("FirstStepDifference"), (make, found)
        assert LOST[make] in found["error"], (make, found["error"])
