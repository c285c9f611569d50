"""`smp.optimizers` next to plain references and torch, and with the other parts of a step."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from smp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedOptimizer
from tests.reference import fused_optimizers as reference

SHAPES = [(33, 7), (1,), (0, 4), (130,), (70001,)]
FUSED: list[type[FusedOptimizer]] = [FusedAdam, FusedLAMB, FusedNovoGrad]


def numbers(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(numbers(s, i, dtype)) for i, s in enumerate(SHAPES)]


def set_grads(params: Sequence[nn.Parameter], step: int, factor: float = 1.0) -> list[Tensor]:
    """Gradients of different sizes per parameter; returned in float64."""
    grads = []
    for i, p in enumerate(params):
        g = numbers(p.shape, 100 * (step + 1) + i) * (0.3 + i) * factor
        p.grad = g.to(p.dtype)
        grads.append(p.grad.double())
    return grads


CASES: list[tuple[type[FusedOptimizer], Any, dict[str, Any]]] = [
    (FusedAdam, reference.Adam, {}),
    (FusedAdam, reference.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.9), "lr": 0.05}),
    (FusedAdam, reference.Adam, {"weight_decay": 0.1, "adam_w_mode": False, "lr": 0.05}),
    (FusedAdam, reference.Adam, {"bias_correction": False, "eps": 1e-3}),
    (FusedLAMB, reference.Lamb, {"lr": 0.05}),
    (FusedLAMB, reference.Lamb, {"lr": 0.05, "max_grad_norm": 1e6, "grad_averaging": False}),
    (FusedLAMB, reference.Lamb, {"lr": 0.05, "max_grad_norm": None, "adam_w_mode": False}),
    (FusedLAMB, reference.Lamb, {"lr": 0.05, "weight_decay": 0.0, "bias_correction": False}),
    (FusedLAMB, reference.Lamb, {"lr": 0.05, "weight_decay": 0.0, "use_nvlamb": True}),
    (FusedNovoGrad, reference.NovoGrad, {"lr": 0.05, "weight_decay": 0.1}),
    (FusedNovoGrad, reference.NovoGrad, {"lr": 0.05, "weight_decay": 0.1, "init_zero": True}),
    (
        FusedNovoGrad,
        reference.NovoGrad,
        {"lr": 0.05, "weight_decay": 0.1, "reg_inside_moment": True, "grad_averaging": False},
    ),
    (
        FusedNovoGrad,
        reference.NovoGrad,
        {"lr": 0.05, "norm_type": 0, "bias_correction": False, "betas": (0.95, 0.5)},
    ),
]
IDS = [f"{cls.__name__}-{i}" for i, (cls, _, _) in enumerate(CASES)]


@pytest.mark.parametrize(("cls", "plain", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_match_the_reference(
    cls: type[FusedOptimizer], plain: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    params = parameters(dtype)
    before = [p.detach().double().clone() for p in params]
    expected = [p.clone() for p in before]
    own, other = cls(params, **options), plain(**options)
    for step in range(5):
        grads = set_grads(params, step)
        other.step(expected, grads)
        assert own.step() is None
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    for p, want, start in zip(params, expected, before, strict=True):
        torch.testing.assert_close(p.detach().double(), want, rtol=tolerance, atol=tolerance)
        assert p.numel() == 0 or not torch.equal(want, start)
        assert float(own.state[p]["step"]) == 5.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_adam_matches_torch(adam_w_mode: bool, dtype: torch.dtype) -> None:
    params, others = parameters(dtype), parameters(dtype)
    own = FusedAdam(params, lr=0.01, weight_decay=0.2, adam_w_mode=adam_w_mode)
    cls = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    other = cls(others, lr=0.01, weight_decay=0.2)
    for step in range(8):
        set_grads(params, step)
        set_grads(others, step)
        own.step()
        other.step()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
        for key in ("exp_avg", "exp_avg_sq"):
            a, b = own.state[p][key], other.state[q][key]
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fused", [False, True])
def test_state_goes_to_torch_and_back(fused: bool) -> None:
    def make(kind: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        params = parameters()
        if kind == "own":
            return params, FusedAdam(params, lr=0.01, weight_decay=0.1)
        return params, torch.optim.AdamW(params, lr=0.01, weight_decay=0.1, fused=fused)

    through, straight = make("own"), make("torch")
    for step, kind in enumerate(["torch", "own", "torch", "own"]):
        for params, optimizer in (through, straight):
            set_grads(params, step)
            optimizer.step()
        params, optimizer = make(kind)
        for p, q in zip(params, through[0], strict=True):
            p.data.copy_(q.data)
        optimizer.load_state_dict(copy.deepcopy(through[1].state_dict()))
        through = params, optimizer
    assert isinstance(through[1], FusedAdam)
    for p, q in zip(through[0], straight[0], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)
        assert float(through[1].state[p]["step"]) == 4.0


@pytest.mark.parametrize("cls", FUSED)
def test_own_state_dict_goes_on_where_it_ended(cls: type[FusedOptimizer]) -> None:
    params, others = parameters(), parameters()
    own, other = cls(params, lr=0.01), cls(others, lr=0.7)
    for step in range(3):
        set_grads(params, step)
        own.step()
    other.load_state_dict(pickle.loads(pickle.dumps(own.state_dict())))
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    for optimizer, ps in ((own, params), (other, others)):
        set_grads(ps, 3)
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    again = copy.deepcopy(own)
    assert again.set_grad_none and again.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("cls", FUSED)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_copies_are_the_rounded_parameters(cls: type[FusedOptimizer], half: torch.dtype) -> None:
    params = parameters(torch.float32)
    # As flat pieces, of the shape of the parameter, and none for the last.
    copies = [torch.full((p.numel(),), -1.0, dtype=half) for p in params[:-1]]
    copies[0] = copies[0].view(params[0].shape)
    for p, piece in zip(params, copies, strict=False):
        p._smp_copy = piece  # type: ignore[attr-defined]
    optimizer = cls(params, lr=0.1)
    set_grads(params, 0)
    versions = [c._version for c in copies]
    optimizer.step()
    for p, piece in zip(params, copies, strict=False):
        assert torch.equal(piece.flatten(), p.detach().to(half).flatten())
    assert all(c._version > v for c, v in zip(copies, versions, strict=True))


@pytest.mark.parametrize("cls", FUSED)
def test_large_copies_are_the_rounded_parameters(cls: type[FusedOptimizer]) -> None:
    # Large enough for writes past the caches; the second copy lies at an odd address.
    params = [nn.Parameter(numbers((n,), n, torch.float32)) for n in (2_100_001, 70_003)]
    memory = torch.zeros(2_200_000, dtype=torch.bfloat16)
    pieces = [memory[:2_100_001], memory[2_100_002 : 2_100_002 + 70_003]]
    for p, piece in zip(params, pieces, strict=True):
        p.grad = numbers(p.shape, 5, torch.float32)
        p._smp_copy = piece  # type: ignore[attr-defined]
    cls(params, lr=0.1).step()
    for p, piece in zip(params, pieces, strict=True):
        assert torch.equal(piece, p.detach().bfloat16())
    assert memory[2_100_001] == 0


@pytest.mark.parametrize("cls", FUSED)
def test_found_inf_changes_nothing_at_all(cls: type[FusedOptimizer]) -> None:
    params = parameters(torch.float32)
    for p in params:
        p._smp_copy = p.detach().bfloat16()  # type: ignore[attr-defined]
    optimizer = cls(params, lr=0.1)

    def snapshot() -> list[Tensor]:
        state = [v for p in params for v in optimizer.state[p].values()]
        copies = [p._smp_copy for p in params]  # type: ignore[attr-defined]
        return [t.detach().clone() for t in [*params, *copies, *state]]

    set_grads(params, 0)
    optimizer.step()
    before = snapshot()
    set_grads(params, 1)
    params[0].grad[0, 0] = math.inf  # type: ignore[index]
    optimizer.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    set_grads(params, 1, 1.5)
    optimizer.found_inf = torch.tensor(0.0)  # type: ignore[attr-defined]
    optimizer.step()
    changed = [not torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True)]
    assert sum(changed) == 5 * (len(SHAPES) - 1) + 1  # and the step of the empty one
    assert float(optimizer.state[params[0]]["step"]) == 2.0


@pytest.mark.parametrize("cls", FUSED)
def test_a_skipped_first_step_leaves_no_trace(cls: type[FusedOptimizer]) -> None:
    params, others = parameters(), parameters()
    own, other = cls(params, lr=0.1), cls(others, lr=0.1)
    set_grads(params, 9)
    own.found_inf = torch.tensor(1.0)  # type: ignore[attr-defined]
    own.step()
    del own.found_inf
    for step in range(2):
        set_grads(params, step)
        set_grads(others, step)
        own.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


@pytest.mark.parametrize("cls", FUSED)
def test_grad_scale_divides_gradients(cls: type[FusedOptimizer]) -> None:
    params, others = parameters(), parameters()
    own, other = cls(params, lr=0.1), cls(others, lr=0.1)
    own.grad_scale = torch.tensor(1024.0)  # type: ignore[attr-defined]
    for step in range(3):
        grads = set_grads(params, step, 1024.0)
        set_grads(others, step)
        own.step()
        other.step()
        for p, g in zip(params, grads, strict=True):
            assert torch.equal(p.grad, g)  # type: ignore[arg-type]
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_grad_scaler_of_torch_drives_it() -> None:
    params, others = parameters(torch.float32), parameters(torch.float32)
    own, other = FusedAdam(params, lr=0.1), FusedAdam(others, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        scaler.scale(torch.zeros(()))
        set_grads(params, step, 2.0**10 if step < 2 else 2.0**9)
        if step == 1:
            params[3].grad[7] = math.nan  # type: ignore[index]
        else:
            set_grads(others, step)
            other.step()
        scaler.step(own)
        scaler.update()
    assert scaler.get_scale() == 512.0 and not hasattr(own, "found_inf")
    assert float(own.state[params[0]]["step"]) == 3.0
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("grad_scale", [None, 64.0])
def test_clipping_folds_into_the_update(grad_scale: float | None) -> None:
    params, others = parameters(), parameters()
    own, other = FusedAdam(params, lr=0.1), torch.optim.AdamW(others, lr=0.1, weight_decay=0.0)
    for step in range(3):
        set_grads(params, step, grad_scale or 1.0)
        set_grads(others, step)
        norm = torch.nn.utils.clip_grad_norm_(others, 2.5)
        squares = torch.ops.smp.sum_of_squares([p.grad for p in params])
        scale = None if grad_scale is None else torch.tensor(grad_scale)
        divisor, own_norm, found_inf = torch.ops.smp.clip_divisor(squares, 2.5, scale)
        torch.testing.assert_close(own_norm, norm, rtol=1e-12, atol=0.0)
        assert float(found_inf) == 0.0 and float(divisor) > (grad_scale or 1.0)
        own.grad_scale, own.found_inf = divisor, found_inf  # type: ignore[attr-defined]
        own.step()
        other.step()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-11)


class Ranks:
    """Keeps what a rank has, and gives back what all of them are said to have."""

    def __init__(self, tables: list[Tensor], total: Tensor | None) -> None:
        self.tables = tables
        self.total = total

    def __call__(self, norms: Tensor, parameters: Sequence[Tensor], is_max: bool) -> Tensor:
        assert norms.shape[1] == len(parameters) and not is_max
        self.tables.append(norms.clone())
        return norms if self.total is None else self.total


@pytest.mark.parametrize("cls", FUSED)
def test_parts_on_two_ranks_are_one_parameter(cls: type[FusedOptimizer]) -> None:
    """Steps with both halves of each parameter, in turns, with `sum_norms` between them."""
    whole = parameters()
    single = cls(whole, lr=0.1)
    cuts = [p.numel() // 3 for p in whole]
    parts = [
        [nn.Parameter(p.detach().flatten()[:c].clone()) for p, c in zip(whole, cuts, strict=True)],
        [nn.Parameter(p.detach().flatten()[c:].clone()) for p, c in zip(whole, cuts, strict=True)],
    ]
    optimizers = [cls(part, lr=0.1) for part in parts]
    for step in range(3):
        grads = set_grads(whole, step)
        for first, second, g, c in zip(*parts, grads, cuts, strict=True):
            first.grad, second.grad = g.flatten()[:c].clone(), g.flatten()[c:].clone()
        norm = torch.cat([g.flatten() for g in grads]).norm()
        # The other rank's values are known only after it has been asked: first with copies.
        tables: list[Tensor] = []
        copies = [copy.deepcopy(o) for o in optimizers]
        for part, optimizer in zip(parts, copies, strict=True):
            for p, q in zip(part, optimizer.param_groups[0]["params"], strict=True):
                q.grad = p.grad
            optimizer.sum_norms = Ranks(tables, None)
            optimizer.grad_norm = norm
            optimizer.step()
        total = tables[0] + tables[1] if tables else None
        for optimizer in optimizers:
            optimizer.sum_norms = Ranks(tables, total)
            optimizer.grad_norm = norm
            optimizer.step()
        single.step()
        assert len(tables) == (0 if cls is FusedAdam else 4)
    for p, a, b in zip(whole, *parts, strict=True):
        got = torch.cat([a.detach(), b.detach()])
        torch.testing.assert_close(got, p.detach().flatten(), rtol=1e-12, atol=1e-12)


def test_sum_norms_gets_all_parameters_and_both_kinds() -> None:
    params = parameters()
    seen = []

    def sum_norms(norms: Tensor, parameters: Sequence[Tensor], is_max: bool) -> Tensor:
        assert len(parameters) == len(params) == norms.shape[1]
        assert all(a is b for a, b in zip(parameters, params, strict=True))
        seen.append((norms.clone(), is_max))
        return norms

    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5}]
    for cls, options in ((FusedLAMB, {}), (FusedNovoGrad, {"norm_type": 0}), (FusedNovoGrad, {})):
        optimizer = cls(groups, **options)
        optimizer.sum_norms = sum_norms
        set_grads(params, 0)
        params[1].grad = None
        optimizer.step()
        params[0].grad = None
        for p in params:
            p.grad = None
        optimizer.step()  # other ranks may have gradients
    assert [tuple(n.shape) for n, _ in seen] == [(2, 5)] * 2 + [(1, 5)] * 4
    assert [is_max for _, is_max in seen] == [False, False, True, True, False, False]
    assert seen[0][0][:, 1].tolist() == [0.0, 0.0] and seen[0][0][0, 0] > 0
    assert not seen[1][0].any()


@pytest.mark.parametrize("cls", FUSED)
def test_threads_do_not_change_the_bits(cls: type[FusedOptimizer]) -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            params = [nn.Parameter(numbers((n,), n, torch.float32)) for n in (200_001, 70_000, 3)]
            optimizer = cls(params, lr=0.1)
            for step in range(2):
                set_grads(params, step)
                optimizer.step()
            results.append([p.detach() for p in params])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_schedulers_tensor_rates_groups_and_closures() -> None:
    params, others = parameters(), parameters()
    own = FusedAdam(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.3, "weight_decay": 0.1}],
        lr=torch.tensor(0.1),
    )
    other = torch.optim.AdamW(
        [{"params": others[:2]}, {"params": others[2:], "lr": 0.3, "weight_decay": 0.1}],
        lr=0.1,
        weight_decay=0.0,
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (own, other)]
    for step in range(3):
        set_grads(others, step)
        other.step()

        def closure(step: int = step) -> float:
            assert torch.is_grad_enabled()
            set_grads(params, step)
            return 0.25

        assert own.step(closure) == 0.25
        for scheduler in schedulers:
            scheduler.step()
    for p, q in zip(params, others, strict=True):
        # The first rate is a float32.
        torch.testing.assert_close(p, q, rtol=1e-7, atol=1e-7)


def test_gradients_in_another_order_and_of_some_parameters_only() -> None:
    params, others = parameters(), parameters()
    own, other = FusedAdam(params), torch.optim.AdamW(others, weight_decay=0.0)
    for ps in (params, others):
        set_grads(ps, 0)
        ps[3].grad = None
        g = ps[0].grad
        assert g is not None
        ps[0].grad = g.t().contiguous().t()
        assert not ps[0].grad.is_contiguous()
    before = params[3].detach().clone()
    own.step()
    other.step()
    assert torch.equal(params[3], before) and params[3] not in own.state
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_zero_grad_drops_gradients_unless_told_otherwise() -> None:
    params = parameters()
    set_grads(params, 0)
    FusedAdam(params, set_grad_none=False).zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in params)
    FusedAdam(params).zero_grad()
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize(
    ("cls", "options", "text"),
    [
        (FusedAdam, {"amsgrad": True}, "FusedAdam: amsgrad must be False"),
        (FusedAdam, {"lr": -1.0}, "lr must be >= 0"),
        (FusedAdam, {"betas": (0.9, 1.0)}, "betas must be two numbers"),
        (FusedLAMB, {"max_grad_norm": -1.0}, "max_grad_norm must be >= 0"),
        (FusedLAMB, {"eps": -1.0}, "FusedLAMB: eps must be >= 0"),
        (FusedNovoGrad, {"norm_type": 3}, "norm_type must be 2, 0 or inf"),
    ],
)
def test_wrong_options_are_errors(
    cls: type[FusedOptimizer], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        cls(parameters(), **options)


def test_state_of_a_variant_that_is_missing_is_refused() -> None:
    params = parameters()
    other = torch.optim.AdamW(params, amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad must be False"):
        FusedAdam(params).load_state_dict(other.state_dict())


def test_tensors_that_do_not_fit_are_errors() -> None:
    half = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    half.grad = torch.ones_like(half)
    with pytest.raises(ValueError, match="parameter 0 must be float32 or float64.*masters"):
        FusedAdam([half]).step()
    for wrong in (
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(4),
        torch.zeros(4, dtype=torch.bfloat16, device="meta"),
    ):
        p = nn.Parameter(torch.ones(4))
        p.grad = torch.ones(4)
        p._smp_copy = wrong  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match="copy 0"):
            FusedAdam([p]).step()
        assert torch.equal(p, torch.ones(4))
    sparse = nn.Parameter(torch.eye(3))
    sparse.grad = torch.eye(3).to_sparse()
    with pytest.raises(ValueError, match="layout torch.sparse_coo; fused optimizers take dense"):
        FusedAdam([sparse]).step()


def call_adam(param: Tensor, grad: Tensor, *rest: Any) -> None:
    state = [torch.zeros_like(param) for _ in range(2)]
    step = torch.zeros((), device=param.device)
    torch.ops.smp.fused_adam_(
        [param], [grad], [state[0]], [state[1]], [step], [], *rest
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_gradients_of_float_parameters(dtype: torch.dtype) -> None:
    grad = numbers((1001,), 1, dtype)
    options = (torch.tensor(0.1), 0.9, 0.99, 1e-8, 0.0, True, True)
    own, other = numbers((1001,), 0, torch.float32), numbers((1001,), 0, torch.float32)
    call_adam(own, grad, *options)
    call_adam(other, grad.float(), *options)
    assert torch.equal(own, other)


def test_meta_and_fake_tensors() -> None:
    options = (torch.tensor(0.1), 0.9, 0.99, 1e-8, 0.0, True, True)
    call_adam(torch.ones(5, device="meta"), torch.ones(5, device="meta"), *options)
    params = [torch.ones(5)]
    lists = (params, [torch.ones(5)], [torch.zeros(5)], [torch.zeros(5)], [torch.zeros(())])
    scalars = (torch.tensor(2.0), torch.tensor(0.0))
    adam, lamb = torch.ops.smp.fused_adam_.default, torch.ops.smp.fused_lamb_moments_.default
    torch.library.opcheck(adam, (*lists, [], *options, *scalars), test_utils=("test_schema",))
    torch.library.opcheck(
        lamb, (*lists, *options[1:], True, *scalars), test_utils=("test_schema", "test_faketensor")
    )
    with pytest.raises(ValueError, match="lr must be one floating point number"):
        call_adam(torch.ones(5), torch.ones(5), torch.ones(2), *options[1:])
    with pytest.raises(ValueError, match=r"exp_avg 0 must be Float, got Double"):
        torch.ops.smp.fused_adam_(
            params, [torch.ones(5)], [torch.zeros(5).double()], *lists[3:], [], *options
        )
