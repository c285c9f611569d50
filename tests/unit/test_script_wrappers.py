"""FP16 packages of scripts before 1.10: their optimizer, wrapped, becomes ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp


class Scaler:
    """The dynamic scaler of such a package; the static one has ``cur_scale`` alone."""

    def __init__(self, **arguments: float) -> None:
        self.cur_scale = arguments.pop("init_scale", 2.0**32)
        vars(self).update(arguments)


class FP16_Optimizer:  # noqa: N801 - the name that scripts have
    """A class with the parts of apex' that scripts of 2022 carry; trains nothing by itself."""

    def __init__(self, inner: torch.optim.Optimizer, dynamic: bool, makes_masters: bool) -> None:
        self.optimizer, self.dynamic_loss_scale = inner, dynamic
        self.loss_scaler = Scaler(init_scale=64.0, scale_window=2, delayed_shift=2)
        self.fp16_groups: list[list[Tensor]] = []
        self.fp32_from_fp16_groups: list[list[Tensor]] = []
        for group in inner.param_groups if makes_masters else ():
            self.fp16_groups.append(group["params"])
            group["params"] = [nn.Parameter(p.detach().float()) for p in group["params"]]
            self.fp32_from_fp16_groups.append(group["params"])


class FP16_Module(nn.Module):  # noqa: N801
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module.half()

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.half()).float()  # type: ignore[no-any-return]


Wrap = Callable[[torch.optim.Optimizer], Any]


def train(wrap: Wrap, **arguments: Any) -> tuple[list[Tensor], smp.DistributedOptimizer]:
    """Trains as scripts of 2022 do; their wrapper gets the parameters of the wrapped model."""
    torch.manual_seed(3)
    model = smp.DistributedModel(FP16_Module(nn.Linear(4, 3)))
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(wrap(inner), **arguments)
    assert optimizer.optimizer is inner
    model.register_post_step_hook(lambda model, optimizer: optimizer.init_master_params())

    @smp.step
    def train_step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.backward(loss, update_master_grads=False)
        return loss

    losses = []
    for _ in range(6):
        optimizer.zero_grad(set_grads_to_None=True)
        losses.append(train_step(model, optimizer, torch.ones(2, 4)).reduce_mean())
        optimizer.update_master_grads()
        optimizer.clip_master_grads(1.0)
        optimizer.step()
    assert losses[-1] < losses[0] and not optimizer.overflow
    return losses, optimizer


@pytest.mark.parametrize("makes_masters", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_an_fp16_optimizer_of_the_script_becomes_ours(
    start: Any, dynamic: bool, makes_masters: bool
) -> None:
    start(fp16=True, fp16_params=True, checkpoint_attentions=True)
    losses, optimizer = train(lambda inner: FP16_Optimizer(inner, dynamic, makes_masters))
    smp.shutdown()
    start(fp16=True)
    arguments = {"init_scale": 64.0, "scale_window": 2, "delayed_shift": 2}
    static = {"static_loss_scale": 64.0}
    given: Any = {"dynamic_loss_scale": True, "dynamic_loss_args": arguments} if dynamic else static
    expected, own = train(lambda inner: inner, **given)
    assert all(map(torch.equal, losses, expected)), "bit for bit"
    assert optimizer.loss_scale == own.loss_scale and (optimizer.loss_scale != 64.0) == dynamic
    masters = optimizer.fp32_from_fp16_groups[0]
    assert masters and all(p.dtype == torch.float32 for p in masters)


def test_it_needs_fp16_in_the_configuration(start: Any) -> None:
    start(fp16_params=True)
    model = nn.Linear(2, 2).half()
    with pytest.raises(ValueError, match=r'FP16_Optimizer of the script.*add "fp16": True'):
        smp.DistributedOptimizer(
            FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), True, False)  # type: ignore
        )


def test_other_objects_with_an_optimizer_inside_are_refused(start: Any) -> None:
    start(fp16=True)

    class Megatron:
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"wraps a torch\.optim\.Optimizer, got a Megatron"):
        smp.DistributedOptimizer(Megatron())  # type: ignore[arg-type]
