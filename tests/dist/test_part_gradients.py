"""Scripts that compute with gradients themselves: norms, clipping, updates by hand."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure
from tests.harness import (
    Config,
    Heard,
    Layers,
    assert_near,
    layouts,
    own_loss,
    own_samples,
    samples_of,
    train_step_of,
    wholes,
    wrapped,
)

STEPS = 4
DIVIDED = layouts("pipeline", "split", "split, one batch", "pipeline of replicas")
WHOLE = layouts("one", "replicas")
CUT = layouts("sharded state", "sharded")


def own_norm(parameters: Any) -> Tensor:
    grads = [p.grad for p in parameters if p.grad is not None]
    return torch.stack([grad.norm() for grad in grads]).norm()


# ---- loops that scripts have; each gets the parameters, and a function for the norm -------------


def clip_items(parameters: list[Any], norm: Callable[..., Any]) -> None:
    total = float(norm(parameters))
    for p in parameters:
        if p.grad is not None and total > 0.05:
            p.grad.data.mul_(0.05 / (total + 1e-6))


def clip_foreach(parameters: list[Any], norm: Callable[..., Any]) -> None:
    factor = (0.05 / (norm(parameters) + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)


def clip_assigned(parameters: list[Any], norm: Callable[..., Any]) -> None:
    factor = 0.05 / (norm(parameters) + 1e-6)
    for p in parameters:
        if p.grad is not None:
            p.grad = p.grad * factor


def clip_data(parameters: list[Any], norm: Callable[..., Any]) -> None:
    factor = 0.05 / (norm(parameters) + 1e-6)
    for p in parameters:
        if p.grad is not None:
            p.grad.data = p.grad.data * factor


LOOPS = {
    "items": clip_items,
    "foreach": clip_foreach,
    "assigned": clip_assigned,
    "data": clip_data,
}


def half_the_head(parameters: list[Any], norm: Any) -> None:
    """Another factor for some parameters, which does not depend on values."""
    for p in parameters[-2:]:
        if p.grad is not None:
            p.grad.mul_(0.5)


def signs(parameters: list[Any], norm: Any) -> None:
    """Element by element."""
    for p in parameters:
        if p.grad is not None and p.grad.shape[0] == p.shape[0]:
            p.grad = torch.sign(p.grad).clone() + 0.1 * p.grad.clamp_(-1, 1)


def nothing(parameters: list[Any], norm: Any) -> None:
    for p in parameters:
        if p.grad is not None and norm is None:
            p.grad.detach_()


def by_hand(parameters: list[Any], norm: Any) -> None:
    with torch.no_grad():
        for p in parameters:
            if p.grad is not None:
                p.sub_(0.1 * p.grad)
                p.data.add_(p.grad, alpha=-0.1)


def clipped_by_hand(parameters: list[Any], norm: Callable[..., Any]) -> None:
    total = float(norm(parameters))
    for p in parameters:
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.1 / total)


@torch.no_grad()
def sam_by_hand(parameters: list[Any], norm: Callable[..., Any]) -> None:
    """The first step of SAM."""
    scale = 0.05 / norm(parameters)
    for p in parameters:
        if p.grad is not None:
            p.add_(p.grad * scale)


HARMLESS = {"head": half_the_head, "signs": signs, "nothing": nothing, "by hand": by_hand}
DOES = {**LOOPS, **HARMLESS, "clipped by hand": clipped_by_hand, "SAM by hand": sam_by_hand}


def reference(does: str) -> dict[str, Tensor]:
    net = Layers(has_loss=True).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        net(samples_of(step)).backward()
        DOES[does](list(net.parameters()), own_norm)
        if "hand" not in does:
            optimizer.step()
    return dict(net.state_dict())


def train(
    rank: int, config: Config, does: str, norm: str, wraps: bool = True, steps: int = STEPS
) -> Any:
    import smp

    heard = Heard("computes a number")
    dtype = torch.float32 if "bf16" in config else torch.float64
    model = wrapped(config, Layers(has_loss=True).to(dtype))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if wraps:
        optimizer = smp.DistributedOptimizer(optimizer)

    train_step = train_step_of(model, own_loss)
    for step in range(steps):
        optimizer.zero_grad()
        if "hand" in does:
            model.zero_grad()
        train_step(own_samples(step, dtype))
        DOES[does](list(model.parameters()), own_norm if norm == "own" else smp.grad_norm)
        if "hand" not in does:
            optimizer.step()
    logging.getLogger("smp").removeHandler(heard)
    return wholes(model), heard.texts


@pytest.mark.parametrize("does", LOOPS)
@pytest.mark.parametrize("layout", DIVIDED)
def test_a_clipping_loop_by_the_norm_of_a_part_is_an_error(
    pool: Pool, layout: str, does: str
) -> None:
    size, config = DIVIDED[layout]
    words = r"disagree on the factor by which the script has multiplied gradients in the step"
    with pytest.raises(RankFailure, match=words + r".* test_part_gradients|" + words) as failure:
        pool.run(size, train, config, does, "own", does == "items")
    assert "after " in str(failure.value) and "smp.clip_grad_norm_(model" in str(failure.value)


def test_the_last_clipping_is_compared_where_the_state_is_taken(pool: Pool) -> None:
    words = r"has multiplied gradients in the step before model\.state_dict, after .*:\d+ has"
    with pytest.raises(RankFailure, match=words):
        pool.run(2, train, {"pipeline_parallel_degree": 2}, "foreach", "own", True, 1)


def test_in_16_bits_an_assigned_gradient_is_compared(pool: Pool) -> None:
    config = {"pipeline_parallel_degree": 2, "bf16": True}
    with pytest.raises(RankFailure, match="disagree on the factor by which the script"):
        pool.run(2, train, config, "assigned", "own")
    pool.run(2, train, config, "assigned", "global")


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("does", [*LOOPS, *HARMLESS])
@pytest.mark.parametrize("layout", [*WHOLE, *DIVIDED])
def test_loops_by_the_global_norm_and_by_elements_are_those_of_one_process(
    pool: Pool, layout: str, does: str
) -> None:
    size, config = {**WHOLE, **DIVIDED}[layout]
    expected = reference(does)
    for values, told in pool.run(size, train, config, does, "global"):
        assert told == []
        assert_near([values], expected)


@pytest.mark.parametrize("does", ["clipped by hand", "SAM by hand"])
@pytest.mark.parametrize("layout", DIVIDED)
def test_an_update_by_hand_with_the_norm_of_a_part_is_refused(
    pool: Pool, layout: str, does: str
) -> None:
    size, config = DIVIDED[layout]
    with pytest.raises(RankFailure, match="parameters are changed with their gradients after"):
        pool.run(size, train, config, does, "own")
    expected = reference(does)
    for values, _ in pool.run(size, train, config, does, "global"):
        assert_near([values], expected)


@pytest.mark.parametrize("layout", [*WHOLE, *CUT])
def test_whole_gradients_may_be_clipped_by_a_loop(pool: Pool, layout: str) -> None:
    size, config = {**WHOLE, **CUT}[layout]
    if layout in CUT:
        pool.run(size, train, config, "nothing", "own")
        return
    expected = reference("items")
    for values, told in pool.run(size, train, config, "items", "own"):
        assert told == []
        assert_near([values], expected)


# ---- what is told ------------------------------------------------------------------------------


def look(rank: int, config: Config, masters: bool) -> Any:
    import smp

    heard = Heard("computes a number")
    model = wrapped(config, Layers(has_loss=True))
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    train_step = train_step_of(model, own_loss)
    same, norms = True, []
    for step in range(STEPS):
        optimizer.zero_grad()
        train_step(samples_of(step).float())
        listed = optimizer.param_groups[0]["params"] if masters else list(model.parameters())
        norms.append((float(own_norm(listed)), float(smp.grad_norm(model.parameters()))))
        for p in listed:
            if p.grad is not None and p.grad.numel():
                same = same and p.grad is p.grad and isinstance(p.grad, Tensor)
                plain = copy.deepcopy(p.grad), pickle.loads(pickle.dumps(p.grad))
                same = same and type(plain[1]) is Tensor and torch.equal(plain[1], p.grad)
        optimizer.step()
    logging.getLogger("smp").removeHandler(heard)
    before = vars(nn.Parameter).get("grad")
    smp.shutdown()
    return heard.texts, norms, same, before is not None, "grad" in vars(nn.Parameter)


@pytest.mark.parametrize(
    ("config", "masters"),
    [
        ({"pipeline_parallel_degree": 2}, False),
        ({"pipeline_parallel_degree": 2, "bf16": True}, False),
        ({"pipeline_parallel_degree": 2, "bf16": True}, True),
        ({"shard_optimizer_state": True}, True),
        ({"sharded_data_parallel_degree": 2}, True),
    ],
)
def test_a_number_of_a_part_is_told_once_a_line(pool: Pool, config: Config, masters: bool) -> None:
    first, second = pool.run(2, look, config, masters)
    assert len(first[0]) == 1 and second[0] == []
    assert all("test_part_gradients.py:" in text and "smp.grad_norm" in text for text in first[0])
    for own, other in zip(first[1], second[1], strict=True):
        assert own[1] == other[1] == pytest.approx(math.hypot(own[0], other[0]), rel=0.02)
        assert own[0] != other[0]
    for _, _, same, inside, after in (first, second):
        assert same and inside and not after


# ---- updates by hand where there is no gradient ------------------------------------------------


def train_by_hand(rank: int, config: Config, how: str) -> None:
    import smp

    smp.init({"ddp": True, "microbatches": 2, **config})
    model = smp.DistributedModel(Layers(has_loss=True).double())
    optimizer = None
    if how != "sgd":
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    train_step = train_step_of(model, own_loss)
    for step in range(STEPS):
        model.zero_grad()
        train_step(samples_of(step))
        if how in ("sgd", "sam"):
            for p in model.parameters():
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-0.1)
        if how == "sam":
            model.zero_grad()
            train_step(samples_of(step))
        if optimizer is not None:
            optimizer.step()
        if how == "zeroes":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()


@pytest.mark.parametrize("how", ["sgd", "sam"])
@pytest.mark.parametrize("layout", CUT)
def test_an_update_by_hand_without_gradients_is_refused(pool: Pool, layout: str, how: str) -> None:
    size, config = CUT[layout]
    words = r"test_part_gradients.py:\d+ has read .grad of the model's parameters, which is None"
    with pytest.raises(RankFailure, match=words):
        pool.run(size, train_by_hand, config, how)


@pytest.mark.parametrize("layout", CUT)
def test_loops_that_reset_gradients_are_not_refused(pool: Pool, layout: str) -> None:
    size, config = CUT[layout]
    pool.run(size, train_by_hand, config, "zeroes")
