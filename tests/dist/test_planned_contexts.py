"""A plan with parts of sequences has the partition of a run, and its messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from smp.planning.layout import Layout
from smp.planning.run_cuts import View
from smp.planning.search import Job, predict, search
from smp.planning.step_time import sent_bytes
from tests.dist.pool import Pool
from tests.made_up_hardware import MADE_UP

TOKENS, WIDTH, SAMPLES = 64, 64, 2


def make_model(key_heads: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        intermediate_size=128,
        vocab_size=96,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def job_of(key_heads: int, num_ranks: int) -> Job:
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    with torch.device("meta"):
        model = make_model(key_heads)
    view = View.of(model, ((), {"input_ids": ids, "labels": ids}), MADE_UP, "fp32")
    return Job(view, MADE_UP, num_ranks, num_ranks, MADE_UP.memory_bytes, SAMPLES, "fp32")


def run(rank: int, key_heads: int, config: dict[str, Any]) -> tuple[int, int, int]:
    """Returns bytes sent to context-parallel peers in the second step, and those of parameters."""
    import smp

    smp.init(config)
    model = smp.DistributedModel(make_model(key_heads))

    @smp.step
    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=ids, labels=ids)["loss"]
        model.backward(loss)
        return loss

    traffic = model._engine._current.rank.comms.cp_group.traffic
    ids = torch.randint(96, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    step(ids)
    before = traffic()[1]
    step(ids)
    own = sum(p.numel() * p.element_size() for p in model.local_parameters())
    return traffic()[1] - before, own, sum(b.num_cut > 0 for b in model._engine.sequences.blocks)


@pytest.mark.parametrize(("cp", "key_heads"), [(2, 4), (2, 1), (4, 2)])
def test_bytes_between_ranks_are_within_a_tenth(pool: Pool, cp: int, key_heads: int) -> None:
    plan = predict(job_of(key_heads, cp), Layout(cp=cp, microbatch=SAMPLES))
    planned = sent_bytes(plan.stages, plan.layout, plan.grid)["context"]
    for sent, _, num_cut in pool.run(cp, run, key_heads, plan.layout.config()):
        assert num_cut == 4 and sent == pytest.approx(planned, rel=0.1)


def test_pipelines_have_the_planned_partition_and_bytes(pool: Pool) -> None:
    plan = predict(job_of(4, 4), Layout(pp=2, cp=2, microbatches=SAMPLES, active=2))
    config = plan.layout.config()
    results = pool.run(4, run, 4, config)
    planned = [0, 0]
    for stage in plan.stages:
        planned[stage.rank] += 4 * sum(part.elements for part in stage.parts)
    assert sorted({own for _, own, _ in results}) == sorted(planned)
    names = [part.name for stage in plan.stages for part in stage.parts if part.is_layer]
    assert names == [f"model.layers.{idx}" for idx in range(4)], "blocks are not divided"
    expected = sent_bytes(plan.stages, plan.layout, plan.grid)["context"]
    assert max(sent for sent, _, _ in results) == pytest.approx(expected, rel=0.1)


def test_long_sequences_of_few_samples_are_shared() -> None:
    job = replace(job_of(4, 4), samples=1)
    best = search(job).plans[0].layout
    assert best.cp * best.tp * best.pp == 4 and best.cp > 1
    assert all(plan.layout.rdp == 1 for plan in search(job).plans)
