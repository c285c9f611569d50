"""Experts on different ranks train on as the same model on any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.expert_training import ExpertRun, init_experts, make_model, reference_of
from tests.dist.pool import Pool
from tests.dist.steps import make_optimizer
from tests.harness import labelled_loss, train_step_of
from tests.reference.expert_families import EXPERT_FAMILIES, build_experts, make_expert_batch
from tests.reference.tolerances import assert_close

State = dict[str, Tensor]


def train_on(
    rank: int, run: ExpertRun, spreads: bool, folder: str, first_step: int, steps: int
) -> tuple[State, set[str]]:
    """Resumes, unless it is the first step, and trains.

    Returns:
        the whole parameters, and how the experts of the layers here are held.
    """
    import smp

    init_experts(run, spreads)
    model, plain = make_model(run)
    optimizer = smp.DistributedOptimizer(make_optimizer(model.parameters()))
    if first_step:
        smp.resume_from_checkpoint(folder)

    train_step = train_step_of(model, labelled_loss)
    for step in range(first_step, first_step + steps):
        train_step(make_expert_batch(smp.rdp_rank(), step))
        optimizer.step()
        optimizer.zero_grad()
    smp.save_checkpoint(folder, f"after{first_step}", model=model, optimizer=optimizer)
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    held = {
        _held(parameter.shape, state[name].shape)
        for name, parameter in model.local_named_parameters()
        if ".mlp.experts." in name
    }
    smp.shutdown()
    return state, held


def _held(own: torch.Size, whole: torch.Size) -> str:
    """Returns how an expert parameter is cut on a rank; dim 0 of the whole one counts experts."""
    if own == whole:
        return "whole"
    return "features" if own[0] == whole[0] else "experts"


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss"])
def test_training_goes_on_with_other_numbers_of_ranks(
    pool: Pool, case: str, tmp_path: Path
) -> None:
    features = "features" if case == "mixtral" else "whole"  # gpt-oss has no plan for them
    legs = [  # tp, pp, how experts are held; the state of AdamW goes along
        (2, 1, "experts"), (2, 1, features), (4, 1, "experts"), (1, 1, "whole"),
        (2, 2, "experts"), (4, 1, features), (2, 1, "experts"),
    ]  # fmt: skip
    states: list[State] = []
    for step, (tp, pp, how) in enumerate(legs):
        run = ExpertRun(case, tp, pp=pp, prescaled=True)
        results = pool.run(run.world_size, train_on, run, how == "experts", str(tmp_path), step, 1)
        states = [state for state, _ in results]
        assert how in set.union(*(held for _, held in results)), f"leg {step}"
        if how == "experts":
            assert all(held == {"experts"} for _, held in results), f"leg {step}: {results[0][1]}"
    expected = reference_of(case, torch.float64, 1, 2, len(legs), False).params
    for state in states:
        got = {name: state[name] for name in expected}
        assert_close(got, expected, torch.float64, "parameters after all legs", 1e-9)


def initial_state(rank: int, layout: tuple[int, int, int], case: str) -> list[State]:
    """The whole model at once and delayed."""
    import smp

    pp, tp, dp = layout
    states = []
    for delayed in (False, True):
        smp.init(
            {
                "pipeline_parallel_degree": pp,
                "tensor_parallel_degree": tp,
                "expert_parallel_degree": tp,
                "ddp": True,
                "delayed_parameter_initialization": delayed,
                "skip_tracing": True,
            }
        )
        torch.manual_seed(100 + rank)  # of creation, which does not matter
        with smp.model_creation(tensor_parallelism=tp > 1, zero_init=True):
            plain = EXPERT_FAMILIES[case](frozenset({"nocache"}))
        assert all(p.is_meta for p in plain.parameters()) == delayed
        torch.manual_seed(3)
        model = smp.DistributedModel(plain)

        @smp.step
        def evaluate(batch: dict[str, Tensor], model: Any = model) -> Tensor:
            return model(**batch)["loss"]  # type: ignore[no-any-return]

        with torch.no_grad():
            loss = evaluate(make_expert_batch(0, 0))
        assert bool(torch.as_tensor(loss.reduce_mean()).isfinite())
        states.append({k: v.clone() for k, v in model.state_dict().items()})
        smp.shutdown()
    return states


def test_initial_values_are_those_of_the_name(pool: Pool) -> None:
    ((expected, also),) = pool.run(1, initial_state, (1, 1, 1), "mixtral")
    experts = [name for name in expected if ".experts." in name]
    assert experts and all(bool(expected[name].any()) for name in experts)
    wholes = [("delayed", also)]
    for layout in ((1, 2, 2), (2, 2, 2)):
        for at_once, delayed in pool.run(layout[0] * layout[2], initial_state, layout, "mixtral"):
            wholes += [(f"{layout} at once", at_once), (f"{layout} delayed", delayed)]
    for where, state in wholes:
        for name, value in expected.items():
            assert torch.equal(state[name], value), f"{where}: {name}"


def round_trip(rank: int, folder: str) -> dict[str, Any]:
    """Loads with from_pretrained, spreads, and takes a plain state dict."""
    import smp

    plain = build_experts("qwen3_moe", torch.float32)
    if rank == 0:
        plain.save_pretrained(folder)
    smp.init({"tensor_parallel_degree": 2, "expert_parallel_degree": 2, "ddp": True})
    smp.barrier()
    with smp.tensor_parallelism():
        loaded = type(plain).from_pretrained(folder)
    model = smp.DistributedModel(loaded)
    expected = plain.state_dict()
    state = model.state_dict()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(expected)
    again = model.state_dict()
    smp.shutdown()
    return {
        "keys": sorted(state) == sorted(expected),
        "loaded": [k for k, v in expected.items() if not torch.equal(state[k], v)],
        "restored": [k for k, v in expected.items() if not torch.equal(again[k], v)],
    }


def test_pretrained_weights_and_plain_state_dicts_are_taken_over(
    pool: Pool, tmp_path: Path
) -> None:
    for result in pool.run(2, round_trip, str(tmp_path)):
        assert result == {"keys": True, "loaded": [], "restored": []}
