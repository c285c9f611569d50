"""`FusedAdam` with its state in fewer bytes: rounding, layouts, state dicts, bytes."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.modules.state_bytes import MASTER_BYTES, moment_bytes
from smp.optim import compact_state
from smp.optimizers import FusedAdam
from smp.precision.holdings import Holding, attach
from tests.unit.test_fused_optimizers import numbers

SHAPES = [(33, 7), (1,), (0, 4), (130,), (3001,)]
#: ``state_dtype``, dtype of parameters, ``masters``.
CASES = [
    ("bf16", torch.float32, "fp32"),
    ("int8", torch.float32, "fp32"),
    ("fp32", torch.bfloat16, "none"),
    ("fp32", torch.bfloat16, "residue"),
    ("bf16", torch.bfloat16, "none"),
    ("bf16", torch.bfloat16, "residue"),
    ("int8", torch.bfloat16, "none"),
    ("int8", torch.bfloat16, "residue"),
]
IDS = ["-".join([state, str(dtype)[6:], masters]) for state, dtype, masters in CASES]
all_formats = pytest.mark.parametrize(("state_dtype", "dtype", "masters"), CASES, ids=IDS)


def parameters(dtype: torch.dtype, shapes: Sequence[Any] = SHAPES) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(shape, i, dtype)) for i, shape in enumerate(shapes)]


def set_grads(params: Sequence[nn.Parameter], step: int) -> None:
    for i, p in enumerate(params):
        p.grad = (numbers(p.shape, 100 * (step + 1) + i) * (0.3 + i)).to(p.dtype)


def values(p: Tensor, entry: dict[str, Any]) -> Tensor:
    """Returns a parameter with the digits of its residue, if there is one."""
    exact = entry.get(compact_state.MASTER)
    return (p.detach() if exact is None else exact).double()


def units(name: str, value: Tensor, state_dtype: str) -> Tensor:
    """Returns the distance of the numbers that a format has near a value."""
    if state_dtype == "fp32":
        return value.abs() * 2**-22
    if state_dtype == "bf16":
        return value.abs() * 2**-7
    # 1 + y has four binary digits; y is relative to the largest of 256 elements.
    top = 247 if name == "exp_avg" else 63487
    flat = value.flatten()
    blocks = nn.functional.pad(flat, (0, -flat.numel() % 256)).view(-1, 256).abs()
    scale = blocks.amax(1, keepdim=True)
    unit = 2.0 ** torch.floor(torch.log2(1 + blocks / scale.clamp(min=1e-300) * top)) / 16
    return (unit / top * scale).flatten()[: flat.numel()].view(value.shape)


@all_formats
@pytest.mark.parametrize("stochastic", [True, False])
def test_each_update_is_adam_in_fp64_but_for_one_rounding(
    state_dtype: str, dtype: torch.dtype, masters: str, stochastic: bool
) -> None:
    params = parameters(dtype)
    lr, wd, eps = 0.01, 0.1, 1e-8
    optimizer = FusedAdam(
        params, lr=lr, weight_decay=wd, state_dtype=state_dtype, masters=masters,
        stochastic_rounding=stochastic,
    )  # fmt: skip
    share = 1.001 if stochastic else 0.501
    before: dict[int, Any] = {}
    for step in range(1, 6):
        old = [values(p, before.get(i, {})).clone() for i, p in enumerate(params)]
        set_grads(params, step)
        optimizer.step()
        after = optimizer.state_dict()["state"]
        for i, p in enumerate(params):
            was, now, g = before.get(i), after[i], p.grad.double()  # type: ignore[union-attr]
            zero = torch.zeros_like(g)
            m = 0.9 * (was["exp_avg"].double() if was else zero) + 0.1 * g
            v = 0.999 * (was["exp_avg_sq"].double() if was else zero) + 0.001 * g * g
            want = old[i] * (1 - lr * wd) - lr * m / (1 - 0.9**step) / (
                (v / (1 - 0.999**step)).sqrt() + eps
            )
            for name, exact in (("exp_avg", m), ("exp_avg_sq", v)):
                assert now[name].dtype == torch.float32
                off = (now[name].double() - exact).abs()
                unit = units(name, exact, state_dtype)
                # A second moment below the smallest code becomes that one, not 0.
                is_least = (exact < unit) & (name == "exp_avg_sq")
                terms = exact.abs() + 0.1 * g.abs()  # rounded in FP32
                assert (off <= torch.where(is_least, 1.0, share) * unit + 1e-6 * terms).all()
            digits = {"fp32": 2**-23, "residue": 2**-15, "none": 2**-7}[masters]
            off = (values(p, now) - want).abs()
            assert (off <= share * digits * want.abs() * 1.01 + 1e-6).all()
            assert p.numel() == 0 or not torch.equal(want, old[i])
            assert float(now["step"]) == step
        before = copy.deepcopy(after)


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_moments_are_not_biased(state_dtype: str) -> None:
    """Many elements with the same gradients have the mean that FP32 has."""
    n = 256 * 400
    p, q = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.zeros(1))
    optimizer = FusedAdam([p], lr=0.0, state_dtype=state_dtype)
    plain = FusedAdam([q], lr=0.0)
    for step in range(50):
        g = 1.0 + 0.3 * math.sin(step)
        # The first element of a block sets the scale.
        p.grad = torch.full((n,), g)
        p.grad[::256] = 4.0
        q.grad = torch.full((1,), g)
        optimizer.step()
        plain.step()
    state = optimizer.state_dict()["state"][0]
    for name in ("exp_avg", "exp_avg_sq"):
        want = plain.state[q][name].double()
        got = state[name].view(-1, 256)[:, 1:].double()
        deviation = got.std() / math.sqrt(got.numel())
        assert got.std() > 0
        assert (got.mean() - want).abs() <= 5 * deviation, name


def test_steps_far_below_a_unit_add_up() -> None:
    """Parameters of 16 bits follow FP32; rounding to nearest stands still."""
    n, lr, num_steps = 4096, 1e-5, 1000
    errors = {}
    for name, stochastic in (("random", True), ("nearest", False)):
        p = nn.Parameter(torch.full((n,), 1.0, dtype=torch.bfloat16))
        optimizer = FusedAdam([p], lr=lr, masters="none", stochastic_rounding=stochastic)
        for _ in range(num_steps):
            p.grad = torch.full((n,), -1.0, dtype=torch.bfloat16)
            optimizer.step()
        errors[name] = p.detach().double() - (1 + lr * num_steps)
    assert errors["nearest"].abs().min() > 0.009  # nothing has moved
    unit = 2**-7
    share = lr / unit
    deviation = unit * math.sqrt(num_steps * share * (1 - share))  # of a binomial distribution
    assert errors["random"].std().item() == pytest.approx(deviation, rel=0.1)
    assert errors["random"].mean().abs() <= 5 * deviation / math.sqrt(n)


def test_a_residue_keeps_what_16_bits_lose() -> None:
    p, q = parameters(torch.bfloat16, [(5000,)])[0], nn.Parameter(torch.empty(5000))
    q.data.copy_(p.data)
    own, plain = FusedAdam([p], lr=1e-4, masters="residue"), FusedAdam([q], lr=1e-4)
    num_steps = 200
    for step in range(num_steps):
        set_grads([p], step)
        q.grad = p.grad.float()  # type: ignore[union-attr]
        own.step()
        plain.step()
    exact = own.state_dict()["state"][0][compact_state.MASTER]
    assert exact.dtype == torch.float32
    # A rounding is off by 2^-15 of the value at most, half of that in the root of the mean square.
    deviation = 2**-16 * math.sqrt(num_steps) * q.detach().abs()
    assert ((exact - q.detach()).abs() <= 6 * deviation + 1e-5).all()
    assert ((p.detach().float() - exact).abs() <= 2**-8 * exact.abs()).all()
    assert (p.detach().float() != exact).float().mean() > 0.9


@all_formats
def test_threads_do_not_change_the_bits(state_dtype: str, dtype: torch.dtype, masters: str) -> None:
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            params = parameters(dtype, [(200_001,), (70_000,), (3,)])
            optimizer = FusedAdam(params, lr=0.1, state_dtype=state_dtype, masters=masters)
            for step in range(2):
                set_grads(params, step)
                optimizer.step()
            state = [v for p in params for v in optimizer.state[p].values()]
            results.append([p.detach() for p in params] + state)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def part_of(whole: nn.Parameter, begin: int, end: int) -> nn.Parameter:
    """Returns elements of a parameter as a rank would hold them."""
    part = nn.Parameter(whole.detach().flatten()[begin:end].clone())
    attach(Holding("weight", whole, begin, end - begin, part.detach(), part))
    return part


@all_formats
@pytest.mark.parametrize("cut", [1024, 1000])
def test_shards_have_the_bits_of_the_whole(
    state_dtype: str, dtype: torch.dtype, masters: str, cut: int
) -> None:
    if state_dtype == "int8" and cut % 256:
        pytest.skip("a cut inside of a block changes its scale")
    whole = nn.Parameter(numbers((3, 999), 1, dtype))
    parts = [part_of(whole, 0, cut), part_of(whole, cut, whole.numel())]
    options: dict[str, Any] = {"lr": 0.1, "state_dtype": state_dtype, "masters": masters}
    single = FusedAdam([whole], **options)
    optimizers = [FusedAdam([part], **options) for part in parts]
    for step in range(4):
        set_grads([whole], step)
        grad = whole.grad.flatten()  # type: ignore[union-attr]
        parts[0].grad, parts[1].grad = grad[:cut].clone(), grad[cut:].clone()
        for optimizer in (single, *optimizers):
            optimizer.step()
    assert torch.equal(torch.cat([p.detach() for p in parts]), whole.detach().flatten())
    want = single.state_dict()["state"][0]
    entries = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    for name in want.keys() - {"step"}:
        assert torch.equal(torch.cat([e[name] for e in entries]), want[name].flatten()), name


@all_formats
@pytest.mark.parametrize("way", ["state dict", "copy", "pickle"])
def test_training_goes_on_with_the_same_bits(
    state_dtype: str, dtype: torch.dtype, masters: str, way: str
) -> None:
    options: dict[str, Any] = {"lr": 0.01, "state_dtype": state_dtype, "masters": masters}
    params, others = parameters(dtype), parameters(dtype)
    own, other = FusedAdam(params, **options), FusedAdam(others, **options)
    for step in range(3):
        set_grads(params, step)
        own.step()
    if way == "state dict":
        for p, q in zip(params, others, strict=True):
            q.data.copy_(p.data)
        other.load_state_dict(pickle.loads(pickle.dumps(own.state_dict())))
    else:
        other = copy.deepcopy(own) if way == "copy" else pickle.loads(pickle.dumps(own))
        others = other.param_groups[0]["params"]
    for optimizer, ps in ((own, params), (other, others)):
        for step in (3, 4):
            set_grads(ps, step)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    for p, q in zip(params, others, strict=True):
        assert own.state[p].keys() == other.state[q].keys()
        for name, value in own.state[p].items():
            assert value.dtype == other.state[q][name].dtype
            assert torch.equal(value, other.state[q][name]), name


@all_formats
def test_parameters_in_another_order_of_memory(
    state_dtype: str, dtype: torch.dtype, masters: str
) -> None:
    """The state lies like the parameter, also after a state dict that lies otherwise."""
    p = nn.Parameter(numbers((40, 30), 1, dtype).t().contiguous().t())
    q = nn.Parameter(p.detach().t().contiguous())
    assert not p.is_contiguous()
    options: dict[str, Any] = {"lr": 0.1, "state_dtype": state_dtype, "masters": masters}
    own, other = FusedAdam([p], **options), FusedAdam([q], **options)
    for step in range(4):
        p.grad = numbers((40, 30), step, dtype)
        q.grad = p.grad.t().contiguous()
        own.step()
        other.step()
        assert torch.equal(p.detach().t(), q.detach())
        state = own.state_dict()
        for name, value in state["state"][0].items():
            state["state"][0][name] = value.contiguous()
        own.load_state_dict(state)


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_state_goes_to_torch_and_back(state_dtype: str) -> None:
    params, others = parameters(torch.float32), parameters(torch.float32)
    own = FusedAdam(params, lr=0.01, weight_decay=0.1, state_dtype=state_dtype)
    for step in range(3):
        set_grads(params, step)
        own.step()
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    torchs = torch.optim.AdamW(others, lr=0.5)
    torchs.load_state_dict(own.state_dict())
    assert torchs.param_groups[0]["lr"] == 0.01
    for i, q in enumerate(others):
        assert set(torchs.state[q]) == {"step", "exp_avg", "exp_avg_sq"}
        assert torchs.state[q]["exp_avg"].dtype == torch.float32
        assert torch.equal(torchs.state[q]["exp_avg"], own.state_dict()["state"][i]["exp_avg"])
    set_grads(others, 3)
    torchs.step()
    back = FusedAdam(others, lr=0.5, state_dtype=state_dtype)
    back.load_state_dict(torchs.state_dict())
    assert back.state_dtype == state_dtype and back.param_groups[0]["lr"] == 0.01
    for q in others:
        wide = back.wide_entry(q, back.state[q])
        assert float(wide["step"]) == 4.0
        for name in ("exp_avg", "exp_avg_sq"):
            exact = torchs.state[q][name]
            bound = 0.501 * units(name, exact.double(), state_dtype) + 1e-6 * exact.abs()
            assert ((wide[name] - exact).abs() <= bound).all()
    set_grads(others, 4)
    back.step()


@all_formats
def test_state_has_the_bytes_of_the_formula(
    state_dtype: str, dtype: torch.dtype, masters: str
) -> None:
    p = nn.Parameter(torch.ones(1024, 250, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimizer = FusedAdam([p], state_dtype=state_dtype, masters=masters)
    optimizer.step()
    held = sum(v.nbytes for name, v in optimizer.state[p].items() if name != "step")
    formula = moment_bytes(state_dtype) + (MASTER_BYTES[masters] if dtype.itemsize == 2 else 0)
    assert held == formula * p.numel()


@all_formats
def test_found_inf_changes_nothing_and_scales_divide(
    state_dtype: str, dtype: torch.dtype, masters: str
) -> None:
    params, others = parameters(dtype), parameters(dtype)
    options: dict[str, Any] = {"lr": 0.1, "state_dtype": state_dtype, "masters": masters}
    own, other = FusedAdam(params, **options), FusedAdam(others, **options)
    own.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    for step in range(3):
        set_grads(params, step)
        set_grads(others, step)
        for p in params:
            p.grad.mul_(1024)  # type: ignore[union-attr]
        if step == 1:
            before = [p.detach().clone() for p in params] + copy.deepcopy(
                [v for p in params for v in own.state[p].values()]
            )
            own.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
            own.step()
            state = [v for p in params for v in own.state[p].values()]
            after = [p.detach() for p in params] + state
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            own.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
        own.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert not torch.equal(params[0].detach(), before[0])


def test_copies_are_the_rounded_parameters() -> None:
    params = parameters(torch.float32)
    for p in params:
        p._smp_copy = torch.zeros_like(p, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    set_grads(params, 0)
    FusedAdam(params, lr=0.1, state_dtype="int8").step()
    for p in params:
        assert torch.equal(p._smp_copy, p.detach().bfloat16())  # type: ignore[attr-defined]


def test_wrong_options_are_errors() -> None:
    with pytest.raises(ValueError, match='state_dtype must be one of "fp32", "bf16", "int8", got'):
        FusedAdam(parameters(torch.float32), state_dtype="fp8")
    with pytest.raises(ValueError, match='masters must be one of "fp32", "residue", "none", got'):
        FusedAdam(parameters(torch.float32), masters="bf16")
    half = parameters(torch.bfloat16)
    set_grads(half, 0)
    with pytest.raises(ValueError, match='is bfloat16, and masters="fp32"'):
        FusedAdam(half, state_dtype="bf16").step()
    wide = parameters(torch.float64)
    set_grads(wide, 0)
    with pytest.raises(ValueError, match="must be float32 or bfloat16, got Double"):
        FusedAdam(wide, state_dtype="int8").step()


def test_tensors_that_do_not_fit_are_errors() -> None:
    def call(change: dict[str, Any]) -> None:
        n = 300
        lists: dict[str, Any] = {
            "params": [torch.ones(n)],
            "grads": [torch.ones(n)],
            "exp_avgs": [torch.zeros(n, dtype=torch.uint8)],
            "exp_avg_sqs": [torch.zeros(n, dtype=torch.uint8)],
            "steps": [torch.zeros(())],
            "copies": [],
            "exp_avg_scales": [torch.zeros(2)],
            "exp_avg_sq_scales": [torch.zeros(2)],
            "residues": [],
            "begins": [0],
            "seeds": [0],
        }
        options = (torch.tensor(0.1), 0.9, 0.99, 1e-8, 0.0, True, True)
        torch.ops.smp.fused_adam_compact_(*{**lists, **change}.values(), *options)

    call({})
    call({"begins": [512], "seeds": []})
    for change, text in [
        ({"begins": []}, "begins must have one entry per parameter"),
        ({"begins": [-1]}, "begins must be >= 0"),
        ({"begins": [255]}, "exp_avg_scale 0 must be Float with 3 elements"),
        ({"seeds": [1, 2]}, "seeds must have one entry per parameter"),
        ({"exp_avg_scales": []}, "exp_avg_scales must have one entry"),
        ({"exp_avg_sq_scales": [torch.zeros(1)]}, "exp_avg_sq_scale 0 must be Float with 2"),
        ({"residues": [torch.zeros(300, dtype=torch.int8)]}, "with a residue must be bfloat16"),
        ({"exp_avgs": [torch.zeros(300)]}, "exp_avg_sq 0 must be Float, got Byte"),
        ({"exp_avgs": [torch.zeros(300, dtype=torch.half)]}, "must be float32, bfloat16 or uint8"),
        ({"exp_avgs": []}, "exp_avgs must have one entry per parameter"),
    ]:
        with pytest.raises(ValueError, match=text):
            call(change)
    wide = {name: [torch.zeros(300)] for name in ("exp_avgs", "exp_avg_sqs")}
    with pytest.raises(ValueError, match="use smp::fused_adam_"):
        call({**wide, "exp_avg_scales": [], "exp_avg_sq_scales": []})
