"""Ranks that split the sequences of one batch refuse to train on several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.dist.pool import Pool
from tests.patience import PATIENCE_S

SAMPLES = torch.arange(64.0).reshape(16, 4)


def make_step() -> tuple[Any, Any]:
    import smp

    torch.manual_seed(3)
    model = smp.DistributedModel(nn.Linear(4, 4))

    @smp.step
    def train_step(x: Any, more: Any = None) -> Any:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return model, train_step


def train_with_sampler(rank: int, config: dict[str, Any], kind: str) -> tuple[str, bool]:
    """Returns the error of an epoch in words, and whether parameters have gradients then."""
    import smp

    smp.init({"context_parallel_degree": 2, "ddp": True, "microbatches": 2, **config})
    num, own = {
        "world": (smp.size(), smp.rank()),
        "dp": (smp.dp_size(), smp.dp_rank()),
        "other seed": (smp.dp_size(), smp.dp_rank()),
    }[kind]
    seed = smp.rank() if kind == "other seed" else 0
    data = TensorDataset(SAMPLES)
    sampler = DistributedSampler(data, num, own, seed=seed)
    model, train_step = make_step()
    try:
        for (x,) in DataLoader(data, batch_size=4, sampler=sampler):
            train_step(x)
    except (ValueError, smp.PeerFailure) as error:
        return str(error), any(p.grad is not None for p in model.local_parameters())
    return "", any(p.grad is not None for p in model.local_parameters())


@pytest.mark.parametrize("kind", ["world", "other seed"])
def test_a_sampler_that_gives_each_rank_other_samples_is_refused_on_all(
    pool: Pool, kind: str
) -> None:
    results = pool.run(2, train_with_sampler, {}, kind)
    for rank, (text, has_trained) in enumerate(results):
        assert text.startswith(f"[global_rank {rank} | pp 0 tp 0 cp {rank} rdp 0] step "), text
        assert "argument 'x' (float32 [4, 4]) has other values on global rank 1 than" in text
        assert "num_replicas=smp.dp_size() and rank=smp.dp_rank()" in text
        assert not has_trained


def test_the_sampler_of_data_parallel_ranks_is_accepted(pool: Pool) -> None:
    assert pool.run(4, train_with_sampler, {}, "dp") == [("", True)] * 4


def test_a_pipeline_fails_as_a_whole(pool: Pool) -> None:
    config = {"pipeline_parallel_degree": 2, "auto_partition": False}
    results = pool.run(4, train_with_sampler, config, "world", timeout=PATIENCE_S)
    texts = [text for text, _ in results]
    assert all("has other values on global rank" in text for text in texts), texts


def call(rank: int, arguments: list[tuple[Any, Any]]) -> str:
    """Calls a step function twice; the second call has the arguments of the rank."""
    import smp

    smp.init({"context_parallel_degree": len(arguments), "ddp": True})
    _, train_step = make_step()
    train_step(SAMPLES, arguments[0][1])
    with pytest.raises(ValueError, match="context_parallel_degree") as error:
        train_step(*arguments[rank])
    return str(error.value)


EQUAL = SAMPLES[:4]
FLIPPED = EQUAL.flip(0)
ARGUMENTS: dict[str, tuple[list[tuple[Any, Any]], str]] = {
    "order": ([(EQUAL, 0), (FLIPPED, 0)], "'x' (float32 [4, 4]) has other values on global rank 1"),
    "shape": (
        [(EQUAL, 0), (EQUAL[:2], 0)],
        "'x' is float32 [4, 4] on global rank 0, float32 [2, 4] on global rank 1",
    ),
    "number": (
        [(EQUAL, {"scale": 2.0}), (EQUAL, {"scale": 2.5})],
        "'more.scale' is 2.0 on global rank 0, 2.5 on global rank 1",
    ),
    "one of three": (
        [(EQUAL, "a"), (EQUAL, "b"), (EQUAL, "a")],
        "'more' is 'a' on global ranks 0, 2, 'b' on global rank 1",
    ),
    "inner tensor": (
        [(EQUAL, [torch.tensor([1, 2]), 0]), (EQUAL, [torch.tensor([1, 3]), 0])],
        "'more.0' (int64 [2]) has other values on global rank 1",
    ),
    "missing": ([(EQUAL, {"a": 1}), (EQUAL, {})], "'more.a' is 1 on global rank 0, missing on"),
}


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_step_compares_all_arguments(pool: Pool, name: str) -> None:
    arguments, words = ARGUMENTS[name]
    for text in pool.run(len(arguments), call, arguments):
        assert f"argument {words}" in text


def evaluate(rank: int) -> str:
    import smp

    smp.init({"context_parallel_degree": 2, "ddp": True})
    _, train_step = make_step()
    train_step(EQUAL)

    @smp.step
    def look(x: Any) -> Any:
        return x.sum()

    with torch.no_grad(), pytest.raises(ValueError, match="other values") as error:
        look(EQUAL if rank == 0 else FLIPPED)
    return str(error.value)


def test_evaluation_compares_them_too(pool: Pool) -> None:
    assert all("argument 'x' (float32" in text for text in pool.run(2, evaluate))


def call_alike(rank: int) -> float:
    import numpy as np

    import smp

    smp.init({"context_parallel_degree": 2, "ddp": True})
    _, train_step = make_step()
    more = {
        "device": f"cuda:{rank}",  # the words of a device are no data
        "nothing": None,
        "names": {"b", "a", f"{1}"},
        "not a number": float("nan"),
        "array": np.arange(3),
        "object": object(),
        "complex": torch.ones(3, dtype=torch.complex64).conj(),
        "half": torch.ones(5, dtype=torch.bfloat16)[::2],
    }
    return float(train_step(EQUAL, more).reduce_mean())


def test_equal_arguments_of_any_kind_are_accepted(pool: Pool) -> None:
    first, second = pool.run(2, call_alike)
    assert first == second > 0
