"""smp trains on a device whose operators run later, with the bits of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.conftest import REPO
from tests.dist.late_training import Layout, Trained, train
from tests.dist.pool import WITHOUT_CHECKS, Pool

PIPELINE = ("pipeline_parallel_degree", 2)
OFFLOAD = ("offload_activations", True)
FIRST = {
    "pipeline": Layout((PIPELINE, OFFLOAD), 0.1, checkpointed=True),
    "replicas": Layout(clips=True),
    "sharded state": Layout((("shard_optimizer_state", True),)),
}
OTHERS = {
    "plain pipeline": Layout((PIPELINE,)),
    "simple": Layout((PIPELINE, ("pipeline", "simple"))),
    "virtual": Layout((PIPELINE, ("pipeline", "virtual_interleaved"), ("auto_partition", True))),
    "zero bubble": Layout((PIPELINE, ("pipeline", "zero_bubble"))),
    "split": Layout((("tensor_parallel_degree", 2),)),
    "split, one batch": Layout((("tensor_parallel_degree", 2), ("prescaled_batch", True))),
    "sharded": Layout((("sharded_data_parallel_degree", 2), ("sdp_gradient_clipping", 0.1))),
    "bf16 pipeline": Layout((PIPELINE, ("bf16", True)), clips=True),
    "fp16 replicas": Layout((("fp16", True),), clips=True),
    "lamb": Layout(optimizer="lamb"),
    "sgd": Layout(optimizer="sgd"),
    "resumed pipeline": Layout((PIPELINE,), 0.1, resumes=True),
    "resumed shards": Layout((("shard_optimizer_state", True),), resumes=True),
}


@pytest.fixture(scope="module")
def late_pool() -> Iterator[Pool]:
    """Processes that work on the late device, whose streams pause at random."""
    if not (REPO / "python" / "smp_late.so").exists():
        pytest.skip("smp_late is built with torch 2.11")
    pool = Pool({"SMP_DEVICE": "late", "SMP_LATE_DELAY_US": "200"})
    yield pool
    pool.close()


def assert_equal_bits(got: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert got.keys() == expected.keys(), what
    for name, value in expected.items():
        assert torch.equal(got[name], value), (
            f"{what} {name}: largest difference {(got[name] - value).abs().max()}"
        )


def gradients_of(ranks: list[Trained], layout: Layout) -> dict[str, Tensor]:
    """Returns gradients by rank and name; by name where devices decide about ranks."""
    return {
        name if layout.is_automatic else f"rank {rank} {name}": gradient
        for rank, trained in enumerate(ranks)
        for name, gradient in trained.gradients.items()
    }


def assert_equal(layout: Layout, late: list[Trained], cpu: list[Trained]) -> None:
    gradients = gradients_of(cpu, layout)
    assert layout.is_sharded or gradients
    for rank, (got, expected) in enumerate(zip(late, cpu, strict=True)):
        assert (got.device, expected.device) == ("late", "cpu")
        assert [t.tolist() for t in got.losses] == [t.tolist() for t in expected.losses], rank
        assert_equal_bits(got.parameters, expected.parameters, f"value on rank {rank} of")
        for operator in ("aten::addmm", "aten::native_layer_norm_backward"):
            assert got.late.get(operator, 0) > 0, (rank, operator, got.late)
    assert_equal_bits(gradients_of(late, layout), gradients, "gradient of")


def check(layout: Layout, pool: Pool, late_pool: Pool, folder: Path) -> None:
    """Trains on both devices, and compares."""
    trained = [
        which.run(2, train, layout, env={**WITHOUT_CHECKS, "SMP_TEST_FOLDER": str(folder / kind)})
        for kind, which in (("late", late_pool), ("cpu", pool))
    ]
    assert_equal(layout, *trained)


@pytest.mark.sample(keep=3)
@pytest.mark.parametrize("name", FIRST)
def test_training_has_the_bits_of_the_cpu(
    name: str, pool: Pool, late_pool: Pool, tmp_path: Path
) -> None:
    check(FIRST[name], pool, late_pool, tmp_path)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("name", OTHERS)
def test_other_layouts_have_them_too(
    name: str, pool: Pool, late_pool: Pool, tmp_path: Path
) -> None:
    check(OTHERS[name], pool, late_pool, tmp_path)
