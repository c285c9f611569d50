"""``DistributedOptimizer`` in one process: the same as the optimizer it wraps."""

from __future__ import annotations

import copy
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import smp
from smp import _C
from smp.optim import distributed_optimizer as optimizer_module
from smp.tensor_parallel.partial import PARTIAL_MARK
from smp.world import comm, device_numbers, runtime
from smp.world.rank import Rank
from smp.world.wrapped import Wrapped

pytestmark = pytest.mark.usefixtures("running")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adadelta])
def test_steps_are_those_of_the_wrapped_optimizer(kind: type[torch.optim.Optimizer]) -> None:
    model, reference = make_model(), make_model()
    train(model, smp.DistributedOptimizer(kind(groups_of(model), lr=0.1)))
    train(reference, kind(groups_of(reference), lr=0.1))
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q)


def test_groups_state_and_defaults_are_shared() -> None:
    inner = torch.optim.AdamW(make_model().parameters(), lr=0.1)
    optimizer = smp.DistributedOptimizer(inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    assert inner.param_groups[0]["lr"] == 0.5
    optimizer.param_groups = optimizer.param_groups[:]
    assert inner.param_groups is optimizer.param_groups
    assert optimizer.state is inner.state and optimizer.defaults is inner.defaults
    extra = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra]})
    assert inner.param_groups[1]["params"][0] is extra
    assert runtime.current().wrapped.optimizer is optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    ],
)
def test_schedulers_drive_it_without_warnings(make: Any, recwarn: pytest.WarningsRecorder) -> None:
    rates: list[list[float]] = []
    for wraps in (True, False):
        model = make_model()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if wraps:
            optimizer = smp.DistributedOptimizer(optimizer)
        scheduler = make(optimizer)
        rates.append([])
        for _ in range(5):
            train(model, optimizer, steps=1)
            scheduler.step()
            rates[-1].append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] and len(set(rates[0])) > 1
    assert not [w for w in recwarn if "lr_scheduler" in str(w.message)]


def test_closures_hooks_and_copies_reach_the_wrapped_optimizer() -> None:
    model = make_model()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))

    def closure() -> float:
        assert torch.is_grad_enabled()
        calls.append("closure")
        return 7.0

    assert optimizer.step(closure) == 7.0
    assert calls == ["before", "closure"]
    assert copy.deepcopy(optimizer).param_groups[0]["lr"] == 0.1
    assert "SGD" in repr(optimizer)
    with pytest.raises(AttributeError):
        _ = optimizer.no_such_attribute


def test_zero_grad_takes_both_values() -> None:
    model = make_model()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("partial", [False, True])
def test_state_survives_a_round_trip(partial: bool) -> None:
    model, other = make_model(), make_model()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(groups_of(model), lr=0.1))
    train(model, optimizer)
    state = optimizer.local_state_dict() if partial else optimizer.state_dict()
    assert (PARTIAL_MARK in state) == partial
    assert list(state["state"]) == [0, 1, 2, 3]
    other.load_state_dict(model.state_dict())
    fresh = smp.DistributedOptimizer(torch.optim.AdamW(groups_of(other), lr=0.7))
    fresh.load_state_dict(copy.deepcopy(state))
    train(model, optimizer)
    train(other, fresh)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_loss_scale_arguments_have_no_effect_but_are_checked() -> None:
    inner = torch.optim.SGD(make_model().parameters(), lr=0.1)
    smp.DistributedOptimizer(
        inner,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 1000, "min_scale": 1, "delayed_shift": 2},
    )
    smp.DistributedOptimizer(inner, dynamic_loss_scale=True, init_scale=2.0)
    with pytest.raises(ValueError, match="scale_windw"):
        smp.DistributedOptimizer(inner, dynamic_loss_args={"scale_windw": 1})
    with pytest.raises(ValueError, match="torch.optim.Optimizer"):
        smp.DistributedOptimizer(inner.param_groups)


def test_wrapping_again_wraps_the_optimizer_inside() -> None:
    inner = torch.optim.SGD(make_model().parameters(), lr=0.1)
    first = smp.DistributedOptimizer(inner)
    second = smp.DistributedOptimizer(first)
    assert second.optimizer is inner and runtime.current().wrapped.optimizer is second


def test_accelerate_finds_what_it_asks_for() -> None:
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(make_model().parameters(), lr=0.1))
    assert optimizer._is_accelerate_prepared is True and optimizer.step_was_skipped is False


class FakeModel:
    """The part of a DistributedModel that the optimizer sees: two ranks, split by index."""

    def __init__(self, remote: list[Tensor]) -> None:
        self.partitioned = False
        self.hooks: list[Any] = []
        parts = types.SimpleNamespace(remote_parameters=lambda: remote)
        self._engine = types.SimpleNamespace(
            partitioned=False,
            parts=parts,
            after_update=lambda: None,
            update_with=lambda updates, scaler: None,
        )

    def prepare(self) -> None:
        self.partitioned = self._engine.partitioned = True
        for optimizer in runtime.current().wrapped.optimizers:
            optimizer._use_masters()
        for hook in self.hooks:
            hook(self, None)

    def register_post_partition_hook(self, hook: Any) -> None:
        self.hooks.append(hook)


class Replica:
    """Two pipeline ranks in one process: rank 0 has the first layer, rank 1 the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = make_model()
        self.parameters = list(self.model.parameters())
        self.exchanges: list[list[Any]] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(optimizer_module, "DistributedModel", FakeModel)
        monkeypatch.setattr(comm, "mp_size", lambda: 2)

    def become(self, rank: int, answers: list[list[Any]], num_local: int = 2) -> FakeModel:
        """Acts as ``rank``; ``answers`` are the other rank's objects per exchange, in order."""
        fake = FakeModel(self.parameters[num_local:] if rank == 0 else self.parameters[:-num_local])
        self._monkeypatch.setattr(Wrapped, "models", [fake])
        answers = list(answers)

        def allgather(obj: Any, group: Any) -> list[Any]:
            assert group is comm.MP_GROUP
            other = answers.pop(0)
            return [obj, other] if rank == 0 else [other, obj]

        self._monkeypatch.setattr(comm, "allgather", allgather)
        return fake


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    return Replica(monkeypatch)


def test_ranks_save_their_part_and_gather_the_whole(replica: Replica) -> None:
    inner = torch.optim.AdamW(replica.parameters, lr=0.1)
    optimizer = smp.DistributedOptimizer(inner)
    train(replica.model, optimizer)
    whole = copy.deepcopy(inner.state_dict())
    replica.become(1, []).prepare()
    second_part = optimizer.local_state_dict()
    assert list(second_part["state"]) == [2, 3]
    replica.become(0, [second_part["state"]]).prepare()
    assert list(optimizer.local_state_dict()["state"]) == [0, 1]
    gathered = optimizer.state_dict()
    assert PARTIAL_MARK not in gathered and list(gathered["state"]) == [0, 1, 2, 3]
    for index, entry in whole["state"].items():
        assert torch.equal(entry["exp_avg"], gathered["state"][index]["exp_avg"])


def test_a_full_state_is_loaded_after_partition_and_cut(replica: Replica) -> None:
    source = torch.optim.AdamW(replica.parameters, lr=0.1)
    train(replica.model, source)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(replica.parameters, lr=0.7))
    fake = replica.become(1, [])
    optimizer.load_state_dict(source.state_dict())
    assert not optimizer.state
    fake.prepare()
    assert set(optimizer.state) == set(replica.parameters[2:])
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("same_partition", [True, False])
def test_partial_states_are_merged_when_the_partition_has_moved(
    replica: Replica, same_partition: bool
) -> None:
    source = torch.optim.AdamW(replica.parameters, lr=0.1)
    train(replica.model, source)
    whole = source.state_dict()
    held = [{0, 1}, {2, 3}] if same_partition else [{0, 1, 2}, {3}]
    parts = [{i: e for i, e in whole["state"].items() if i in indices} for indices in held]
    answers: list[Any] = [(held[0], {0, 1}, True)]
    if not same_partition:
        answers.append(parts[0])
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(replica.parameters, lr=0.7))
    replica.become(1, answers).prepare()
    optimizer.load_state_dict({**whole, "state": parts[1], PARTIAL_MARK: True})
    assert set(optimizer.state) == set(replica.parameters[2:])
    for index in (2, 3):
        loaded = optimizer.state[replica.parameters[index]]
        assert torch.equal(loaded["exp_avg"], whole["state"][index]["exp_avg"])


def test_a_rank_without_parameters_steps(replica: Replica) -> None:
    class FailsOnNothing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise AssertionError("called without anything to update")

    optimizer = smp.DistributedOptimizer(FailsOnNothing(replica.parameters, lr=0.1))
    replica.become(0, [], num_local=0).prepare()
    assert optimizer.step() is None
    with torch.no_grad():
        assert optimizer.step(torch.is_grad_enabled) is True


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_matches_torch_in_one_process(
    norm_type: float, max_norm: float, dtype: torch.dtype
) -> None:
    models = [make_model().to(dtype) for _ in range(2)]
    for model in models:
        model(torch.ones(3, 5, dtype=dtype)).square().sum().backward()
        model[0].bias.grad = None
    ours = smp.clip_grad_norm_(models[0].parameters(), max_norm, norm_type)
    theirs = torch.nn.utils.clip_grad_norm_(models[1].parameters(), max_norm, norm_type)
    torch.testing.assert_close(ours, theirs)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


def test_clipping_counts_a_repeated_parameter_once() -> None:
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    assert float(smp.clip_grad_norm_([p, p], 1.0)) == 2.0
    torch.testing.assert_close(p.grad, torch.full((4,), 0.5))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD([p], lr=0.1))
    assert abs(float(optimizer.clip_grad_norm(0.1)) - 1.0) < 1e-5
    assert float(smp.clip_grad_norm_(p, 10.0)) <= 0.1
    assert float(smp.clip_grad_norm_([], 1.0)) == 0.0


def test_clipping_adds_up_over_pipeline_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(torch.zeros(1))
    elsewhere = nn.Parameter(torch.zeros(0, dtype=torch.float64))  # as on its owner

    def gather(rank: Rank, numbers: Tensor, kind: str) -> Tensor:
        return (
            torch.stack([numbers, torch.full_like(numbers, 16.0)])
            if kind == "mp"
            else numbers[None]
        )

    monkeypatch.setattr(device_numbers, "gather", gather)
    for norm_type, expected in ((2.0, 5.0), (float("inf"), 16.0)):
        for parameters, dtype in (([p], torch.float32), ([p, elsewhere], torch.float64)):
            p.grad = torch.full((1,), 3.0)
            norm = smp.clip_grad_norm_(parameters, 1.0, norm_type)
            assert norm.dtype == dtype and float(norm) == expected
            torch.testing.assert_close(p.grad, torch.full((1,), 3.0 / expected))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_tells_of_norms_that_are_not_finite(bad: float) -> None:
    p = nn.Parameter(torch.zeros(2))
    for norm_type in (2.0, float("inf")):
        p.grad = torch.tensor([1.0, bad])
        with pytest.raises(RuntimeError, match="norm of the gradients is"):
            smp.clip_grad_norm_([p], 1.0, norm_type, error_if_nonfinite=True)
        assert p.grad[0] == 1.0
        assert not torch.isfinite(smp.clip_grad_norm_([p], 1.0, norm_type))


def test_clipping_refuses_what_is_no_norm() -> None:
    for norm_type in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="norm_type"):
            smp.clip_grad_norm_([], 1.0, norm_type)
    with pytest.raises(ValueError, match="max_norm"):
        smp.clip_grad_norm_([], -1.0)
    assert _C.rank_prefix() != ""
