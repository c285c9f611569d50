"""A seed gives the same model in every layout, split or not, delayed or not, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dist.pool import Pool
from tests.reference.data import compute_loss, make_batch
from tests.reference.families import build_family

State = dict[str, Tensor]
# pp, tp, dp; three ranks share ten columns unevenly
LAYOUTS = {
    "hf/gpt2": [(1, 1, 2), (2, 1, 1), (2, 2, 2)],
    "hf/gptj": [(1, 2, 2)],
    "hf/bert": [(1, 2, 2)],
    "own": [(2, 1, 1), (1, 3, 3)],
}


class Own(nn.Module):
    """A module of this library between modules of torch, one of them initialised specially."""

    def __init__(self) -> None:
        super().__init__()
        import smp

        self.table = nn.Embedding(41, 12)
        self.split = smp.nn.DistributedLinear(12, 10)
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 41)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.head.weight, std=0.5)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Tensor:
        hidden = self.norm(self.split(self.table(input_ids)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def make(case: str) -> nn.Module:
    return Own() if case == "own" else build_family(case)


def initial_state(rank: int, layout: tuple[int, int, int], case: str, split: bool) -> list[State]:
    """The whole model at once and delayed, under the names of the plain model."""
    import smp

    pp, tp, dp = layout
    states = []
    for delayed in (False, True):
        smp.init(
            {
                "pipeline_parallel_degree": pp,
                "tensor_parallel_degree": tp,
                "ddp": True,
                "delayed_parameter_initialization": delayed,
                "skip_tracing": True,
            }
        )
        torch.manual_seed(100 + rank)  # of creation, which does not matter
        with smp.model_creation(tensor_parallelism=split, zero_init=True):
            plain = make(case)
        assert all(p.is_meta for p in plain.parameters()) == delayed
        torch.manual_seed(3)
        model = smp.DistributedModel(plain)
        torch.manual_seed(4)  # nor does that of the first step

        @smp.step
        def evaluate(batch: dict[str, Tensor], model: nn.Module = model) -> Tensor:
            return model(**batch) if case == "own" else compute_loss(case, model, batch)

        batch = make_batch("hf/gpt2" if case == "own" else case, torch.float32, 0, 0)
        with torch.no_grad():
            loss = evaluate(batch)
        assert bool(torch.as_tensor(loss.reduce_mean()).isfinite())
        held = sum(p.numel() for p in model.local_parameters())
        total = sum(p.numel() for p in model.get_module().parameters())
        assert (held < total) == (pp > 1)
        if split:
            assert any(True for _ in model.distributed_modules()), "nothing is split"
        state = model.state_dict()
        for to_theirs, _ in smp.state.module_manager.translate_functions:
            state = to_theirs(state)
        states.append({k: v.clone() for k, v in state.items() if isinstance(v, Tensor)})
        smp.shutdown()
    return states


@pytest.mark.parametrize("case", LAYOUTS)
def test_initial_values_are_those_of_the_name(pool: Pool, case: str) -> None:
    ((expected, also),) = pool.run(1, initial_state, (1, 1, 1), case, False)
    check(expected, also, "delayed")
    for layout in LAYOUTS[case]:
        split = layout[1] > 1 and case != "own"
        for held in pool.run(layout[0] * layout[2], initial_state, layout, case, split):
            for state, how in zip(held, ("at once", "delayed"), strict=True):
                check(expected, state, f"{layout} {how}")


def check(expected: State, state: State, where: str) -> None:
    assert expected.keys() <= state.keys(), where
    for name, value in expected.items():
        assert torch.equal(state[name], value), f"{where}: {name}"


# ---- sharded parameters ----------------------------------------------------------------


def sharded_state(rank: int, degree: int, tp: int, zero_init: bool) -> tuple[State, int, int]:
    """The model, the most elements that were real at once, and those of the largest module."""
    import smp
    from smp.storage.shards import Cutter

    smp.init(
        {
            "ddp": True,
            "tensor_parallel_degree": tp,
            "sharded_data_parallel_degree": degree,
            "sdp_param_persistence_threshold": 0,
        }
    )
    torch.manual_seed(100 + rank)
    with smp.model_creation(tensor_parallelism=tp > 1, zero_init=zero_init):
        plain = build_family("hf/gpt2")
    most = 0
    cut = Cutter.cut

    def watched(self: Cutter, parameter: nn.Parameter) -> None:
        nonlocal most
        real = (p for p in self.shards if not p.is_meta and not p.untyped_storage().nbytes() <= 16)
        most = max(most, sum(p.numel() for p in real))
        cut(self, parameter)

    Cutter.cut = watched  # type: ignore[method-assign]
    try:
        torch.manual_seed(3)
        model = smp.DistributedModel(plain)
    finally:
        Cutter.cut = cut  # type: ignore[method-assign]
    modules = model.get_module().modules()
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in modules)
    assert all(p.ds_tensor.ds_numel == -(-p.ds_numel // degree) for p in model.parameters())
    state = model.state_dict()
    for to_theirs, _ in smp.state.module_manager.translate_functions:
        state = to_theirs(state)
    return {k: v.clone() for k, v in state.items() if isinstance(v, Tensor)}, most, largest


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 2)])
def test_shards_are_cut_as_soon_as_a_module_has_its_values(pool: Pool, ranks: int, tp: int) -> None:
    ((expected, _),) = pool.run(1, initial_state, (1, 1, 1), "hf/gpt2", False)
    for zero_init in (False, True):
        for state, most, largest in pool.run(ranks, sharded_state, 2, tp, zero_init):
            check(expected, state, f"zero_init {zero_init}")
            assert (most <= largest) == zero_init
