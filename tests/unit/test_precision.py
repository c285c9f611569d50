"""16-bit training in one process: casts, masters, the optimizer's interface."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp.precision import cast_outputs
from smp.precision.holdings import holding_of
from tests.harness import train_step_of

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def make(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **arguments: Any
) -> tuple[Any, smp.DistributedOptimizer, Callable[[], Tensor]]:
    """Model, optimizer, and a function that runs one step without the update."""
    model = smp.DistributedModel(make_model())
    optimizer = smp.DistributedOptimizer(kind(model.parameters(), lr=0.1), **arguments)
    train_step = train_step_of(model)

    def run() -> Tensor:
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
        return train_step(x).outputs[0]

    return model, optimizer, run


# ---- the model -------------------------------------------------------------


@pytest.mark.parametrize("key", ["fp16", "bf16"])
def test_the_model_is_cast_and_masters_keep_what_was_there(start: Any, key: str) -> None:
    start(**{key: True})
    plain = make_model()
    plain[0].bias.requires_grad_(False)
    before = copy.deepcopy(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    parameters = list(plain.parameters())
    model = smp.DistributedModel(plain)
    assert [id(p) for p in plain.parameters()] == [id(p) for p in parameters]
    assert all(p.dtype == HALVES[key] for p in plain.parameters())
    for name, buffer in plain.named_buffers():
        assert buffer.dtype == before[name].dtype and torch.equal(buffer, before[name]), name
    for name, parameter in plain.named_parameters():
        holding = holding_of(parameter)
        assert (holding is None) == (name == "0.bias")
        if holding is not None:
            assert torch.equal(holding.master, before[name]) and holding.has_copy
            assert holding.piece.data_ptr() == parameter.data_ptr()
    wrapped = smp.DistributedOptimizer(optimizer)  # made before the model was wrapped
    assert wrapped.fp16_groups == [[p for p in parameters if p.requires_grad]]
    assert all(p.dtype == torch.float32 for p in wrapped.fp32_from_fp16_groups[0])
    assert [id(p) for p in wrapped.fp32_from_fp32_groups[0]] == [id(plain[0].bias)]
    assert model(torch.ones(2, 5)).dtype == torch.float32


def test_an_optimizer_may_be_wrapped_before_the_model(start: Any) -> None:
    start(bf16=True)
    plain = make_model()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=0.1))
    assert not optimizer.master_params_created and optimizer.param_groups[0]["params"][0].is_leaf
    smp.DistributedModel(plain)
    assert optimizer.master_params_created
    assert optimizer.param_groups[0]["params"][0] is holding_of(plain[0].weight).master


def test_state_that_an_optimizer_has_already_moves_to_masters(start: Any) -> None:
    start(bf16=True)
    plain = make_model()
    inner = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    plain(torch.ones(2, 5)).sum().backward()
    inner.step()
    momentum = inner.state[plain[2].weight]["momentum_buffer"].clone()
    smp.DistributedModel(plain)
    smp.DistributedOptimizer(inner)
    master = holding_of(plain[2].weight).master
    assert torch.equal(inner.state[master]["momentum_buffer"], momentum)
    assert plain[2].weight not in inner.state


@pytest.mark.parametrize("key", ["fp16", "bf16"])
def test_models_in_double_precision_are_refused(start: Any, key: str) -> None:
    start(**{key: True})
    with pytest.raises(ValueError, match=rf"smp config: {key}=True: .*'0.weight'.*torch.float64"):
        smp.DistributedModel(make_model().double())


def test_a_model_made_in_16_bits_has_masters_of_these_values(start: Any) -> None:
    start(fp16=True)
    plain = make_model().half()
    before = plain[0].weight.detach().clone()
    smp.DistributedModel(plain)
    master = holding_of(plain[0].weight).master
    assert master.dtype == torch.float32 and torch.equal(master, before.float())


def test_dtypes_of_a_wrapped_model(start: Any) -> None:
    start(fp16=True)
    model = smp.DistributedModel(make_model())
    assert model.half() is model and model.to(torch.float16) is model
    for change in (model.float, model.bfloat16, lambda: model.to(torch.float64)):
        with pytest.raises(RuntimeError, match="dtype of a partitioned model"):
            change()
    # Scripts reach the user's module through one level more than otherwise.
    assert model.module.module.module is model.get_module()


def test_a_model_without_masters_can_change_its_dtype(start: Any) -> None:
    start()
    model = smp.DistributedModel(make_model())
    model.double()
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())
    assert model.half().get_module()[0].weight.dtype == torch.float16


def test_fp16_params_makes_distributed_modules_in_16_bits(start: Any) -> None:
    start(fp16_params=True)
    with smp.tensor_parallelism():
        linear = nn.Linear(4, 4)
    root = nn.Sequential(linear, nn.Linear(4, 4))
    module = smp.DistributedModel(root).get_module()
    assert isinstance(module[0], smp.nn.DistributedLinear)
    assert module[0].weight.dtype == torch.float16 and module[1].weight.dtype == torch.float32


def test_casts_of_outputs_reach_tensors_in_containers_and_leave_the_rest() -> None:
    ids, x = torch.ones(2, dtype=torch.long), torch.ones(2)
    out = cast_outputs({"a": (x.half(), None), "b": x.bfloat16(), "c": x.double(), "d": ids})
    assert out["a"][0].dtype == out["b"].dtype == torch.float32 and out["a"][1] is None
    assert out["c"].dtype == torch.float64 and out["d"] is ids


# ---- the loss --------------------------------------------------------------


def test_a_backward_without_the_loss_scale_is_refused(start: Any) -> None:
    start(fp16=True)
    model, optimizer, _ = make(static_loss_scale=64.0)
    loss = model(torch.ones(2, 5)).sum()
    with pytest.raises(RuntimeError, match=r"call model.backward\(loss\)"):
        loss.backward()
    optimizer.backward(model(torch.ones(2, 5)).sum())
    assert optimizer.inspect_master_grad_data() is not None


def test_plain_loops_work(start: Any) -> None:
    start(fp16=True)
    results = []
    for scale in (1.0, 256.0):
        model, optimizer, _ = make(torch.optim.SGD, static_loss_scale=scale)
        for _ in range(3):
            loss = model(torch.ones(2, 5) * torch.tensor([[1.0], [2.0]])).square().mean()
            if scale == 1.0:
                loss.backward()  # nothing to scale
            else:
                model.backward(loss)
            assert optimizer.clip_master_grads(100.0) > 0
            optimizer.step()
            model.zero_grad()
            assert all(p.grad is None for group in optimizer.param_groups for p in group["params"])
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_zero_grad_clears_masters(start: Any) -> None:
    start(bf16=True)
    model, optimizer, run = make()
    masters = optimizer.fp32_from_fp16_groups[0]
    for clear in (model.zero_grad, optimizer.zero_grad):
        run()
        assert all(p.grad is not None for p in masters)
        clear(set_to_none=False)
        assert all(p.grad is not None and not p.grad.any() for p in masters)
        run()
        clear(set_to_none=True)
        assert all(p.grad is None for p in masters)


# ---- the optimizer ---------------------------------------------------------


def test_members_of_fp16_optimizers(start: Any) -> None:
    start(fp16=True)
    model, optimizer, run = make(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 8.0})
    assert optimizer.loss_scale == optimizer.loss_scaler.loss_scale == 8.0
    optimizer.loss_scale = 16
    assert optimizer.loss_scaler.loss_scale == 16.0 and optimizer.loss_scaler.is_dynamic
    run()
    scaled = optimizer.fp32_from_fp16_groups[0][0].grad.clone()
    grads = optimizer.inspect_master_grad_data()
    torch.testing.assert_close(grads[0][0], scaled / 16)
    optimizer.update_master_grads()
    torch.testing.assert_close(grads[0][0], scaled / 16)  # once
    half, master = optimizer.fp16_groups[0][0], optimizer.fp32_from_fp16_groups[0][0]
    assert optimizer.fp32paramid_from_fp16paramid[id(half)] == id(master)
    assert optimizer.fp32_from_fp16_paramid_groups[0][0] == id(master)
    assert optimizer.master_is_distributed[id(master)] is False
    assert optimizer.master_distribution_axis[id(master)] is None
    assert optimizer.master_params_created and optimizer.first_closure_call_this_step
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.fp32_from_fp32_groups[1][0] is extra


def test_loss_scales_have_no_effect_in_other_precisions(start: Any) -> None:
    start(bf16=True)
    _, optimizer, run = make(static_loss_scale=1024.0, dynamic_loss_scale=True)
    run()
    assert optimizer.loss_scale == 1.0 and optimizer.overflow is False
    assert not optimizer.loss_scaler.is_dynamic


def test_masters_are_reloaded_without_losing_precision(start: Any) -> None:
    start(bf16=True)
    model, optimizer, _ = make()
    weight = model.get_module()[0].weight
    master = holding_of(weight).master
    before = master.detach().clone()
    optimizer.reload_model_params()
    assert torch.equal(master, before), "16 bits agree with the master"
    with torch.no_grad():
        weight[0, 0] = 3.0
    optimizer.reload_model_params()
    assert master[0, 0] == 3.0 and torch.equal(master[1:], before[1:])
    model.load_state_dict(
        {name: value.float() for name, value in make_model().state_dict().items()}
    )
    assert torch.equal(master, before), "a state in float32 is taken as it is"


def test_closures(start: Any) -> None:
    start(fp16=True)
    model, optimizer, run = make(torch.optim.LBFGS, static_loss_scale=32.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        return run()

    first = float(closure())
    for _ in range(2):
        optimizer.step(closure)
    assert float(closure()) < 0.5 * first
    weight = model.get_module()[0].weight
    assert torch.equal(weight, holding_of(weight).master.half())
    _, dynamic, _ = make(dynamic_loss_scale=True)
    with pytest.raises(ValueError, match="closure"):
        dynamic.step(lambda: None)


def test_a_closure_that_overflows_raises(start: Any) -> None:
    start(fp16=True)
    _, optimizer, run = make(torch.optim.SGD, static_loss_scale=2.0**60)
    with pytest.raises(RuntimeError, match="smaller static_loss_scale"):
        optimizer.step(run)


@pytest.mark.parametrize("key", ["fp16", "bf16", "ddp"])
def test_fused_optimizers_divide_by_themselves(start: Any, key: str) -> None:
    start(**{key: True})
    results = []
    makers: list[Any] = [torch.optim.AdamW, torch.optim.AdamW, smp.optimizers.FusedAdam]
    for maker, fused in zip(makers, (False, True, True), strict=True):
        model = smp.DistributedModel(make_model())
        options = {"weight_decay": 0.01, **({"fused": fused} if maker is not makers[2] else {})}
        inner = maker(model.parameters(), lr=0.1, eps=1e-3, **options)
        optimizer = smp.DistributedOptimizer(inner, static_loss_scale=8.0)

        @smp.step
        def train_step(x: Tensor, model: Any = model) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        norms = []
        for _ in range(3):
            train_step(torch.arange(30.0).view(6, 5) / 30)
            grad = inner.param_groups[0]["params"][0].grad
            before = grad.clone()
            norms.append(float(optimizer.clip_grad_norm(0.1)))
            assert torch.equal(grad, before) == fused, "a fused update clips while it reads"
            optimizer.step()
            optimizer.zero_grad()
        assert norms[0] > 0.1 and not hasattr(inner, "grad_scale")
        results.append((norms, [p.detach().clone() for p in inner.param_groups[0]["params"]]))
        for parameter, master in zip(
            model.parameters(), inner.param_groups[0]["params"], strict=True
        ):
            assert torch.equal(parameter, master.to(parameter.dtype))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, rtol=1e-5, atol=1e-6)


def test_two_optimizers_of_one_model_need_one_scale(start: Any) -> None:
    start(fp16=True)
    model = smp.DistributedModel(make_model())
    parameters = list(model.parameters())
    first = smp.DistributedOptimizer(torch.optim.SGD(parameters[:2], lr=0.1), 8.0)
    second = smp.DistributedOptimizer(torch.optim.SGD(parameters[2:], lr=0.1), 4.0)
    model.backward(model(torch.ones(2, 5)).sum())
    second.step()
    with pytest.raises(RuntimeError, match="same static_loss_scale"):
        first.step()


# ---- state -----------------------------------------------------------------


@pytest.mark.parametrize("key", ["fp16", "bf16"])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("model_first", [False, True])
def test_training_goes_on_from_a_checkpoint_bit_by_bit(
    start: Any, key: str, partial: bool, model_first: bool
) -> None:
    start(**{key: True})
    arguments = {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": 2.0**14}}
    model, optimizer, run = make(**arguments)
    other, fresh, rerun = make(**{**arguments, "dynamic_loss_args": {"init_scale": 2.0}})

    def advance(optimizer: Any, run: Any) -> None:
        run()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        advance(optimizer, run)
    file = io.BytesIO()
    state = optimizer.local_state_dict() if partial else optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": state}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    loads = [
        lambda: other.load_state_dict(saved["model"]),
        lambda: fresh.load_state_dict(saved["optimizer"]),
    ]
    for load in loads if model_first else reversed(loads):
        load()
    assert fresh.loss_scale == optimizer.loss_scale
    pairs = zip(*(o.fp32_from_fp16_groups[0] for o in (optimizer, fresh)), strict=True)
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, mine.to(HALVES[key]).float()), "16 bits would do"
    advance(optimizer, run)
    advance(fresh, rerun)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_state_of_the_wrapped_optimizer_alone_is_loaded(start: Any) -> None:
    plain = make_model()
    alone = torch.optim.AdamW(plain.parameters(), lr=0.3)
    plain(torch.ones(2, 5)).sum().backward()
    alone.step()
    start(bf16=True)
    _, optimizer, _ = make()
    optimizer.load_state_dict(copy.deepcopy(alone.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.3
    entry = optimizer.state[optimizer.param_groups[0]["params"][0]]
    assert torch.equal(entry["exp_avg"], alone.state[plain[0].weight]["exp_avg"])


def test_parameters_can_be_saved_whole(start: Any) -> None:
    start(bf16=True)
    model, _, _ = make()
    file = io.BytesIO()
    torch.save(model.get_module(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert holding_of(loaded[0].weight) is None
    assert torch.equal(loaded[0].weight, model.get_module()[0].weight)


# ---- autocast --------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_with_a_grad_scaler(start: Any, dtype: torch.dtype) -> None:
    start(microbatches=2)
    scaler = smp.amp.GradScaler(init_scale=2.0**10, enabled=dtype == torch.float16)
    assert isinstance(scaler, torch.amp.GradScaler)
    model = smp.DistributedModel(make_model())
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))

    @smp.step
    def train_step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            output = model(x)
            assert output.dtype == dtype
        loss = output.float().square().mean()
        model.backward(scaler.scale(loss).squeeze())
        return loss

    losses = []
    for _ in range(8):
        losses.append(float(train_step(torch.arange(30.0).view(6, 5) / 30).reduce_mean()))
        scaler.unscale_(optimizer)
        norm = smp.clip_grad_norm_(model.parameters(), 1.0)
        assert math.isfinite(norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert losses[-1] < 0.8 * losses[0]
