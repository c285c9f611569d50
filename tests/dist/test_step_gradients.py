"""Gradient accumulation, scaling rules, clipping, use without a step function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.dist.training import RankRecord, Run, init, join_parts, local_parameters, make_model
from tests.harness import train_step_of
from tests.reference.data import compute_loss, make_batch
from tests.reference.models import build
from tests.reference.single_process import accumulate_gradients
from tests.reference.tolerances import assert_close

CASE = "branches"
LAYOUTS = ((2, 1), (1, 2), (2, 2))
on_layouts = pytest.mark.parametrize(("pp", "dp"), LAYOUTS)


def reference_sum(dp: int, microbatches: int, steps: int) -> dict[str, Tensor | None]:
    """Gradients of `steps` steps added up, each the mean over microbatches and replicas."""
    total: dict[str, Tensor | None] = {}
    for step in range(steps):
        model = build(CASE, torch.float64)
        batches = [make_batch(CASE, torch.float64, replica, step) for replica in range(dp)]
        accumulate_gradients(CASE, model, batches, microbatches)
        for name, p in model.named_parameters():
            before = total.get(name)
            total[name] = p.grad if before is None else before + (0 if p.grad is None else p.grad)
    return total


def start(run: Run) -> tuple[Any, Any]:

    init(run)
    model = make_model(run)
    train_step = train_step_of(model, lambda model, batch: compute_loss(CASE, model, batch))
    return model, train_step


def record_of(model: Any) -> RankRecord:
    import smp

    record = RankRecord(smp.pp_rank(), smp.dp_rank())
    record.grads = [
        {n: None if p.grad is None else p.grad.clone() for n, p in local_parameters(model).items()}
    ]
    return record


def accumulate(rank: int, run: Run, steps: int) -> RankRecord:
    import smp

    model, train_step = start(run)
    for step in range(steps):
        train_step(make_batch(CASE, run.dtype, smp.dp_rank(), step))
    return record_of(model)


@on_layouts
def test_steps_without_zero_grad_accumulate(pool: Pool, pp: int, dp: int) -> None:
    run = Run(CASE, pp, dp, manual=True)
    grads = join_parts(pool.run(run.world_size, accumulate, run, 3), run, "0")
    assert_close(grads, reference_sum(dp, 4, 3), run.dtype, "gradients of three steps")


@on_layouts
@pytest.mark.parametrize("steps", [2, 4])
def test_backward_passes_per_step_reduces_at_the_boundary(
    pool: Pool, pp: int, dp: int, steps: int
) -> None:
    run = Run(CASE, pp, dp, manual=True, model_args=(("backward_passes_per_step", 2),))
    grads = join_parts(pool.run(run.world_size, accumulate, run, steps), run, "0")
    assert_close(grads, reference_sum(dp, 4, steps), run.dtype, f"gradients of {steps} passes")


@on_layouts
def test_sum_over_microbatches_when_averaging_is_off(pool: Pool, pp: int, dp: int) -> None:
    run = Run(CASE, pp, dp, manual=True, model_args=(("average_grads_across_microbatches", False),))
    grads = join_parts(pool.run(run.world_size, accumulate, run, 1), run, "0")
    expected = {n: None if g is None else g * 4 for n, g in reference_sum(dp, 4, 1).items()}
    assert_close(grads, expected, run.dtype, "summed gradients")


def clip(rank: int, run: Run, max_norm: float) -> tuple[float, RankRecord]:
    import smp

    model, train_step = start(run)
    train_step(make_batch(CASE, run.dtype, smp.dp_rank(), 0))
    norm = smp.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm), record_of(model)


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("max_norm", [1e-2, 1e6])
@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_clipping_uses_the_norm_of_the_whole_model(
    pool: Pool, pp: int, dp: int, max_norm: float
) -> None:
    run = Run(CASE, pp, dp, manual=True)
    results = pool.run(run.world_size, clip, run, max_norm)
    model = build(CASE, run.dtype)
    accumulate_gradients(
        CASE, model, [make_batch(CASE, run.dtype, replica, 0) for replica in range(dp)], 4
    )
    expected_norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
    for norm, _ in results:
        assert abs(norm - expected_norm) <= 1e-10 * expected_norm
    grads = join_parts([record for _, record in results], run, "0")
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert_close(grads, expected, run.dtype, "clipped gradients")


def plain_autograd(rank: int, run: Run) -> RankRecord:
    import smp

    init(run)
    model = make_model(run, seed=1 + smp.dp_rank())
    compute_loss(CASE, model, make_batch(CASE, run.dtype, smp.dp_rank(), 0)).backward()
    return record_of(model)


@pytest.mark.parametrize("dp", [1, 2])
def test_plain_loop_without_step_works_without_pipeline(pool: Pool, dp: int) -> None:
    run = Run(CASE, 1, dp, microbatches=1)
    grads = join_parts(pool.run(dp, plain_autograd, run), run, "0")
    assert_close(grads, reference_sum(dp, 1, 1), run.dtype, "gradients of loss.backward()")


def scale_loss_in_place(rank: int) -> RankRecord:
    import smp

    run = Run("gpt2", 2, 1)
    init(run)
    model = make_model(run)

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> Tensor:
        loss = model(**batch)["loss"]
        loss /= 2  # as the Hugging Face Trainer does
        model.backward(loss)
        return loss

    train_step(make_batch("gpt2", run.dtype, 0, 0))
    return record_of(model)


def test_outputs_of_the_model_may_be_changed_in_place(pool: Pool) -> None:
    run = Run("gpt2", 2, 1)
    grads = join_parts(pool.run(2, scale_loss_in_place), run, "0")
    model = build("gpt2", run.dtype)
    accumulate_gradients("gpt2", model, [make_batch("gpt2", run.dtype, 0, 0)], 4)
    expected = {name: p.grad / 2 for name, p in model.named_parameters()}
    assert_close(grads, expected, run.dtype, "gradients of half the loss")


def backward_of_list(rank: int) -> RankRecord:
    import smp

    run = Run(CASE, 2, 1, manual=True)
    init(run)
    model = make_model(run)

    @smp.step
    def train_step(batch: dict[str, Tensor]) -> None:
        out = model(batch["x"])
        model.backward([out, out.square()], [torch.ones_like(out), torch.full_like(out, 0.5)])

    assert train_step(make_batch(CASE, run.dtype, 0, 0)) is None
    return record_of(model)


def test_backward_takes_lists_and_gradients(pool: Pool) -> None:
    run = Run(CASE, 2, 1, manual=True)
    grads = join_parts(pool.run(2, backward_of_list), run, "0")
    model = build(CASE, run.dtype)
    for x in make_batch(CASE, run.dtype, 0, 0)["x"].chunk(4):
        out = model(x)
        torch.autograd.backward(
            [out, out.square()], [torch.ones_like(out), torch.full_like(out, 0.5)]
        )
    expected = {n: None if p.grad is None else p.grad / 4 for n, p in model.named_parameters()}
    assert_close(grads, expected, run.dtype, "gradients of a list of tensors")


def sequence() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]).double()


def backward_of_one(rank: int, config: dict[str, Any], kind: str) -> dict[str, Tensor]:
    import smp

    smp.init({"auto_partition": False, "microbatches": 2, **config})
    net = sequence()
    model = smp.DistributedModel(net)
    if smp.pp_size() > 1:
        smp.set_partition(net[2], 1)  # what the model returns is made on another rank

    @smp.step
    def train_step(x: Tensor) -> None:
        output = model(x)
        if kind == "scalar":
            output = output.square().mean()
        gradient = torch.full_like(output, 0.5)
        model.backward(output, [gradient] if kind == "list" else gradient)

    train_step(torch.arange(24, dtype=torch.float64).reshape(4, 6))
    return {n: p.grad.clone() for n, p in model.local_named_parameters() if p.grad is not None}


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("kind", ["tensor", "list", "scalar"])
@pytest.mark.parametrize("pipeline", ["", "interleaved", "simple"])
def test_backward_takes_one_tensor_and_its_gradient(pool: Pool, pipeline: str, kind: str) -> None:
    config = {"pipeline_parallel_degree": 2, "pipeline": pipeline} if pipeline else {}
    found: dict[str, Tensor] = {}
    for part in pool.run(2 if pipeline else 1, backward_of_one, config, kind):
        found |= part
    net = sequence()
    for x in torch.arange(24, dtype=torch.float64).reshape(4, 6).chunk(2):
        output = net(x).square().mean() if kind == "scalar" else net(x)
        output.backward(torch.full_like(output, 0.5))
    expected = {name: p.grad / 2 for name, p in net.named_parameters()}
    assert_close(found, expected, torch.float64, "gradients of one tensor")
