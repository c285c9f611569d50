"""smp trains on a device whose operators run later, with the bits of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import REPO
from tests.dist.late_training import Layout, Trained, hold_back, train
from tests.dist.pool import WITHOUT_CHECKS, Pool

PIPELINE = ("pipeline_parallel_degree", 2)
AWAY = ("offload_optimizer_state", True)
OFFLOAD = ("offload_activations", True)
OFFLOAD_ALL = ("offload_activations", "all")
FIRST = {
    "pipeline": Layout((PIPELINE, OFFLOAD), 0.1, checkpointed=True, is_large=True),
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
    "one batch": Layout((("context_parallel_degree", 2),), clips=True),
    "lamb": Layout(optimizer="lamb"),
    "sgd": Layout(optimizer="sgd"),
    "experts": Layout(
        (("tensor_parallel_degree", 2), ("expert_parallel_degree", 2)),
        optimizer="sgd",
        has_experts=True,
    ),
    "scaled loss": Layout((PIPELINE,), optimizer="sgd", scales=True),
    "checkpointed pipeline": Layout((PIPELINE,), 0.1, checkpointed=True),
    "zero bubble over groups": Layout((PIPELINE, ("pipeline", "zero_bubble")), is_large=True),
    "sharded on two hosts": Layout(
        (("sharded_data_parallel_degree", 4),), num_hosts=2, world_size=4
    ),
    # Tensors that have just left for the host are needed at once.
    "offload of one microbatch": Layout(
        (OFFLOAD, ("microbatches", 1), ("activation_loading_horizon", 1)),
        0.1,
        checkpointed=True,
        is_large=True,
    ),
    "offload of all": Layout((PIPELINE, OFFLOAD_ALL, ("bf16", True)), is_large=True),
    "offload of all but checkpoints": Layout(
        (PIPELINE, OFFLOAD_ALL), 0.1, checkpointed=True, is_large=True
    ),
    "offload of all, split": Layout(
        (("tensor_parallel_degree", 2), OFFLOAD_ALL, ("fp16", True)), is_large=True
    ),
    "offload of all, backward in two": Layout(
        (PIPELINE, OFFLOAD_ALL, ("pipeline", "zero_bubble")), is_large=True
    ),
    "offload of all, updates in the backward": Layout(
        (OFFLOAD_ALL, ("update_in_backward", True), ("microbatches", 1)), is_large=True
    ),
    "offload of all, sharded": Layout(
        (OFFLOAD_ALL, ("sharded_data_parallel_degree", 2)), is_large=True
    ),
    "writes to what was sent": Layout((PIPELINE,), writes=True),
    "writes to what was sent over groups": Layout((PIPELINE,), is_large=True, writes=True),
    "moments on the host": Layout((PIPELINE, AWAY)),
    "moments on the host, BF16 and resumed": Layout(
        (("shard_optimizer_state", True), ("bf16", True), AWAY), resumes=True
    ),
    "updates in the backward": Layout((("update_in_backward", True), ("microbatches", 1))),
    "updates in the backward of a pipeline": Layout(
        (PIPELINE, ("update_in_backward", True), ("microbatches", 1), ("bf16", True))
    ),
    "compiled": Layout((PIPELINE,), compiles=True),
    "pipeline on a stream": Layout(
        (PIPELINE, OFFLOAD), checkpointed=True, is_large=True, has_own_stream=True
    ),
    "replicas on a stream": Layout(has_own_stream=True),
    "sharded on a stream": Layout((("sharded_data_parallel_degree", 2),), has_own_stream=True),
    "resumed pipeline": Layout((PIPELINE,), 0.1, resumes=True, is_large=True),
    "resumed shards": Layout((("shard_optimizer_state", True),), resumes=True, is_large=True),
}
#: Operators that have to run late.
MODEL_RUNS = ("aten::addmm", "aten::native_layer_norm_backward")
EXPERTS_RUN = ("aten::mm", "aten::_index_put_impl_")


@pytest.fixture(scope="module")
def late_pool() -> Iterator[Pool]:
    """Processes that work on the late device, whose streams pause at random."""
    if not (REPO / "python" / "smp_late.so").exists():
        pytest.skip("smp_late is built with torch 2.11")
    pool = Pool({"SMP_DEVICE": "late", "SMP_LATE_DELAY_US": "200"})
    yield pool
    pool.close()


#: Roundings where the device decides about the order of sums: over more than two ranks (Gloo, or
#: shared memory), and in grouped products of experts.
TOLERANCE = 2e-6


def assert_equal_values(
    got: dict[Any, Tensor], expected: dict[Any, Tensor], what: str, tolerance: float
) -> None:
    assert got.keys() == expected.keys(), what
    for name, value in expected.items():
        difference = (got[name] - value).abs().max().item() if value.numel() else 0.0
        assert difference <= tolerance, f"{what} {name}: largest difference {difference}"


def gradients_of(ranks: list[Trained], layout: Layout) -> dict[str, Tensor]:
    """Returns gradients by rank and name; by name where devices decide about ranks."""
    return {
        name if layout.is_automatic else f"rank {rank} {name}": gradient
        for rank, trained in enumerate(ranks)
        for name, gradient in trained.gradients.items()
    }


def assert_equal(layout: Layout, late: list[Trained], cpu: list[Trained]) -> None:
    gradients = gradients_of(cpu, layout)
    tolerance = TOLERANCE if layout.world_size > 2 or layout.has_experts else 0.0
    assert layout.is_sharded or layout.drops_gradients != bool(gradients)
    for rank, (got, expected) in enumerate(zip(late, cpu, strict=True)):
        assert (got.device, expected.device) == ("late", "cpu")
        losses = (dict(enumerate(trained.losses)) for trained in (got, expected))
        assert_equal_values(*losses, f"loss on rank {rank} of step", tolerance)
        assert_equal_values(got.parameters, expected.parameters, f"rank {rank}:", tolerance)
        assert not got.lanes or got.lanes == {"nccl"}, got.lanes
        assert (got.num_offloaded > 0) == layout.offloads
        assert (len(got.pieces) >= 3 and min(got.pieces) > 3) == layout.offloads_state
        if layout.is_large and got.lanes:
            assert (
                got.copied_bytes > got.message_bytes > 0
            )  # messages have what the host lane carries
        for operator in EXPERTS_RUN if layout.has_experts else MODEL_RUNS:
            assert got.late.get(operator, 0) > 0, (rank, operator, got.late)
    assert_equal_values(gradients_of(late, layout), gradients, "gradient of", tolerance)


def check(layout: Layout, pool: Pool, late_pool: Pool, folder: Path) -> None:
    """Trains on both devices, and compares."""
    environments = {
        kind: {**WITHOUT_CHECKS, "SMP_TEST_FOLDER": str(folder / kind)} for kind in ("late", "cpu")
    }
    trained = [
        which.run(layout.world_size, train, layout, env=environments[kind])
        for kind, which in (("late", late_pool), ("cpu", pool))
    ]
    assert_equal(layout, *trained)


@pytest.mark.sample(keep=2)
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


def peak_bytes(rank: int, offload: bool | str) -> tuple[int, list[Tensor], int]:
    """Returns the largest memory of a third step over what is there before, and gradients."""
    import smp
    import tests.dist.on_late  # noqa: F401
    from smp import _C
    from smp.world import runtime
    from tests.dist.late_training import LARGE_WIDTH, Block

    smp.init({"offload_activations": offload, "activation_loading_horizon": 1})
    current = runtime.current()
    device = current.rank.device
    if offload:
        current._activation_store = _C.ActivationStore(str(device), horizon=1, group_bytes=1 << 20)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Block(LARGE_WIDTH, 0.1) for _ in range(8)))
    model = smp.DistributedModel(net)

    @smp.step
    def train_step(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    late = torch.get_device_module("late")
    x = torch.randn(4096, LARGE_WIDTH).to(device)
    for _ in range(3):
        model.zero_grad()
        late.synchronize()
        late.reset_peak_memory_stats()
        before = late.memory_allocated()
        train_step(x)
    peak = late.max_memory_allocated() - before
    gradients = [p.grad.cpu() for p in net.parameters() if p.grad is not None]
    return peak, gradients, smp.metrics.offload_stats().get("bytes_offloaded", 0)


@pytest.mark.sample(keep=0)
def test_offloading_all_takes_less_memory_and_no_bit(late_pool: Pool) -> None:
    ((most, expected, _),) = late_pool.run(1, peak_bytes, False, env=WITHOUT_CHECKS)
    ((least, gradients, num_bytes),) = late_pool.run(1, peak_bytes, "all", env=WITHOUT_CHECKS)
    assert expected and all(map(torch.equal, gradients, expected))
    # Eight blocks keep eleven tensors of 1 MiB each; a few groups are on the device at once.
    assert num_bytes > 3 * 8 * 8 << 20
    assert most > 80 << 20 and least < most / 2, (most, least)


def train_on_other_batches(rank: int) -> tuple[str, bool]:
    """Returns the error of a step with a batch of its own, and whether gradients are reduced."""
    import smp
    import tests.dist.on_late  # noqa: F401

    smp.init({"context_parallel_degree": 2, "ddp": True})
    device = torch.device("late", smp.local_rank())
    model = smp.DistributedModel(torch.nn.Linear(4, 4).to(device))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    train_step(torch.ones(2, 4).to(device))
    model.zero_grad()
    with pytest.raises(ValueError, match="context_parallel_degree") as error:
        train_step(torch.full((2, 4), float(rank)).to(device))
    return str(error.value), any(p.grad is not None for p in model.local_parameters())


def test_other_batches_on_the_device_are_refused_when_the_step_ends(late_pool: Pool) -> None:
    for text, has_gradients in late_pool.run(2, train_on_other_batches):
        assert "argument 'x' (float32 [2, 4]) has other values on global rank 1" in text
        assert not has_gradients


def copy_for_a_save(rank: int) -> float:
    """Returns what a save in the background copies while the update is still queued."""
    import tests.dist.on_late  # noqa: F401
    from smp.checkpoint.staging import LaterCopies, _Pair

    values = torch.zeros(1 << 15, device=f"late:{rank}")
    torch.get_device_module("late").set_device(values.device)
    hold_back(values.device)
    values.fill_(1.0)
    place = torch.zeros(1 << 15)
    LaterCopies([_Pair(values, place, values._version)]).make()
    return place.min().item()


@pytest.mark.sample(keep=0)
def test_a_save_copies_what_the_step_has_written(late_pool: Pool) -> None:
    assert late_pool.run(2, copy_for_a_save) == [1.0, 1.0]
