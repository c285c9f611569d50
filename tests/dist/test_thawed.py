"""Parameters that the script freezes and thaws while it trains, as in gradual unfreezing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.pool import Pool, RankFailure
from tests.harness import (
    Config,
    Layers,
    assert_near,
    own_loss,
    own_samples,
    samples_of,
    train_step_of,
    wrapped,
)

STEPS, MICROBATCHES = 6, 2
CHANGED = (0, 3)  # layers: one for each rank of a pipeline
# Changes before steps, by step: are some layers trained from this step on?
THAWS, FREEZES, RESTS = {0: False, 3: True}, {3: False}, {1: False, 3: True}
Changes = dict[int, bool]
LAYOUTS: list[tuple[int, Config]] = [
    (1, {}),
    (2, {"pipeline_parallel_degree": 2}),
    (2, {}),
    (4, {"pipeline_parallel_degree": 2}),
]
SHARDED: list[Config] = [
    {"shard_optimizer_state": True},
    {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 1e9},
]
SHARDED_KEYS = {key for config in SHARDED for key in config}


class Net(Layers):
    """Calls ``before`` with itself in its forward, if there is such a function."""

    def __init__(self, frozen: bool, before: Callable[[Net], None] | None = None) -> None:
        super().__init__(has_loss=True)
        self.double()
        self.before = before
        if frozen:
            set_trained(self, False)

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            self.before(self)
        return super().forward(x.to(next(self.layers[0].parameters()).dtype))


def set_trained(net: Net, flag: bool) -> None:
    for idx in CHANGED:
        net.layers[idx].requires_grad_(flag)


def reference(changes: Changes) -> dict[str, Tensor]:
    net = Net(frozen=0 in changes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(STEPS):
        if step in changes:
            set_trained(net, changes[step])
        optimizer.zero_grad()
        net(samples_of(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return dict(net.state_dict())


def start(config: Config, net: Net) -> tuple[Any, Any]:
    """A model whose first half is on rank 0 of a pipeline, and its optimizer."""
    import smp

    if config.keys() & {"bf16", "fp16"}:
        net.float()
    model = wrapped({"microbatches": MICROBATCHES, **config}, net)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, optimizer


def train(rank: int, config: Config, changes: Changes, outside: bool = False) -> dict[str, Tensor]:
    """Parameters of the whole model at the end.

    Args:
        outside: trains outside of a step function.
    """
    import smp

    net = Net(frozen=0 in changes)
    model, optimizer = start(config, net)
    train_step = train_step_of(model, own_loss)
    is_trained = True
    for step in range(STEPS):
        if step in changes:
            is_trained = changes[step]
            set_trained(net, is_trained)
        own = own_samples(step)
        optimizer.zero_grad()
        if outside:
            model(own).backward()
        else:
            train_step(own)
        if smp.pp_rank() == 0 and not config.keys() & SHARDED_KEYS:
            assert (net.layers[CHANGED[0]].weight.grad is not None) == is_trained
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def check(results: list[dict[str, Tensor]], changes: Changes) -> None:
    assert_near(results, reference(changes))


@pytest.mark.parametrize("changes", [THAWS, FREEZES, RESTS], ids=["thaws", "freezes", "rests"])
@pytest.mark.parametrize(("size", "config"), LAYOUTS)
def test_changes_between_steps(pool: Pool, size: int, config: Config, changes: Changes) -> None:
    check(pool.run(size, train, config, changes), changes)


@pytest.mark.parametrize("changes", [THAWS, FREEZES], ids=["thaws", "freezes"])
def test_without_a_step_function(pool: Pool, changes: Changes) -> None:
    check(pool.run(2, train, {"microbatches": 1}, changes, True), changes)


@pytest.mark.parametrize("changes", [FREEZES, RESTS], ids=["freezes", "rests"])
@pytest.mark.parametrize("config", SHARDED)
def test_sharded_state_may_be_frozen(pool: Pool, config: Config, changes: Changes) -> None:
    check(pool.run(2, train, config, changes), changes)


@pytest.mark.parametrize("config", [*SHARDED, {"bf16": True}, {"fp16": True}])
def test_state_that_is_laid_out_once_refuses(pool: Pool, config: Config) -> None:
    with pytest.raises(RankFailure, match=r"'layers\.0\.weight' was frozen when the model was"):
        pool.run(2, train, config, THAWS)


def train_while_code_thaws(rank: int, config: Config) -> None:
    """The forward thaws in the third step, and freezes again."""
    calls = 0

    def before(net: Net) -> None:
        nonlocal calls
        calls += 1
        set_trained(net, calls > 2 * MICROBATCHES)

    train_step = train_step_of(start(config, Net(True, before))[0], own_loss)
    for step in range(4):
        train_step(samples_of(step))


@pytest.mark.parametrize(
    ("size", "config", "words"),
    [
        (1, {}, r"'layers\.0\.weight' was frozen when this step began, and has got a gradient"),
        (2, {"pipeline_parallel_degree": 2}, "its parameter 'weight' is trained, but it is frozen"),
    ],
)
def test_code_of_a_forward_that_thaws_is_named(
    pool: Pool, size: int, config: Config, words: str
) -> None:
    with pytest.raises(RankFailure, match=words):
        pool.run(size, train_while_code_thaws, config)


def thaw_on_one_replica(rank: int) -> None:
    net = Net(frozen=True)
    train_step = train_step_of(start({}, net)[0], own_loss)
    for step in range(3):
        if step == 1 and rank == 1:
            set_trained(net, True)
        train_step(samples_of(step))


def test_replicas_that_differ_are_named(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="the ranks disagree"):
        pool.run(2, thaw_on_one_replica)


def accumulate(rank: int) -> None:
    import smp

    net = Net(frozen=True)
    smp.init({"ddp": True, "microbatches": MICROBATCHES})
    train_step = train_step_of(smp.DistributedModel(net, backward_passes_per_step=2), own_loss)
    train_step(samples_of(0))
    set_trained(net, True)
    train_step(samples_of(1))


def test_between_steps_whose_gradients_are_added_up_it_is_refused(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="2 backward_passes_per_step are added up"):
        pool.run(2, accumulate)
