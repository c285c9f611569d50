"""``smp plan`` and ``smp estimate`` for devices of several kinds."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from smp_cli.main import main
from torch import nn

from benchmarks.models import Gpt, GptShape
from smp.config.processes import check_world
from smp.config.schema import Config
from smp.planning import kinds
from smp.planning.estimate import estimate
from smp.planning.hardware import Link
from smp.planning.kinds import Kinds
from smp.planning.layout import Layout
from smp.planning.profile import Amount, ModelProfile, Part, Weight
from smp.planning.run_cuts import Run, View
from smp.planning.search import USABLE, Job, predict, search
from smp.planning.stages import Stage, cut
from smp.planning.step_time import step_time
from tests.made_up_hardware import MADE_UP

HERE = "tests.unit.test_planning_kinds"
SHAPE = GptShape(12, 64, 4, 128, 16)
SLOW = replace(
    MADE_UP,
    name="slow",
    flops={"fp32": 1e12},
    memory_bytes_per_s=1e15,
    inside=Link(1e13, 1e-9),
    between=Link(1e13, 1e-9),
    at_once=8,
)
FAST = replace(SLOW, name="fast", flops={"fp32": 2e12}, memory_bytes_per_s=2e15)


def chain(weights: list[float], tail: float = 0.0) -> ModelProfile:
    def layer(idx: int, work: float) -> Part:
        weight = (Weight(10**6, True),)
        work *= 1e9
        return Part(f"layer {idx}", True, weight, Amount(work), Amount(2 * work), Amount(1e6))

    parts = tuple(layer(idx, work) for idx, work in enumerate(weights))
    return ModelProfile(parts, layer(len(parts), tail) if tail else None, 1, 1)


def job_of(model: ModelProfile, devices: Kinds, samples: int = 16) -> Job:
    num_ranks = devices.num_ranks
    return Job(View(model), SLOW, num_ranks, num_ranks, 10**9, samples, "fp32", kinds=devices)


def of_slow_and_fast(*counts: int) -> Kinds:
    devices = tuple((SLOW, FAST)[idx % 2] for idx in range(len(counts)))
    return Kinds(devices, counts, tuple((1.0, 2.0)[idx % 2] for idx in range(len(counts))))


def num_layers(stages: tuple[Stage, ...] | list[Stage]) -> list[int]:
    return [sum(part.is_layer for part in stage.parts) for stage in stages]


def test_kinds_are_in_the_order_of_ranks() -> None:
    assert kinds.parse("a.json:2, b.json:1") == [("a.json", 2), ("b.json", 1)]
    assert kinds.parse("a.json") == [("a.json", None)]
    assert kinds.load("h200", 4).counts == (4,) and kinds.load("h200", 4).are_alike
    found = kinds.load("a100:2,h100:1,a100:1")
    assert found.kind_of == (0, 0, 1, 2) and not found.are_alike
    assert found.text.startswith("2 x NVIDIA A100") and found.devices[0] == found.devices[2]
    assert kinds.load("a100:2,a100:1").are_alike


@pytest.mark.parametrize(
    ("text", "num_ranks", "words"),
    [
        ("a100,h100:2", None, "'a100' in hardware 'a100,h100:2' has no number of devices"),
        ("a100:0,h100:2", None, "expected NAME:NUMBER for each kind in the order of ranks"),
        ("a100:2,", None, "'' in hardware"),
        ("a100:two", None, "'a100:two' in hardware"),
        ("a100", None, "expected a100:NUMBER"),
        ("a100:2,h100:1", 4, "is 3 devices, and there are 4 ranks"),
        ("abacus:2", None, "no hardware 'abacus'"),
    ],
)
def test_texts_that_are_no_kinds_are_refused(text: str, num_ranks: int | None, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kinds.load(text, num_ranks)


def test_devices_of_a_run_are_of_one_type(tmp_path: Path) -> None:
    file = tmp_path / "cpu.json"
    file.write_text(json.dumps(SLOW.to_json()))
    with pytest.raises(ValueError, match=f"h100 is of type cuda and {file} is of type cpu"):
        kinds.load(f"h100:1,{file}:1")


def test_links_of_several_kinds_are_the_slowest() -> None:
    other = replace(FAST, inside=Link(1e9, 1e-12), collective=Link(1e8, 1e-3), memory_bytes=10**8)
    found = kinds.slowest([other, SLOW], "fp32")
    assert (found.name, found.memory_bytes) == ("slow", 10**8)
    assert (found.inside, found.collective) == (Link(1e9, 1e-9), Link(1e8, 1e-3))


@pytest.mark.parametrize("speeds", [(1.0, 2.0, 1.0), (4.0, 1.0, 2.0), (9.0, 1.0, 9.0)])
@pytest.mark.parametrize("tail", [0.0, 4.0])
def test_cut_by_speeds_is_the_best_of_all(speeds: tuple[float, ...], tail: float) -> None:
    weights = [5.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]

    def load(ends: tuple[int, ...]) -> float:
        bounds = itertools.pairwise((0, *ends, len(weights)))
        return max(
            (sum(weights[begin:end]) + (tail if begin == 0 else 0.0)) / speed
            for (begin, end), speed in zip(bounds, speeds, strict=True)
        )

    stages = cut(
        chain(weights, tail), 3, 1, lambda part: part.forward.split or part.forward.total, speeds
    )
    ends = tuple(itertools.accumulate(len(stage.parts) for stage in stages[:2]))
    best = min(map(load, itertools.combinations(range(1, len(weights)), 2)))
    assert load(ends) == pytest.approx(best)


def test_stages_by_speed_take_equal_times_and_beat_the_cut_for_equal_devices() -> None:
    devices = of_slow_and_fast(1, 1, 1)
    job, layout = job_of(chain([1.0] * 12), devices), Layout(pp=3, microbatches=16, active=5)
    plan = predict(job, layout)
    assert num_layers(plan.stages) == [3, 6, 3]
    seconds = plan.rank_seconds()
    assert seconds == pytest.approx([3 * 3e-3] * 3, rel=0.01)
    assert plan.time.pipeline == pytest.approx(18 * 9e-3, rel=0.01)
    even = predict(replace(job, kinds=None), layout)
    assert num_layers(even.stages) == [4, 4, 4]
    unaware = step_time(even.stages, layout, even.grid, SLOW, 3, devices=job.devices(layout))
    assert unaware.pipeline > 1.25 * plan.time.pipeline
    assert plan.layout.config()["device_speeds"] == [1.0, 2.0, 1.0]
    assert "partition_memory_limit" not in plan.layout.config()


def test_a_pipeline_rank_waits_for_the_slowest_of_its_replicas() -> None:
    """Replicas 0 (slow, fast) and 1 (fast, fast) read samples by the sums of their speeds, 3:4."""
    devices = of_slow_and_fast(1, 3)
    job, layout = job_of(chain([1.0] * 8), devices, 28), Layout(pp=2, rdp=2, microbatches=7)
    (first, second) = devices.places(layout)
    assert {place.kind for place in first} == {0, 1} and {place.kind for place in second} == {1}
    assert sorted({place.share for place in (*first, *second)}) == pytest.approx([6 / 7, 8 / 7])
    rates = [device.rate("fp32") / 1e12 for device in job.devices(layout)]
    assert rates == pytest.approx([7 / 6, 7 / 4])
    assert devices.samples(layout, 28) == (12, 16)
    assert job.gives_samples_to_all(layout)
    assert not job.gives_samples_to_all(replace(layout, microbatches=14))
    held = predict(job, layout).held
    alike = predict(replace(job, kinds=None), layout).held
    assert held[1].activations > alike[1].activations > 0  # of more samples than the mean


def test_stages_fit_into_the_memory_of_their_devices() -> None:
    with torch.device("meta"):
        model = Gpt(SHAPE, 12).train()
    small = replace(FAST, memory_bytes=2_300_000)
    devices = Kinds((SLOW, small, SLOW), (1, 1, 1), (1.0, 2.0, 1.0))
    ids = torch.zeros(1, SHAPE.seq_len, dtype=torch.long)
    job = replace(
        job_of(chain([1.0]), devices), whole=View.of(model, ((ids, ids), {}), SLOW, "fp32")
    )
    layout = Layout(pp=3, microbatches=8, active=3)
    free = predict(replace(job, kinds=of_slow_and_fast(1, 1, 1)), layout)
    plan = predict(job, layout)
    assert free.held[1].peak > USABLE * small.memory_bytes >= plan.held[1].peak
    assert plan.rooms == pytest.approx((9e8, USABLE * small.memory_bytes, 9e8))
    limits = plan.layout.config()["partition_memory_limit"]
    assert limits == [9 * 10**8, int(USABLE * small.memory_bytes), 9 * 10**8]
    assert plan.filled <= 1 < free.held[1].peak / plan.rooms[1]


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2), (1, 3)])
def test_cut_of_a_plan_is_that_of_the_run(counts: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = Gpt(SHAPE, 12).train()
    ids = torch.zeros(1, SHAPE.seq_len, dtype=torch.long)
    devices = of_slow_and_fast(*counts)
    job = replace(
        job_of(chain([1.0]), devices), whole=View.of(model, ((ids, ids), {}), SLOW, "fp32")
    )
    pp = 3 if devices.num_ranks == 3 else 2
    plan = predict(job, Layout(pp=pp, rdp=devices.num_ranks // pp, microbatches=8, active=pp))
    values = plan.layout.config()
    run = Run(
        Config.from_dict(values), frozenset(values), devices.num_ranks, rooms=(9 * 10**8,) * pp
    )
    decision = estimate(model, (ids, ids), {}, run).decision
    by_rank = [0] * pp
    for stage in plan.stages:
        by_rank[stage.rank] += 4 * sum(part.elements for part in stage.parts)
    assert by_rank == list(decision.load_bytes)
    alike = replace(run, config=replace(run.config, device_speeds=None))
    even = list(estimate(model, (ids, ids), {}, alike).decision.load_bytes)
    assert (even == by_rank) == (counts == (2, 2)), "pipelines of equal devices have the equal cut"


def test_plans_of_several_kinds_are_accepted_and_fit() -> None:
    small = replace(FAST, memory_bytes=60 * 10**6)
    devices = Kinds((SLOW, small), (4, 4), (1.0, 2.0))
    job = job_of(chain([1.0] * 8), devices, 48)
    found = search(job)
    assert len(found.plans) > 5 and found.fitting < found.tried
    placements = set()
    for plan in found.plans:
        config = Config.from_dict(plan.layout.config())
        check_world(config, 8)
        assert config.device_speeds == (1.0,) * 4 + (2.0,) * 4
        assert plan.filled <= 1
        if plan.layout.pp > 1:
            placements.add(plan.layout.placement)
            assert config.memory_limits == tuple(map(int, job.rooms(plan.layout)))
    assert placements == {"DPT", "PDT"}
    none = search(job_of(chain([1.0] * 8), devices.with_memory(10**6), 48))
    assert not none.plans and none.nearest is not None and none.nearest.filled > 1


def gpt() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.zeros(1, SHAPE.seq_len, dtype=torch.long)
    return Gpt(SHAPE, 12), (ids, ids)


@pytest.fixture
def files(tmp_path: Path) -> str:
    """Writes files of three devices of two kinds."""
    for device in (SLOW, replace(FAST, memory_bytes=2 * 10**6)):
        (tmp_path / f"{device.name}.json").write_text(json.dumps(device.to_json()))
    return f"{tmp_path}/slow.json:1,{tmp_path}/fast.json:1,{tmp_path}/slow.json:1"


@pytest.mark.sample(keep=0)
def test_plan_prints_keys_times_and_memory_by_rank(
    files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", f"{HERE}:gpt", "--batch", "24", "--precision", "fp32", "--hardware", files]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speeds"] == [1.0, 2.0, 1.0] and found["num_devices"] == [1, 1, 1]
    for plan in found["plans"]:
        assert plan["config"]["device_speeds"] == [1.0, 2.0, 1.0]
        assert all(0 < rank["peak"] <= rank["room"] for rank in plan["ranks"])
        assert all(rank["microbatch_s"] > 0 for rank in plan["ranks"])
        if plan["config"]["pipeline_parallel_degree"] == 3:
            assert plan["config"]["partition_memory_limit"] == [9 * 10**8, 18 * 10**5, 9 * 10**8]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "parameters on 1 x slow + 1 x fast + 1 x slow" in text and "ranks of plan 1" in text
    assert main([*command, "--explain", "1"]) == 0
    text = capsys.readouterr().out
    assert "fast" in text and '"device_speeds"' in text and text.count("hardware: slow") == 1


@pytest.mark.sample(keep=0)
def test_estimate_knows_the_memory_of_each_rank(
    files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["estimate", f"{HERE}:gpt", "--config"]
    config = "pipeline_parallel_degree=3,microbatches=6"
    assert main([*command, config, "--hardware", files, "--json"]) in (0, 1)
    ranks: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["ranks"]
    assert [rank["room_bytes"] for rank in ranks] == [10**9, 2 * 10**6, 10**9]
    rich = ["--hardware", files, "--memory", "1GB", "--json"]
    assert main([*command, config, *rich]) == 0
    free = json.loads(capsys.readouterr().out)["ranks"]
    assert free[1]["parameters"] > max(free[0]["parameters"], free[2]["parameters"])
    assert free[1]["parameters"] > ranks[1]["parameters"]
    small = ["--hardware", files, "--memory", "100kB"]
    assert main([*command, config, *small]) == 1
    text = capsys.readouterr().out
    assert "does not fit: " in text and "on the fullest rank" in text
    assert "device_speeds: [1.0, 2.0, 1.0]" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["plan", "--gpus", "4"], "is 3 devices, and there are 4 ranks"),
        (["estimate", "--processes", "4"], "is 3 devices, and there are 4 ranks"),
        (
            ["estimate", "--config", "device_speeds=[1,2,1],pipeline_parallel_degree=3"],
            "device_speeds are found for --hardware",
        ),
        (["plan", "--precision", "bf16"], "precision bf16: slow has no rate for it"),
    ],
)
def test_bad_use_is_one_line(
    words: list[str], text: str, files: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([words[0], f"{HERE}:gpt", "--hardware", files, *words[1:]]) == 2
    captured = capsys.readouterr()
    assert text in captured.err and captured.err.count("\n") == 1 and captured.out == ""
