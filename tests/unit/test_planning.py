"""``smp plan``: published runs, closed forms, the estimate of the same layout, and the command."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from smp_cli.main import main
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from benchmarks.models import Gpt, GptShape
from smp.commands.plan import layout_texts
from smp.config.processes import check_world
from smp.config.schema import Config
from smp.planning import hardware, search
from smp.planning.estimate import estimate
from smp.planning.groups import Grid, reach
from smp.planning.hardware import Hardware, Link
from smp.planning.layout import Layout
from smp.planning.profile import Amount, ModelProfile, Part, Weight
from smp.planning.run_cuts import Run, View
from smp.planning.search import Job, predict
from smp.planning.stages import cut
from smp.planning.traced_model import TracedModel
from tests.conftest import REPO

HERE = "tests.unit.test_planning"
PUBLISHED = json.loads((REPO / "tests" / "unit" / "published_runs.json").read_text())
TOLERANCE = 0.15
SMALL = GptShape(4, 256, 4, 512, 64)


def untied(found: ModelProfile, num_layers: int) -> ModelProfile:
    """Megatron-LM has the embedding on the first rank and on the last one."""
    layers = [part for part in found.chain if part.is_layer]
    begin, end = (found.chain.index(layer) for layer in (layers[0], layers[-1]))
    parts = (*found.chain[:begin], *num_layers * [layers[1]], *found.chain[end + 1 :])
    return replace(found, parts=parts, tail=None)


def published_model(run: dict[str, Any]) -> nn.Module:
    """Two layers of it, with attention of its time."""
    if run["kind"] == "gpt":
        config: Any = GPT2Config(
            n_layer=2,
            n_embd=run["hidden"],
            n_head=run["heads"],
            n_positions=run["tokens"],
            vocab_size=run["vocabulary"],
            use_cache=False,
            activation_function="gelu",
            attn_pdrop=0,
            resid_pdrop=0,
            embd_pdrop=0,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="eager",
        )
        cls: Any = GPT2LMHeadModel
    else:
        config = BertConfig(
            num_hidden_layers=2,
            hidden_size=run["hidden"],
            num_attention_heads=run["heads"],
            intermediate_size=4 * run["hidden"],
            vocab_size=run["vocabulary"],
            max_position_embeddings=run["tokens"],
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
            attn_implementation="eager",
        )
        cls = BertForMaskedLM
    with torch.device("meta"):
        model: nn.Module = cls(config)
    return model.to(torch.bfloat16).train()


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("run", PUBLISHED["runs"], ids=lambda run: run["name"])
def test_published_run_is_predicted(run: dict[str, Any]) -> None:
    device = hardware.load(run["hardware"])
    ids = torch.zeros(1, run["tokens"], dtype=torch.long)
    rate = device.flops_per_byte("bf16")
    traced = TracedModel(published_model(run), (), {"input_ids": ids, "labels": ids}, rate)
    model = untied(traced.profile(), run["layers"])
    assert model.elements == pytest.approx(1e9 * run["billions"], rel=0.03)
    layout = Layout(
        pp=run["pp"],
        tp=run["tp"],
        rdp=run["rdp"],
        shard=run["shard"],
        shards_parameters=run["shard"] > 1,
        microbatch=run["microbatch"],
        microbatches=run["batch"] // run["rdp"] // run["microbatch"],
        active=run["pp"],
        checkpoints=True,
        precision="bf16",
        device="cuda",
    )
    assert layout.samples == run["batch"]
    job = Job(View(model), device, layout.num_ranks, 8, device.memory_bytes, run["batch"], "bf16")
    plan = predict(job, layout)
    s, layers, h, v = run["tokens"], run["layers"], run["hidden"], run["vocabulary"]
    one = 96 * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))
    tflops = run["batch"] * one / plan.time.total / layout.num_ranks / 1e12
    print(f"{run['name']}: predicted {tflops:.0f}, published {run['tflops']} TFLOP/s per GPU")
    assert tflops == pytest.approx(run["tflops"], rel=TOLERANCE)
    assert plan.peak_bytes < device.memory_bytes  # it ran


@pytest.mark.sample(keep=0)
def test_peaks_are_those_of_the_estimate() -> None:
    """The plan has cuts and formulas of its own; the estimate has the library's partition."""
    ids = torch.zeros(1, SMALL.seq_len, dtype=torch.long)
    cases: list[tuple[dict[str, Any], Layout]] = [
        ({}, Layout()),
        ({"shard_optimizer_state": True}, Layout(rdp=4, shard=4)),
        ({"sharded_data_parallel_degree": 4}, Layout(rdp=4, shard=4, shards_parameters=True)),
        (
            {"pipeline_parallel_degree": 2, "microbatches": 8, "active_microbatches": 2},
            Layout(pp=2, microbatches=8, active=2),
        ),
        (
            {"tensor_parallel_degree": 2, "prescaled_batch": True},
            Layout(tp=2, in_memory=True),
        ),
    ]
    with torch.device("meta"):
        model = Gpt(SMALL, SMALL.num_layers).train()
    traced = TracedModel(model, (ids, ids), {}, 10.0).profile()
    for (values, layout), again in itertools.product(cases, (False, True)):
        config = Config.from_dict({"ddp": True, **values})
        run = Run(config, frozenset(values), layout.num_ranks, again)
        expected = max(s.held.peak for s in estimate(model, (ids, ids), {}, run).stages)
        job = Job(View(traced), CPU, layout.num_ranks, 8, 1, 1, "fp32")
        found = predict(job, replace(layout, checkpoints=again), simulated=False).peak_bytes
        assert found == pytest.approx(expected, rel=0.1), (values, again)


CPU = Hardware(
    name="",
    source="",
    flops={"fp32": 1e12, "bf16": 1e12},
    product_share=1.0,
    memory_bytes=10**9,
    memory_bytes_per_s=1e11,
    inside=Link(1e10, 1e-6),
    between=Link(1e9, 1e-5),
    host_copy_bytes_per_s=1e10,
)


def layer(idx: int, work: float = 1e9, input_bytes: float = 0.0) -> Part:
    return Part(
        f"layer {idx}",
        True,
        weights=(Weight(10**6, True),),
        forward=Amount(work),
        backward=Amount(2 * work),
        kept=Amount(1e6),
        input_bytes=input_bytes,
        num_products=2,
    )


def chain(num_layers: int, input_bytes: float = 0.0) -> ModelProfile:
    parts = tuple(layer(i, input_bytes=input_bytes) for i in range(num_layers))
    return ModelProfile(parts, None, 16, 8)


def job_of(model: ModelProfile, num_ranks: int, memory_bytes: int = 10**9) -> Job:
    return Job(View(model), CPU, num_ranks, 8, memory_bytes, 16, "fp32")


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 32])
def test_equal_stages_have_the_bubble_of_1f1b(pp: int, microbatches: int) -> None:
    layout = Layout(pp=pp, microbatches=microbatches, active=pp)
    plan = predict(job_of(chain(8), pp), layout)
    one = (3e9 / 1e12 + 12e6 / 1e11) * 8 / pp  # products, and sums of gradients
    assert plan.time.pipeline == pytest.approx((microbatches + pp - 1) * one, rel=0.01)
    assert sum(plan.shares().values()) == pytest.approx(1)
    bound = predict(job_of(chain(8), pp), layout, simulated=False)
    assert bound.time.total == pytest.approx(plan.time.total, rel=0.01)


def test_cut_is_the_best_of_all() -> None:
    weights = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    parts = tuple(layer(i, work) for i, work in enumerate(weights))
    for tail, num_stages in itertools.product((None, layer(9, 4.0)), (2, 3, 5, 8)):
        model = ModelProfile(parts, tail, 1, 1)
        stages = cut(model, num_stages, 1, lambda part: part.forward.split)
        by_rank = [0.0] * num_stages
        for stage in stages:
            assert stage.parts
            by_rank[stage.rank] += sum(part.forward.split for part in stage.parts)
        best = min(
            max(
                sum(weights[begin:end]) + (4.0 if tail and begin == 0 else 0.0)
                for begin, end in itertools.pairwise((0, *ends, len(weights)))
            )
            for ends in itertools.combinations(range(1, len(weights)), num_stages - 1)
        )
        assert max(by_rank) == pytest.approx(best)


def test_groups_that_leave_a_host_have_its_link() -> None:
    layout = Layout(pp=2, tp=4, rdp=4, placement="DPT")
    inside = reach(layout, "T", 4, 8, CPU)
    assert (inside.crosses, inside.link) == (False, CPU.inside)
    assert not reach(layout, "P", 2, 8, CPU).crosses
    across = reach(layout, "D", 4, 8, CPU)
    assert across.crosses and across.link.bytes_per_s == CPU.between.bytes_per_s
    near = reach(replace(layout, placement="PDT"), "D", 2, 8, CPU)
    assert not near.crosses and reach(replace(layout, placement="PDT"), "P", 2, 8, CPU).crosses
    # Eight ranks of a ring have the eight links of their host.
    whole = reach(Layout(rdp=16), "D", 16, 8, CPU)
    assert whole.link.bytes_per_s == 8 * CPU.between.bytes_per_s
    # A ring of n ranks sends (n - 1) / n of the bytes.
    assert inside.gather(4e9).seconds == pytest.approx(3 * (1e9 / 1e10 + 1e-6))


def test_ranks_that_read_one_batch_are_replicas_without_samples_of_their_own() -> None:
    keys = {
        "pipeline_parallel_degree": 2,
        "tensor_parallel_degree": 2,
        "context_parallel_degree": 2,
        "shard_optimizer_state": True,
        "microbatches": 3,
        "ddp": True,
    }
    layout = Layout.of(Config.from_dict(keys), 16, checkpoints=False, device="cpu")
    assert (layout.rdp, layout.cp, layout.shard, layout.num_ranks) == (2, 2, 4, 16)
    assert layout.samples == 3 * 2
    assert layout.axes == "DPCT" and layout.config()["context_parallel_degree"] == 2
    assert layout.text().startswith("pp 2, tp 2, cp 2, dp 2, opt 4")
    assert replace(layout, cp=1).axes == "DPT"


def test_context_ranks_exchange_over_the_links_beside_tensor_ranks() -> None:
    layout = Layout(pp=2, tp=2, rdp=2, cp=2, shard=2)
    assert not reach(layout, "C", 2, 4, CPU).crosses
    assert reach(layout, "C", 2, 2, CPU).crosses
    assert reach(layout, "P", 2, 4, CPU).crosses
    grid = Grid.of(layout, 4, CPU)
    assert (grid.shard.size, grid.shard.crosses) == (2, False)
    assert (grid.replicas.size, grid.replicas.crosses) == (2, True)
    alone = Grid.of(replace(layout, cp=1, rdp=4), 4, CPU)
    assert (alone.shard.size, alone.shard.crosses) == (2, True)


def test_each_plan_is_a_configuration_that_is_accepted_and_fits() -> None:
    job = job_of(chain(8, input_bytes=1e5), 16, 40 * 10**6)
    found = search.search(job)
    assert 0 < found.fitting < found.tried and len(found.plans) > 5
    times = [plan.time.total for plan in found.plans]
    assert times == sorted(times)
    for plan in found.plans:
        config = Config.from_dict(plan.layout.config())
        check_world(config, 16)
        assert plan.layout.samples == 16 and plan.peak_bytes <= 0.9 * job.memory_bytes
        assert config.microbatches == plan.layout.microbatches
        assert config.active_microbatches == plan.layout.active


def test_nothing_that_fits_names_the_nearest() -> None:
    found = search.search(job_of(chain(4), 2, 10**6))
    assert not found.plans and found.fitting == 0
    assert found.nearest is not None and found.nearest.peak_bytes > 10**6


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.zeros(1, SMALL.seq_len, dtype=torch.long)
    return Gpt(SMALL, 2), (ids, ids)


COMMAND = ["plan", f"{HERE}:gpt", "--gpus", "4", "--per-host", "2", "--batch", "16"]


def test_plans_without_gradients_have_one_microbatch_and_shard_nothing() -> None:
    job = replace(job_of(chain(8, input_bytes=1e5), 16), drops_gradients=True)
    found = search.search(job)
    assert len(found.plans) > 2
    for plan in found.plans:
        assert plan.layout.microbatches == plan.layout.shard == 1
        config = Config.from_dict(plan.layout.config())
        assert config.update_in_backward
        kept = predict(job, replace(plan.layout, drops_gradients=False))
        assert kept.peak_bytes >= plan.peak_bytes


@pytest.mark.sample(keep=0)
def test_command_prints_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert 2 <= len(plans) <= 10
    for plan in plans:
        assert plan["tokens_per_s"] == pytest.approx(16 * SMALL.seq_len / plan["step_s"])
        assert sum(plan["shares"].values()) == pytest.approx(1)
        Config.from_dict(plan["config"])
    assert main(COMMAND) == 0
    assert "all figures are predictions" in capsys.readouterr().out
    assert main([*COMMAND, "--explain", "2"]) == 0
    text = capsys.readouterr().out
    assert "embedding .. " in text and "Data-sheet figures" in text


def test_rows_with_equal_words_show_in_which_keys_they_differ() -> None:
    few, many = (Layout(pp=2, microbatches=4, active=active) for active in (2, 4))
    cut = Layout(tp=2, in_memory=True)
    assert layout_texts([few, cut, many, few]) == [
        f"{few.text()}, active_microbatches=2",
        cut.text(),
        f"{few.text()}, active_microbatches=4",
        f"{few.text()}, active_microbatches=2",
    ]
    texts = layout_texts([cut, replace(cut, in_memory=False, placement="TPD")])
    assert [text.removeprefix(f"{cut.text()}, ") for text in texts] == [
        "optimize=None, placement_strategy=DPT",
        "optimize=speed, placement_strategy=TPD",
    ]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--memory", "1MB"], 1, "the nearest, "),
        (["--batch", "1", "--memory", "1MB"], 1, "the nearest, "),
        (["--hardware", "abacus"], 2, "expected one of a100, h100, h200, p4d, p4de"),
        (["--per-host", "3"], 2, "--gpus 4 is no multiple of --per-host 3"),
        (["--seq", "64"], 2, "--seq has no effect"),
        (["--update-in-backward", "--batch", "7"], 1, "a replica has one microbatch, of 1, 2, 4"),
        (["--explain", "99"], 2, "--explain 99: there are"),
    ],
)
def test_command_ends_with_a_status_and_one_line(
    words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *words]) == status
    captured = capsys.readouterr()
    assert text in captured.err and captured.err.count("\n") == 1 and captured.out == ""


@pytest.mark.parametrize("name", hardware.names())
def test_device_of_the_package_names_its_source(name: str) -> None:
    device = hardware.load(name)
    assert "Data-sheet figures" in device.source and "nothing here was measured" in device.source
    assert hardware.read(json.dumps(device.to_json()), name) == device


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"memory_bytes": 0}, "memory_bytes has to be above 0"),
        ({"colour": "red"}, "colour"),
        ({"inside": {"bytes_per_s": -1, "latency_s": 0}}, "inside has to be above 0"),
    ],
)
def test_file_that_is_no_device_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hardware.read(json.dumps({**CPU.to_json(), **changes}), "file.json")
