"""Tensors that 16-bit training casts, and its operators' handling of those that it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import smp
from tests.reference.denoiser import Denoiser
from tests.reference.half_precision import copy_in
from tests.reference.split_families import build_split_family, make_split_batch

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
both = pytest.mark.parametrize("key", ["fp16", "bf16"])


# ---- models of transformers ------------------------------------------------


@both
def test_rotary_cosines_far_away_are_those_of_float32(start: Any, key: str) -> None:
    pytest.importorskip("transformers")
    positions = torch.tensor([[0, 4096, 131071]])
    expected = build_split_family("llama", torch.float32).model.rotary_emb(
        torch.zeros(1), positions
    )
    start(**{key: True})
    model = smp.DistributedModel(build_split_family("llama", torch.float32))
    found = model.get_module().model.rotary_emb(torch.zeros(1), positions)
    assert all(map(torch.equal, found, expected)) and found[0].dtype == torch.float32
    assert model.get_module().lm_head.weight.dtype == HALVES[key]


@both
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "ernie4_5_moe"])
def test_a_model_computes_what_transformers_computes_in_16_bits(
    start: Any, key: str, family: str
) -> None:
    """Bit by bit, and tokens go to the same experts."""
    pytest.importorskip("transformers", minversion="5.0")
    plain = build_split_family(family, torch.float32)
    for name, bias in [*plain.named_buffers(), *plain.named_parameters()]:
        if name.endswith("e_score_correction_bias"):
            nn.init.normal_(bias, 3.0, 1e-3)  # 16 bits make them equal
    theirs = copy_in(HALVES[key], plain)
    start(**{key: True})
    model = smp.DistributedModel(plain)
    batch = make_split_batch(family, 0, 0)
    expected, found = chosen_experts(theirs, batch), chosen_experts(model, batch)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    with torch.no_grad():
        logits = model(**batch).logits
        assert torch.equal(logits, theirs(**batch).logits.float()) and logits.isfinite().all()


def chosen_experts(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    """The indices that routers give out."""
    found: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        found.extend(t.clone() for t in output if isinstance(t, Tensor) and t.dtype == torch.int64)

    routers = [m for name, m in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [m.register_forward_hook(note) for m in routers]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    assert len(found) == len(routers)
    return found


# ---- other models ----------------------------------------------------------


@both
def test_a_float_time_step_and_buffers_arrive_as_they_are(start: Any, key: str) -> None:
    torch.manual_seed(1)
    plain = Denoiser()
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    start(**{key: True})
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.backward(model(torch.randn(6, 8), torch.full((6,), 997.0), torch.randn(6, 8)))
    assert plain.seen[0].tolist() == [997.0] * 6
    assert all(p.dtype == HALVES[key] for p in plain.parameters())
    assert all(b.dtype == before[name].dtype for name, b in plain.named_buffers())
    assert torch.equal(plain.frequencies, before["frequencies"]) and plain.calls == 1
    assert not torch.equal(plain.body[1].running_mean, before["body.1.running_mean"])
    grads = [group["params"] for group in optimizer.param_groups]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in grads[0])


@both
def test_a_recomputed_module_casts_again(start: Any, key: str) -> None:
    start(**{key: True})
    torch.manual_seed(1)
    models = [smp.DistributedModel(Recomputing(recomputes)) for recomputes in (False, True)]
    models[1].get_module().load_state_dict(models[0].get_module().state_dict())
    x = torch.randn(6, 8)
    losses = []
    for model in models:
        loss = model(x).square().mean()
        model.backward(loss)
        losses.append(loss)
    assert torch.equal(losses[0], losses[1])
    for ours, theirs in zip(*(model.get_module().parameters() for model in models), strict=True):
        assert torch.equal(ours.grad, theirs.grad) and ours.grad.abs().sum() > 0


class Recomputing(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.inner = Attending()

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("bias", torch.rand(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y @ y.t() + self.bias).softmax(-1) @ y


@both
def test_models_that_cast_by_themselves_compute_as_without_us(start: Any, key: str) -> None:
    """Routers compute in float32 although their weight has 16 bits."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.register_buffer("bias", torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x.float(), self.linear.weight.float()) + self.bias

    torch.manual_seed(1)
    plain, x = Router(), torch.randn(5, 8)
    expected = copy_in(HALVES[key], plain)(x)
    start(**{key: True})
    assert torch.equal(smp.DistributedModel(plain)(x), expected)


def _operators() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Operators that want one dtype; of a matrix in 16 bits and a wider one, both [4, 4]."""
    index = torch.arange(4)
    return {
        "matmul": lambda a, b: a @ b,
        "rmatmul": lambda a, b: b.__rmatmul__(a),
        "addmm": lambda a, b: torch.addmm(b, a, a),
        "baddbmm": lambda a, b: torch.baddbmm(b[None], a[None], b[None]),
        "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
        "tensordot": lambda a, b: torch.tensordot(a, b, 1),
        "linear": lambda a, b: F.linear(b, a),
        "conv": lambda a, b: F.conv1d(b[None], a[..., None]),
        "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None]),
        "layer_norm": lambda a, b: F.layer_norm(b, (4,), a[0], a[1]),
        "addmm_": lambda a, b: b.clone().addmm_(a, a),
        "keywords": lambda a, b: F.scaled_dot_product_attention(
            query=a[None], key=b[None], value=a[None]
        ),
        "huber": lambda a, b: F.huber_loss(a, b),
        "class weights": lambda a, b: F.cross_entropy(a, index, b[0].abs()),
        "index_put": lambda a, b: a.clone().index_put_((index,), b),
        "scatter": lambda a, b: a.scatter(0, index[None], b),
        "masked_scatter": lambda a, b: a.masked_scatter(torch.ones(4, 4).bool(), b),
    }


@both
@pytest.mark.parametrize("name", _operators())
def test_an_operator_gets_one_dtype(start: Any, key: str, name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, 4))
            self.register_buffer("wide", torch.rand(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            half = x.to(self.scale.dtype) * self.scale
            return _operators()[name](half, self.wide)

    torch.manual_seed(1)
    plain, x = Model(), torch.rand(4, 4)
    exact = plain(x).detach()
    start(**{key: True})
    model = smp.DistributedModel(plain)
    found = model(x)
    model.backward(found.float().sum())
    torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)
    assert plain.scale.grad is not None
    with pytest.raises(RuntimeError):  # without us, in forward or backward
        Model.forward(plain, x).sum().backward()


@both
def test_recurrent_modules_and_attention_take_wide_inputs(start: Any, key: str) -> None:
    start(**{key: True})
    lstm = smp.DistributedModel(nn.LSTM(4, 4))
    layer = smp.DistributedModel(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0))
    x = torch.randn(3, 2, 4)
    packed = nn.utils.rnn.pack_sequence([x[:, 0], x[:2, 1]])
    outputs = ((lstm, lstm(x)[0]), (lstm, lstm(packed)[0].data), (layer, layer(x)))
    for model, output in outputs:
        model.backward(output.sum())
        assert all(p.grad is not None for p in model.parameters())
