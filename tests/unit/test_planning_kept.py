"""Plans in which some layers keep their activations: as many as fit, rank by rank."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from smp_cli.main import main

from benchmarks.models import Gpt, GptShape
from smp.commands.plan import facts
from smp.config.schema import Config
from smp.planning import search
from smp.planning.kept_layers import marked, most_kept
from smp.planning.layout import Layout
from smp.planning.profile import Amount, ModelProfile
from smp.planning.run_cuts import Run, RunCuts, View, decided, scaled, stages_of
from smp.planning.search import Job, Plan, predict
from smp.planning.stages import of_parts
from smp.planning.traced_model import TracedModel
from tests.unit.test_planning import CPU, chain, job_of, layer

SHAPE = GptShape(12, 64, 4, 512, 64)
LAYOUT = Layout(pp=4, microbatch=2, microbatches=8, active=4, checkpoints=True)


def model() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    ids = torch.zeros(1, SHAPE.seq_len, dtype=torch.long)
    return Gpt(SHAPE, SHAPE.num_layers), (ids, ids)


def gpt() -> tuple[torch.nn.Module, torch.Tensor]:
    with torch.device("meta"):
        made, (ids, _) = model()
    return made.train(), ids


def least_peak(job: Job, checkpoints: bool) -> float:
    """Returns the peak of the layout of a job that needs least memory."""
    return min(
        predict(job, layout, simulated=False).peak_bytes
        for layout in search.layouts(job)
        if layout.checkpoints == checkpoints and layout.has(job.fixed)
    )


def kept_by_rank(plan: Plan) -> list[int]:
    found = [0] * plan.layout.pp
    for stage in plan.stages:
        found[stage.rank] += sum(part.is_kept for part in stage.parts)
    return found


def test_early_ranks_keep_fewer_layers_because_they_have_more_microbatches() -> None:
    job = job_of(chain(16, input_bytes=1e4), 4)
    full = predict(job, LAYOUT)
    plain = predict(job, replace(LAYOUT, checkpoints=False))
    room = (full.peak_bytes + plain.peak_bytes) / 2
    tight = replace(job, memory_bytes=int(room / search.USABLE))
    found = search._keeping_more(tight, predict(tight, LAYOUT))
    kept = kept_by_rank(found)
    assert kept == sorted(kept) and 0 < kept[0] < kept[-1] == 4
    assert found.peak_bytes <= room and plain.time.total < found.time.total < full.time.total
    assert len(found.layout.kept_layers) == sum(kept)
    assert found.layout.text().endswith(f"ckpt but {sum(kept)} layers")
    again = facts(tight, found)["checkpoint_layers"]
    assert sorted([*again, *found.layout.kept_layers]) == sorted(f"layer {i}" for i in range(16))


def test_no_other_layers_that_fit_are_faster_by_more_than_waiting_differs() -> None:
    parts = tuple(
        replace(layer(i, work=1e9 * (1 + i % 3)), kept=Amount(1e7 * (1 + i % 2))) for i in range(8)
    )
    job = job_of(ModelProfile(parts, None, 16, 8), 2)
    layout = replace(LAYOUT, pp=2, active=2)
    stages = list(predict(job, layout).stages)
    names = [part.name for part in parts]
    choices = [kept for number in range(8) for kept in itertools.combinations(names, number)]
    plans = [
        search._planned(job, layout, marked(stages, kept, 2), simulated=True) for kept in choices
    ]
    differ = set()
    for room in range(80, 320, 20):
        tight = replace(job, memory_bytes=int(room * 1e6 / search.USABLE))
        own = search._planned(tight, layout, stages, simulated=True)
        plain = predict(tight, replace(layout, checkpoints=False))
        if own.filled > 1 or plain.filled <= 1:
            continue
        found = search._keeping_more(tight, own)
        differ.add(found.layout.kept_layers)
        best = min(plan.time.total for plan in plans if plan.peak_bytes <= room * 1e6)
        # The order in which tasks meet makes less work slower at times.
        assert found.time.total <= 1.01 * best
    assert len(differ) > 3


def test_layers_that_are_cut_are_computed_again() -> None:
    root, ids = gpt()
    traced = TracedModel(root, (ids, ids), {}, 10.0)
    names = {module: name for name, module in root.named_modules()}

    def is_late(name: str) -> bool:
        number = next((int(word) for word in name.split(".") if word.isdigit()), 0)
        return number > 5 or name.startswith(("groups.5.up", "groups.5.down"))

    stage_of = [int(is_late(names[module])) for module in traced.costs.modules]
    stages = of_parts(traced.cut(stage_of, 2, 2), 2)
    layers = [f"groups.{i}" for i in range(SHAPE.num_layers)]
    kept = most_kept(stages, layers, replace(LAYOUT, pp=2), lambda _: [0.0, 0.0])
    assert kept == tuple(name for name in layers if name != "groups.5")


def test_partition_of_a_plan_is_that_of_a_run_with_these_checkpoints() -> None:
    root, ids = gpt()
    traced = TracedModel(root, (ids, ids), {}, 10.0)
    kept = tuple(part.name for part in traced.profile().chain if part.is_layer)[::2]
    layout = replace(LAYOUT, kept_layers=kept)
    rooms = (10**10,) * 4
    cuts = RunCuts(traced, "cpu")
    found = cuts.stages(layout, rooms)
    values = layout.config()
    run = Run(Config.from_dict(values), frozenset(values), 4, True, rooms, kept_layers=kept)
    decision = decided(root, scaled(traced, cuts._costs, layout), run)
    expected = stages_of(traced, decision)
    assert [[part.name for part in one.parts] for one in found] == [
        [part.name for part in one.parts] for one in expected
    ]
    assert sum(part.is_kept for one in found for part in one.parts) == len(kept)


def test_search_keeps_layers_where_memory_is_short_and_all_configurations_fit() -> None:
    root, ids = gpt()
    view = View.of(root, ((ids, ids), {}), CPU, "fp32")
    job = Job(view, CPU, 4, 8, 10**12, 64, "fp32", fixed={"pipeline_parallel_degree": 4})
    plain, again = (least_peak(job, checkpoints) for checkpoints in (False, True))
    tight = replace(job, memory_bytes=int((plain + again) / 2 / search.USABLE))
    found = search.search(tight).plans
    assert found and all(plan.layout.checkpoints and plan.filled <= 1 for plan in found)
    assert found[0].layout.kept_layers
    slower = predict(tight, replace(found[0].layout, kept_layers=()))
    assert found[0].time.total < slower.time.total


@pytest.mark.sample(keep=0)
def test_command_names_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "tests.unit.test_planning_kept:model", "--gpus", "4", "--batch", "64"]
    for memory in range(2000, 20000, 500):  # the first that is enough
        if main([*command, "--memory", f"{memory}KB", "--json"]) == 0:
            break
    again = json.loads(capsys.readouterr().out)["plans"][0]["checkpoint_layers"]
    assert 0 < len(again) < SHAPE.num_layers
    command += ["--memory", f"{memory}KB"]
    assert main(command) == 0
    words = f"and smp.set_activation_checkpointing on {len(again)} layers: {', '.join(again)}"
    assert words in capsys.readouterr().out
