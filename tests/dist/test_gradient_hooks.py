"""Hooks of the script on gradients of parameters, beside the plain script on the whole batch."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool, RankFailure

Config = dict[str, Any]
NUM_STEPS, BATCH = 3, 16
LAYOUTS: list[tuple[int, Config]] = [
    (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    (2, {"microbatches": 1, "ddp": True}),
    (4, {"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True}),
]
PIECES: list[tuple[Config, str]] = [
    ({"shard_optimizer_state": True}, "each rank updates pieces"),
    ({"sharded_data_parallel_degree": 2}, "each rank updates pieces"),
    ({"update_in_backward": True, "microbatches": 1}, "update_in_backward applies gradients"),
]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    sizes = [6, 16, 16, 16, 3]
    layers = [nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)]
    parts = [part for layer in layers for part in (layer, nn.Tanh())]
    return nn.Sequential(*parts[:-1])


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(BATCH, size, generator=generator) for size in (6, 3))
    return x, y


def clip(grad: Tensor) -> Tensor:
    return grad.clamp(-0.01, 0.01)


def normalize(grad: Tensor) -> Tensor:
    return 0.1 * grad / grad.norm()


def clip_accumulated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clamp(-0.01, 0.01)


class Once:
    """A hook that removes itself and counts its calls."""

    def __init__(self, parameter: Tensor) -> None:
        self.num_calls = 0
        self._handle = parameter.register_hook(self)

    def __call__(self, grad: Tensor) -> Tensor:
        self.num_calls += 1
        self._handle.remove()
        return clip(grad)


def hook(model: nn.Module, kind: str) -> list[Once]:
    once = []
    for parameter in model.parameters():
        if kind == "after":
            parameter.register_post_accumulate_grad_hook(clip_accumulated)
        elif kind == "once":
            once.append(Once(parameter))
        else:
            parameter.register_hook({"clip": clip, "halve": lambda g: g / 2}.get(kind, normalize))
            if kind == "two":
                parameter.register_hook(clip)
    return once


def plain(kind: str, num_passes: int, dtype: torch.dtype) -> dict[str, Tensor]:
    model = network().to(dtype)
    hook(model, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for number in range(num_passes):
            x, y = (part.to(dtype) for part in batch(10 * step + number))
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def trained(
    rank: int, config: Config, kind: str, num_passes: int, dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[int], list[str]]:
    import smp

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smp").addHandler(handler)
    smp.init(config)
    model = smp.DistributedModel(network().to(dtype))
    once = hook(model, kind)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> None:
        model.backward(nn.functional.mse_loss(model(x), y))

    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for number in range(num_passes):
            parts = (part.to(dtype).chunk(smp.dp_size()) for part in batch(10 * step + number))
            train_step(*(part[smp.dp_rank()] for part in parts))
        optimizer.step()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    logging.getLogger("smp").removeHandler(handler)
    told = [text for text in texts if "hooks on gradients" in text]
    return state, [each.num_calls for each in once], told


def compare(
    pool: Pool, size: int, config: Config, kind: str, num_passes: int = 1,
    dtype: torch.dtype = torch.float64,
) -> list[Any]:  # fmt: skip
    results = pool.run(size, trained, config, kind, num_passes, dtype)
    expected = plain(kind, num_passes, dtype)
    assert set(results[0][0]) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(results[0][0][name].to(dtype), value, msg=f"{name}: {kind}")
    return results


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("kind", ["clip", "two", "after"])
@pytest.mark.parametrize(("size", "config"), LAYOUTS)
def test_they_run_on_the_gradient_of_the_batch(
    pool: Pool, size: int, config: Config, kind: str
) -> None:
    different = plain("halve", 1, torch.float64)
    assert not torch.allclose(plain(kind, 1, torch.float64)["0.weight"], different["0.weight"])
    compare(pool, size, config, kind)


@pytest.mark.parametrize("kind", ["two", "after"])
def test_gradients_of_several_steps_are_added(pool: Pool, kind: str) -> None:
    compare(pool, 2, {"pipeline_parallel_degree": 2, "microbatches": 2}, kind, num_passes=2)


def test_a_hook_may_remove_itself_when_it_runs(pool: Pool) -> None:
    results = compare(pool, 2, {"pipeline_parallel_degree": 2, "microbatches": 2}, "once")
    assert [sum(calls) for _, calls, _ in results] == [4, 4]  # parameters of each stage


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_in_16_bits_they_get_true_gradients_in_32(pool: Pool, half: str) -> None:
    config = {"pipeline_parallel_degree": 2, "microbatches": 2, half: True}
    results = pool.run(2, trained, config, "clip", 1, torch.float32)
    expected = plain("clip", 1, torch.float32)
    for name, value in results[0][0].items():
        # Each step moves by at most 0.005, so gradients with a loss scale would show.
        torch.testing.assert_close(value.float(), expected[name], rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize(("config", "reason"), PIECES)
def test_without_whole_gradients_hooks_that_multiply_are_right_and_others_are_told(
    pool: Pool, config: Config, reason: str
) -> None:
    both = {"microbatches": 2, "ddp": True, **config}
    results = compare(pool, 2, both, "halve")
    assert [len(told) for _, _, told in results] == [1, 0]
    assert reason in results[0][2][0]
    with pytest.raises(RankFailure, match="has a hook of register_post_accumulate_grad_hook"):
        pool.run(2, trained, both, "after", 1, torch.float64)


def partly(rank: int, changes: bool) -> list[int]:
    import smp

    smp.init({"microbatches": 2, "ddp": True})
    model = smp.DistributedModel(network())
    seen: list[Tensor] = []
    if rank == 0:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: clip(grad) if changes else seen.append(grad))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> None:
        model.backward(nn.functional.mse_loss(model(x), y))

    train_step(*(part.chunk(2)[rank] for part in batch(0)))
    for grad, parameter in zip(seen, model.parameters(), strict=False):
        assert parameter.grad is not None and torch.equal(grad, parameter.grad)
    optimizer.step()
    return [len(seen)]


def test_a_hook_of_one_replica_may_look_and_not_change(pool: Pool) -> None:
    assert pool.run(2, partly, False) == [[8], [0]]
    with pytest.raises(RankFailure, match="not all replicas have as many hooks"):
        pool.run(2, partly, True)


def by_rank(rank: int) -> None:
    import smp

    smp.init({"microbatches": 2, "ddp": True})
    model = smp.DistributedModel(network())
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: (1 + rank) * grad)

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> None:
        model.backward(nn.functional.mse_loss(model(x), y))

    train_step(*(part.chunk(2)[rank] for part in batch(0)))


def test_hooks_that_depend_on_the_rank_are_refused(pool: Pool) -> None:
    with pytest.raises(RankFailure, match=r"other results on ranks \[1\] than here"):
        pool.run(2, by_rank)


def joins(rank: int, changes: bool) -> int:
    import smp

    smp.init({"microbatches": 2, "ddp": True})
    model = smp.DistributedModel(network())
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: clip(grad) if changes else seen.append(grad))

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> None:
        model.backward(nn.functional.mse_loss(model(x), y))

    with model.join():
        for step in range(1 + rank):
            train_step(*(part.chunk(2)[rank] for part in batch(step)))
            optimizer.step()
            optimizer.zero_grad()
    return len(seen)


def test_where_replicas_run_out_of_batches_hooks_may_look_and_not_change(pool: Pool) -> None:
    assert pool.run(2, joins, False) == [16, 16]  # a step without a batch of its own, too
    with pytest.raises(RankFailure, match=r"or model\.join is on"):
        pool.run(2, joins, True)


def split(rank: int, kind: str) -> list[str]:
    import smp

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("smp").addHandler(handler)
    smp.init({"microbatches": 2, "ddp": True, "tensor_parallel_degree": 2})
    with smp.tensor_parallelism():
        layers = network()
    model = smp.DistributedModel(layers)

    @smp.step
    def train_step(x: Tensor, y: Tensor) -> None:
        model.backward(nn.functional.mse_loss(model(x), y))

    train_step(*batch(0))
    hook(model, kind)
    train_step(*batch(1))
    logging.getLogger("smp").removeHandler(handler)
    return [text for text in texts if "ranks have slices (tensor parallelism)" in text]


def test_slices_of_tensor_parallelism_are_told_and_hooks_after_accumulation_refused(
    pool: Pool,
) -> None:
    assert [len(told) for told in pool.run(2, split, "halve")] == [1, 0]
    with pytest.raises(RankFailure, match=r"ranks have slices \(tensor parallelism\)"):
        pool.run(2, split, "after")
