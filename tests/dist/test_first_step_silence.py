"""Models that the check of the first training step cannot judge, and reports as such."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.observe.verification.first_step import outcome_of
from tests.dist.pool import Pool
from tests.dist.test_first_step_check import BATCH, MANUAL, WIDTH, Net


class Random(Net):
    """Draws noise in its forward."""

    def run_blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().run_blocks(x + 0.1 * torch.randn_like(x), mask)


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.1))


class ByAttribute(Net):
    """A loss that is left on the model."""

    last_loss: Tensor | None = None

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> dict[str, Tensor]:
        hidden = self.run_blocks(self.embed(x), mask)
        logits = self.head(hidden)
        self.last_loss = nn.functional.mse_loss(logits, target) + hidden.square().mean()
        return {"logits": logits}


class Unsteady(Net):
    """Never computes the same twice."""

    def run_blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().run_blocks(x * (1 + time.perf_counter() % 1), mask)


class Talking(Net):
    """Communicates by itself."""

    def run_blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        import smp

        torch.distributed.all_reduce(x.detach().clone(), group=smp.get_dp_process_group())
        return super().run_blocks(x, mask)


class Failing(Net):
    """Fails in a second run."""

    def run_blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        import smp

        if smp.is_tracing():
            raise LookupError("once is enough")
        return super().run_blocks(x, mask)


class Reentrant(Net):
    """Trains its blocks alone, within checkpoints that run a backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks.requires_grad_(True)

    def run_blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=True)
        return x


class Keeper(Net):
    """Keeps its parameters in a list, and a tensor that it writes to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = [(self.embed.weight, self.embed.bias)]
        self.steps = torch.zeros(())
        self.history: list[float] = []

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        self.history.append(float(self.steps))
        x = nn.functional.linear(x, *self.mine[0])
        logits = self.head(self.run_blocks(x, mask))
        return {"loss": nn.functional.mse_loss(logits, target), "logits": logits}


class Factor(Net):
    """Depends on its earlier calls, by a running mean and by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.seen = 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def run_blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        self.seen += 1
        self.mean.mul_(0.5).add_(x.detach().mean(0))  # type: ignore[operator]
        return super().run_blocks(x * self.factor - self.mean * self.seen, mask)


class Pieces(Net):
    """Returns views, a number, and the hidden states before the logits."""

    def forward(self, x: Tensor, mask: Tensor, target: Tensor) -> dict[str, Any]:
        hidden = self.run_blocks(self.embed(x), mask)
        logits = self.head(hidden)
        loss = nn.functional.mse_loss(logits, target)
        parts = logits.split(1, dim=-1)
        return {"loss": loss, "hidden": hidden, "parts": parts, "logits": logits, "width": WIDTH}


class Tied(Net):
    """A model with a weight on both ranks, unused and frozen parameters, a block called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].first.weight = self.blocks[0].first.weight
        self.unused = nn.Linear(2, 2)
        self.blocks[2].second.weight.requires_grad_(False)

    def run_blocks(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().run_blocks(self.blocks[0](x, mask), mask)


def loss_by_attribute(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(*batch)
    return model.last_loss if model.last_loss is not None else out["logits"].mean()


def loss_outside(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """Computes a loss from two outputs, one of which is made of the other."""
    out = model(*batch)
    loss: Tensor = out["loss"] + out["logits"].square().mean() * 0.1
    return loss


def loss_of_two_calls(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    first = model(*batch)["loss"]
    second: Tensor = model(batch[0] * 0.5, *batch[1:])["loss"]
    return first + 0.3 * second


def loss_of_views(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(*batch)
    loss: Tensor = out["loss"] + out["parts"][0].mean()
    return loss


def loss_under_autocast(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss: Tensor = model(*(tensor.float() for tensor in batch))["loss"]
    return loss


def loss_with_a_setting(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The script sets an attribute between two calls."""
    first = model(*batch)["loss"]
    model.module.module.factor = 0.25
    second: Tensor = model(*batch)["loss"]
    model.module.module.factor = 1.0
    return first + second


def plain_loss(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = model(*batch)["loss"]
    return loss


def load(model: Any) -> None:
    state = {k: v * 1.5 if "weight" in k else v for k, v in model.state_dict().items()}
    model.load_state_dict(state)


def write(model: Any) -> None:
    for _, parameter in model.local_named_parameters():
        parameter.data.mul_(0.9)


def evaluate(model: Any) -> None:
    import smp

    @smp.step
    def step(x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        loss: Tensor = model(x, mask, target)["loss"]
        return loss

    with torch.no_grad():
        step(*draw_batch(7))


def draw_batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    kind = {"generator": generator, "dtype": torch.float64}
    return (
        torch.randn(BATCH, WIDTH, **kind),
        torch.rand(BATCH, WIDTH, **kind),
        torch.randn(BATCH, 3, **kind),
    )


def run_case(rank: int, case: str, config: dict[str, Any]) -> tuple[str, list[float]]:
    """Outcome of the check, and losses of three steps."""
    import smp

    make, loss_of, prepare = CASES[case][:3]
    count = 1 if make == "Factor" else 2  # several take turns on its state
    smp.init({"pipeline_parallel_degree": 2, "microbatches": count, **MANUAL, **config})
    torch.manual_seed(3 + rank * (case == "other seeds"))
    plain = Net().float() if make == "Net32" else globals()[make]().double()
    for module in (*plain.blocks[2:], plain.head):
        smp.set_partition(module, 1)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    if case == "checkpointed":
        for block in (plain.blocks[1], plain.blocks[3]):
            smp.set_activation_checkpointing(block)
    if prepare is not None and prepare is not evaluate:
        model.register_post_partition_hook(lambda *_: prepare(model))
    elif prepare is not None:
        prepare(model)
    has_backward = case != "no backward"

    @smp.step
    def step(x: Tensor, mask: Tensor, target: Tensor) -> Tensor:
        loss = loss_of(model, (x, mask, target))
        if has_backward:
            model.backward(loss)
        return loss

    losses = []
    for index in range(3):
        losses += [loss.item() for loss in step(*draw_batch(index)).outputs]
        if has_backward:
            optimizer.step()
        optimizer.zero_grad()
    history = getattr(plain, "history", None)
    if history is not None and rank == 0:
        assert history == [float(i) for i in range(1, 7)], history
        assert float(plain.steps) == 6
    return outcome_of(model), losses


CASES: dict[str, tuple[str, Callable[..., Tensor], Callable[[Any], None] | None, str]] = {
    "random": ("Random", plain_loss, None, "inconclusive: the model draws random numbers"),
    "dropout": ("Dropping", plain_loss, None, "inconclusive: it draws random numbers: Dropout.p"),
    "unsteady": ("Unsteady", plain_loss, None, "inconclusive: one process does not compute"),
    "collective": ("Talking", plain_loss, None, "inconclusive: the model communicates by itself"),
    "reentrant": ("Reentrant", plain_loss, None, "inconclusive: a function of the model in Python"),
    "failing": ("Failing", plain_loss, None, "inconclusive: the model cannot be run a second"),
    "attribute": ("ByAttribute", loss_by_attribute, None, "inconclusive: a backward reaches"),
    "gradient of views": ("Pieces", loss_of_views, None, "equal"),
    "loaded": ("Net", plain_loss, load, "inconclusive: values of parameters or buffers have"),
    "written": ("Net", plain_loss, write, "inconclusive: values of parameters or buffers have"),
    "other seeds": ("Net", plain_loss, None, "inconclusive: ranks have made other values of"),
    "evaluated": ("Net", plain_loss, evaluate, "off: the first step does not train"),
    "views": ("Pieces", plain_loss, None, "equal"),
    "tied": ("Tied", plain_loss, None, "equal"),
    "a list of parameters": ("Keeper", plain_loss, None, "equal"),
    "outside": ("Net", loss_outside, None, "equal"),
    "two calls": ("Net", loss_of_two_calls, None, "equal"),
    "state from call to call": ("Factor", loss_with_a_setting, None, "equal"),
    "autocast": ("Net32", loss_under_autocast, None, "equal"),
    "checkpointed": ("Net", plain_loss, None, "equal"),
    "no backward": ("Net", plain_loss, None, "equal"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_it_cannot_tell_goes_on_and_is_said(pool: Pool, case: str) -> None:
    config = {"ddp": case == "collective"}  # which has groups of PyTorch
    checked = pool.run(2, run_case, case, config)
    plain = pool.run(2, run_case, case, config, env={"SMP_CHECK_FIRST_STEP": "0"})
    for (outcome, losses), (_, expected) in zip(checked, plain, strict=True):
        assert outcome.startswith(CASES[case][3]), (case, outcome)
        assert losses == expected or case == "unsteady", case
