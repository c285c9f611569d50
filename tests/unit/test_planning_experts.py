"""Mixtures in ``smp plan``: experts spread over ranks, their memory and what they send."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from smp_cli.main import main
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from smp.config.processes import check_world
from smp.config.schema import Config
from smp.planning.estimate import estimate
from smp.planning.groups import other_ranks
from smp.planning.hardware import Hardware, Link
from smp.planning.layout import Layout
from smp.planning.profile import ModelProfile
from smp.planning.run_cuts import Run, View
from smp.planning.search import Job, layouts, predict
from smp.planning.step_time import sent_bytes
from smp.planning.traced_model import TracedModel

HERE = "tests.unit.test_planning_experts"
LAYERS, EXPERTS, ROUTED, HIDDEN, TOKENS = 3, 8, 2, 64, 32
DEVICE = Hardware(
    name="made up",
    source="",
    flops={"fp32": 1e12, "bf16": 1e12},
    product_share=1.0,
    memory_bytes=10**9,
    memory_bytes_per_s=1e11,
    inside=Link(1e10, 1e-6),
    between=Link(1e9, 1e-5),
    host_copy_bytes_per_s=1e10,
)


def mixtral() -> nn.Module:
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=128,
            hidden_size=HIDDEN,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=8,
            num_key_value_heads=8,
            num_local_experts=EXPERTS,
            num_experts_per_tok=ROUTED,
            max_position_embeddings=TOKENS,
            use_cache=False,
        )
    )


def meta_model() -> nn.Module:
    with torch.device("meta"):
        return mixtral().train()


@pytest.fixture(scope="module")
def mixture() -> ModelProfile:
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    return TracedModel(meta_model(), (), {"input_ids": ids, "labels": ids}, 10.0).profile()


def job_of(model: ModelProfile, num_ranks: int, per_host: int = 8) -> Job:
    return Job(View(model), DEVICE, num_ranks, per_host, 10**9, 16, "fp32")


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("routed", [1, 2, 4])
def test_ranks_that_a_token_goes_to_are_counted(num_ranks: int, routed: int) -> None:
    """Against all choices of experts, seen from rank 0."""
    per_rank = EXPERTS // num_ranks
    choices = list(itertools.combinations(range(EXPERTS), routed))
    others = [len({expert // per_rank for expert in chosen} - {0}) for chosen in choices]
    assert other_ranks(num_ranks, EXPERTS, routed) == pytest.approx(sum(others) / len(choices))


def test_profile_knows_experts(mixture: ModelProfile) -> None:
    layers = [part for part in mixture.parts if part.is_layer]
    assert (mixture.experts, mixture.routed, len(layers)) == (EXPERTS, ROUTED, LAYERS)
    experts = EXPERTS * 3 * HIDDEN * 96
    for part in layers:
        assert (part.num_products, part.num_mixtures) == (2, 1)  # attention and experts
        split = sum(weight.elements for weight in part.weights if weight.is_split)
        assert split >= experts + 4 * HIDDEN**2
        # A row and a result of each expert of a token.
        assert part.routed_kept == pytest.approx(2 * ROUTED * TOKENS * HIDDEN * 4)
        assert part.routed_kept <= part.kept.whole
    assert mixture.elements == sum(p.numel() for p in meta_model().parameters())


def test_spread_experts_keep_the_same_state_and_fewer_rows(mixture: ModelProfile) -> None:
    by_features = Layout(tp=4, microbatch=4)
    spread = replace(by_features, spreads_experts=True)
    job = job_of(mixture, 4)
    (cut,), (own,) = predict(job, by_features).held, predict(job, spread).held
    assert (own.parameters, own.gradients, own.optimizer) == (
        cut.parameters,
        cut.gradients,
        cut.optimizer,
    )
    rows = LAYERS * 2 * ROUTED * TOKENS * HIDDEN * 4
    assert cut.activations - own.activations == pytest.approx(4 * rows * (1 - 1 / 4))
    assert own.activations > 0


def test_bytes_of_the_all_to_all_are_those_of_tokens_that_leave(mixture: ModelProfile) -> None:
    layout = Layout(tp=4, rdp=2, microbatch=2, microbatches=2, active=2, spreads_experts=True)
    plan = predict(job_of(mixture, 8, per_host=4), layout)
    num_bytes = 2 * TOKENS * HIDDEN * 4
    leaving = other_ranks(4, EXPERTS, ROUTED) * num_bytes / 4
    # Dispatch and combine, and a gather of results; forward and backward; microbatches and layers.
    expected = 2 * 2 * LAYERS * (2 * leaving + num_bytes * 3 / 4)
    sent = sent_bytes(plan.stages, layout, plan.grid)
    assert sent["experts"] == pytest.approx(expected)
    assert sent["tensor"] == pytest.approx(2 * 4 * LAYERS * num_bytes * 3 / 4)  # attention alone
    by_link = plan.sent()
    assert by_link["inside"] == pytest.approx(sent["experts"] + sent["tensor"])
    assert by_link["between"] == pytest.approx(sent["reduce"]) and sent["reduce"] > 0
    slow = replace(DEVICE, inside=Link(1e8, 1e-6))
    late = predict(replace(job_of(mixture, 8, per_host=4), hardware=slow), layout)
    assert late.bound == "exchange in layers" and late.time.total > plan.time.total


def test_search_spreads_experts_where_they_divide_and_configurations_are_accepted(
    mixture: ModelProfile,
) -> None:
    found = list(layouts(job_of(mixture, 8)))
    spread = [layout for layout in found if layout.spreads_experts]
    assert {layout.tp for layout in spread} == {2, 4, 8}
    assert not any(layout.in_memory for layout in found)
    for layout in spread[::50]:
        config = Config.from_dict(layout.config())
        check_world(config, 8)
        assert config.expert_parallel_degree == layout.tp and f"ep {layout.tp}" in layout.text()
    odd = replace(mixture, experts=6)
    assert {x.tp for x in layouts(job_of(odd, 8)) if x.spreads_experts} == {2}
    plain = replace(mixture, experts=0)
    assert not any(layout.spreads_experts for layout in layouts(job_of(plain, 8)))


@pytest.mark.parametrize("spreads", [False, True])
def test_memory_is_that_of_the_estimate(mixture: ModelProfile, spreads: bool) -> None:
    layout = Layout(tp=2, microbatch=8, spreads_experts=spreads)
    values = layout.config()
    ids = torch.zeros(8, TOKENS, dtype=torch.long)
    run = Run(Config.from_dict(values), frozenset(values), 2)
    (stage,) = estimate(meta_model(), (), {"input_ids": ids, "labels": ids}, run).stages
    (held,) = predict(job_of(mixture, 2), layout).held
    assert held.peak == pytest.approx(stage.held.peak, rel=0.05)
    assert held.activations == pytest.approx(stage.held.activations, rel=0.05)


def test_table_shows_degrees_of_experts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"{HERE}:mixtral", "--gpus", "2", "--per-host", "2", "--batch", "2"]
    assert main([*words, "--hardware", "a100", "--memory", "5400kB"]) == 0
    assert "tp 2, ep 2, dp 1" in capsys.readouterr().out
