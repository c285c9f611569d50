"""State that is not one number per element of a trained parameter, on other layouts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.dist.resume_training import State, state_of
from tests.harness import train_step_of

EXTRA = "counting._extra_state"


class Counting(nn.Module):
    """Says something of itself that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Odd(nn.Module):
    """Contains buffers, odd parameters, and one parameter with two names.

    Some parameters are frozen, some have no elements, one has no dim and one is never used.
    """

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("numbers", torch.arange(4))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.counting = Counting()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(3, 0))
        self.unused = nn.Linear(3, 5)
        self.left = nn.Linear(6, 6, bias=False)
        self.right = nn.Linear(6, 6, bias=False)
        if tied:
            self.right.weight = self.left.weight

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.numbers += 2
        x = self.counting(self.frozen(self.norm(self.first(x)))) + self.none.sum()
        return self.right(self.left(x).tanh()) * self.scale


@dataclass(frozen=True)
class Way:
    """A layout, and the optimizer."""

    pp: int
    sharding: str
    optimizer: str
    tied: bool = True
    half: bool = False

    @property
    def rdp(self) -> int:
        return 1 if self.sharding == "none" else 2

    @property
    def world_size(self) -> int:
        return self.pp * self.rdp


def make_odd(way: Way, seed: int) -> tuple[Any, Any, Any]:
    import smp

    config: dict[str, Any] = {
        "pipeline_parallel_degree": way.pp,
        "ddp": True,
        "shard_optimizer_state": way.sharding == "state",
        "bf16": way.half,
    }
    if way.sharding == "sdp":
        config |= {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
    smp.init(config)
    torch.manual_seed(seed)
    model = smp.DistributedModel(Odd(way.tied))
    optimizer = smp.DistributedOptimizer(OPTIMIZERS[way.optimizer](model))
    step = train_step_of(model)

    def train(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        step(torch.randn(8, 4, generator=generator))
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, train


def _novograd(model: Any) -> torch.optim.Optimizer:
    import smp

    return smp.optimizers.FusedNovoGrad(model.parameters(), lr=1e-2)


def _with_elements(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.numel()]


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "novograd": _novograd,
    "adafactor": lambda model: torch.optim.Adafactor(_with_elements(model), lr=1e-2),
    "adam_of_elements": lambda model: torch.optim.Adam(_with_elements(model), lr=1e-2),
}


def save_odd(rank: int, way: Way, folder: str) -> tuple[State, int]:
    import smp

    model, optimizer, train = make_odd(way, seed=1)
    train(0)
    train(1)
    smp.save_checkpoint(folder, "odd", model=model, optimizer=optimizer)
    smp.save_checkpoint(folder, "odd.bin", partial=False, model=model)
    return state_of(model, optimizer), model.get_module().counting.calls


def resume_odd(rank: int, way: Way, folder: str) -> tuple[State, int]:
    import smp

    model, optimizer, train = make_odd(way, seed=2)
    train(5)
    smp.resume_from_checkpoint(folder, "odd")
    state = state_of(model, optimizer)
    calls = model.get_module().counting.calls
    _check_extra_state(model, way, folder)
    train(2)
    return state, calls


def _check_extra_state(model: Any, way: Way, folder: str) -> None:
    """State dicts say what modules say of themselves, as those of a plain model do."""
    import smp

    whole = model.state_dict()
    assert list(whole) == list(Odd(way.tied).state_dict())
    calls = whole[EXTRA]["calls"]
    assert calls > 0
    model.load_state_dict({**whole, EXTRA: {"calls": calls + 100}})
    assert model.state_dict()[EXTRA] == {"calls": calls + 100}
    smp.resume_from_checkpoint(folder, "odd.bin", partial=False)
    assert model.state_dict()[EXTRA] == {"calls": calls}


PAIRS = tuple(
    (Way(*source), Way(*target))
    for optimizer in ("adam", "sgd", "novograd")
    for source, target in itertools.pairwise(
        (
            (1, "sdp", optimizer, True, False),
            (2, "none", optimizer, True, False),
            (1, "state", optimizer, True, True),
            (2, "sdp", optimizer, True, True),
            (1, "none", optimizer, True, True),
        )
    )
    if optimizer == "adam" or source[0] == 1
) + ((Way(2, "none", "adafactor"), Way(1, "none", "adafactor")),)


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_everything_comes_back(pool: Pool, tmp_path: Path, pair: tuple[Way, Way]) -> None:
    source, target = pair
    [(saved, calls), *_] = pool.run(source.world_size, save_odd, source, str(tmp_path))
    assert saved.model["seen"].tolist() == [2.0] * 3
    results = pool.run(target.world_size, resume_odd, target, str(tmp_path))
    assert any(result[1] == calls > 0 for result in results), [r[1] for r in results]
    for loaded, _ in results:
        for name, tensor in saved.model.items():
            expected = tensor
            if source.half != target.half and tensor.is_floating_point():
                expected = _master(saved, name, tensor)
            if target.half and tensor.is_floating_point():
                expected = expected.bfloat16()
            assert torch.equal(loaded.model[name].to(expected.dtype), expected), name
        entries, others = saved.optimizer["state"], loaded.optimizer["state"]
        for index, entry in entries.items():
            for key, value in entry.items():
                if key != "_smp_master":
                    assert torch.equal(value, others[index][key]), f"{key} of {index}"


def _master(saved: State, name: str, tensor: Tensor) -> Tensor:
    """Returns the optimizer's master of a trained 16-bit parameter, or its float32 value."""
    state = saved.optimizer["state"]
    masters = [entry["_smp_master"] for entry in state.values() if "_smp_master" in entry]
    fitting = [m for m in masters if m.shape == tensor.shape and torch.equal(m.bfloat16(), tensor)]
    return fitting[0] if fitting else tensor.float()


def resume_factored(rank: int, folder: str) -> str:
    import smp

    model, optimizer, _ = make_odd(Way(1, "sdp", "adam_of_elements"), seed=2)
    try:
        smp.resume_from_checkpoint(folder, "odd")
    except RuntimeError as error:
        assert model is not None and optimizer is not None
        return str(error)
    return "no error"


def test_factored_moments_need_equal_cuts(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, save_odd, Way(1, "none", "adafactor"), str(tmp_path))
    for text in pool.run(2, resume_factored, str(tmp_path)):
        assert "another shape than the parameter" in text and "load_optimizer=False" in text


def test_ties_may_be_made_and_untied(pool: Pool, tmp_path: Path) -> None:
    [(saved, _), *_] = pool.run(2, save_odd, Way(1, "sdp", "adam", tied=True), str(tmp_path))
    [(loaded, _), *_] = pool.run(2, resume_odd, Way(2, "none", "adam", tied=False), str(tmp_path))
    assert torch.equal(loaded.model["left.weight"], saved.model["left.weight"])
    assert torch.equal(loaded.model["right.weight"], saved.model["left.weight"])


def resume_masters(rank: int, folder: str) -> tuple[State, float]:
    import smp

    model, optimizer, train = make_odd(Way(1, "sdp", "adam", half=True), seed=2)
    optimizer.param_groups[0]["lr"] = 0.125
    smp.resume_from_checkpoint(folder, load_sharded_optimizer_state=False)
    return state_of(model, optimizer), optimizer.param_groups[0]["lr"]


def test_masters_alone(pool: Pool, tmp_path: Path) -> None:
    way = Way(2, "none", "adam", half=True)
    [(saved, _), *_] = pool.run(2, save_odd, way, str(tmp_path))
    for loaded, rate in pool.run(2, resume_masters, str(tmp_path)):
        assert rate == 0.125
        num_masters = 0
        for index, entry in loaded.optimizer["state"].items():
            assert set(entry) == {"_smp_master"}, "moments are not loaded"
            assert torch.equal(entry["_smp_master"], saved.optimizer["state"][index]["_smp_master"])
            num_masters += 1
        assert num_masters >= 6
