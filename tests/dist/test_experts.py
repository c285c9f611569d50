"""Experts on different ranks equal one process: losses, auxiliary losses, norms, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.expert_training import ExpertRun, check_runs
from tests.dist.pool import Pool
from tests.reference.expert_families import EXPERT_FAMILIES, build_experts, make_expert_batch

FAMILIES = sorted(EXPERT_FAMILIES)


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("case", FAMILIES)
def test_two_ranks_share_the_experts_of_a_family(pool: Pool, case: str) -> None:
    check_runs(pool, [ExpertRun(case, 2, prescaled=prescaled) for prescaled in (False, True)])


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("case", FAMILIES)
def test_four_ranks_share_the_experts_of_a_family(pool: Pool, case: str) -> None:
    check_runs(pool, [ExpertRun(case, 4, prescaled=prescaled) for prescaled in (False, True)])


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("case", FAMILIES)
def test_experts_are_spread_inside_of_a_pipeline(pool: Pool, case: str) -> None:
    check_runs(pool, [ExpertRun(case, 2, pp=2, prescaled=prescaled) for prescaled in (False, True)])


def test_experts_have_replicas_over_which_their_gradients_are_summed(pool: Pool) -> None:
    check_runs(
        pool,
        [ExpertRun("mixtral", 2, rdp=2, prescaled=prescaled) for prescaled in (False, True)],
    )


def test_grouped_products_in_float32(pool: Pool) -> None:
    check_runs(
        pool,
        [ExpertRun(case, 2, dtype=torch.float32) for case in ("mixtral", "gpt_oss")],
    )


@pytest.mark.parametrize(
    "config",
    [
        {"shard_optimizer_state": True},
        {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0},
    ],
    ids=["optimizer", "parameters"],
)
def test_state_of_experts_is_sharded_over_their_replicas(
    pool: Pool, config: dict[str, object]
) -> None:
    more = {**config, "sdp_gradient_clipping": 0} if len(config) > 1 else config
    check_runs(pool, [ExpertRun("mixtral", 2, rdp=2, config=tuple(more.items()))])


def test_layers_with_experts_are_computed_again_in_backward(pool: Pool) -> None:
    check_runs(
        pool,
        [ExpertRun("mixtral", 2, checkpointing=True), ExpertRun("gpt_oss", 2, checkpointing=True)],
    )


def test_a_favourite_is_one() -> None:
    model: Any = build_experts("gpt_oss", torch.float64, favourite=True)
    chosen = []
    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
    model(**make_expert_batch(0, 0))
    assert len(chosen) == 2 and all(set(ids.flatten().tolist()) == {0, 1} for ids in chosen)


def test_all_tokens_may_go_to_the_experts_of_one_rank(pool: Pool) -> None:
    check_runs(
        pool,
        [
            ExpertRun("gpt_oss", 4, prescaled=prescaled, favourite=True)
            for prescaled in (False, True)
        ],
    )
