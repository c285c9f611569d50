"""Times of plans on cores that ranks share, and the search's short cuts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from smp.planning import hardware
from smp.planning.groups import Grid, reach
from smp.planning.hardware import Hardware, Link, Overheads
from smp.planning.layout import Layout
from smp.planning.memory import held_by_rank, peak_bytes
from smp.planning.passing import Cores
from smp.planning.profile import Amount, ModelProfile, Part, Weight
from smp.planning.run_cuts import View
from smp.planning.search import Job, layouts, predict, search
from smp.planning.stages import contents_of, of_parts
from smp.planning.step_time import stage_time

ELEMENTS = 10**6
CPU = Hardware(
    name="",
    source="",
    flops={"fp32": 1e11},
    product_share=1.0,
    memory_bytes=10**10,
    memory_bytes_per_s=1e10,
    inside=Link(4e9, 1e-5),
    between=Link(1e9, 1e-5),
    host_copy_bytes_per_s=1e10,
    at_once=2,
    devices_per_host=2,
    collective=Link(2e9, 1e-4),
    overheads=Overheads(3e-9, 2e-9, 1e-3, 4e-3, 1.5, 1.25),
)


def part(name: str, is_layer: bool = True, tied: int = 0) -> Part:
    return Part(
        name,
        is_layer,
        weights=(Weight(ELEMENTS, True),),
        forward=Amount(1e9),
        backward=Amount(2e9),
        kept=Amount(1e6),
        input_bytes=1e5,
        largest_bytes=2e5,
        tied_elements=tied,
        num_products=2 if is_layer else 0,
    )


MODEL = ModelProfile(
    (part("table", False), *(part(f"layer {i}") for i in range(8))),
    part("head", False, tied=ELEMENTS),
    16,
    8,
)


def job(num_ranks: int, device: Hardware = CPU) -> Job:
    return Job(View(MODEL), device, num_ranks, num_ranks, device.memory_bytes, 16, "fp32")


def test_file_with_overheads_is_read_as_it_was_written() -> None:
    assert hardware.read(json.dumps(CPU.to_json()), "file") == CPU
    bad = CPU.to_json()
    bad["overheads"]["call_s"] = 0
    with pytest.raises(ValueError, match="overheads has to be above 0"):
        hardware.read(json.dumps(bad), "file")
    del bad["overheads"]["call_s"]
    with pytest.raises(ValueError, match="call_s"):
        hardware.read(json.dumps(bad), "file")


def test_groups_have_the_link_of_collectives_and_stages_that_of_messages() -> None:
    layout = Layout(pp=2, tp=2, rdp=2)
    assert reach(layout, "T", 2, 8, CPU).link == CPU.collective
    assert reach(layout, "D", 2, 8, CPU).link == CPU.collective
    assert reach(layout, "P", 2, 8, CPU).link == CPU.inside
    assert reach(layout, "D", 2, 2, CPU).link == CPU.between
    without = replace(CPU, collective=None)
    assert reach(layout, "T", 2, 8, without).link == CPU.inside


def test_a_microbatch_takes_its_elements_and_its_calls() -> None:
    layout = Layout(pp=2, microbatches=4, active=2)
    grid = Grid.of(layout, 2, CPU)
    (stage,) = of_parts([([part("a"), part("b")], 1e5, 3)], 2)
    known = stage_time(stage, layout, grid, CPU)
    bare = replace(CPU, overheads=None)
    plain = stage_time(stage, layout, grid, bare)
    added = 12 * 2 * ELEMENTS / CPU.memory_bytes_per_s  # what is known from memory alone
    assert plain.total == pytest.approx(6e9 / 1e11 + added)
    assert known.total - plain.total == pytest.approx(3e-9 * 2 * ELEMENTS + 3e-3 + 4e-3 - added)


@pytest.mark.parametrize(
    ("working", "pace"), [(0, 1.0), (1, 1 / 1.5), (2, 1.0), (3, 1.5), (8, 4.0)]
)
def test_work_is_slower_on_shared_cores_and_faster_alone(working: int, pace: float) -> None:
    cores = Cores.of(CPU, Layout(rdp=8), 8)
    assert (cores.num, cores.alone) == (2, 1.5)
    assert cores.pace(working) == pytest.approx(pace)


def test_ranks_that_wait_for_others_without_a_core_lose_time() -> None:
    cores = Cores.of(CPU, Layout(rdp=8), 8)
    kinds = {
        Layout(rdp=8): 0,
        Layout(tp=2): 0,  # as many as cores
        Layout(pp=2): 0,
        Layout(tp=4): 1,
        Layout(pp=4): 1,
        Layout(rdp=4, shard=4): 0,
        Layout(rdp=4, shard=4, shards_parameters=True): 1,
        Layout(pp=2, tp=2): 2,
    }
    for layout, number in kinds.items():
        assert cores.crowding(layout) == pytest.approx(1.25**number), layout


def test_more_replicas_than_cores_take_as_long_as_their_work() -> None:
    two, eight = (predict(job(n), Layout(rdp=n, microbatch=16 // n)).time for n in (2, 8))
    assert eight.shared == pytest.approx(3 * (eight.total - eight.shared))
    assert two.shared == pytest.approx(0, abs=1e-12)
    assert eight.total > two.total  # elements of a microbatch, sums and updates are all eight's


def test_peak_of_the_search_is_that_of_the_fullest_rank() -> None:
    found = list(layouts(job(8)))
    assert len(found) > 500
    for layout in found[::7]:
        plan = predict(job(8), layout, simulated=False)
        contents = contents_of(plan.stages, layout.pp, layout.chunks)
        assert sorted(r for c in contents for r in c.ranks) == list(range(layout.pp))
        most = max(held.peak for held in held_by_rank(contents, layout))
        assert peak_bytes(contents, layout) == pytest.approx(most)


def test_best_plan_of_the_search_is_the_best_of_its_kinds() -> None:
    device = replace(CPU, at_once=0, overheads=None, collective=None)
    found = search(job(4, device))
    times = [plan.time.total for plan in found.plans]
    assert found.fitting == found.tried and times == sorted(times)
    every = [predict(job(4, device), layout).time.total for layout in layouts(job(4, device))]
    assert times[0] == pytest.approx(min(every), rel=1e-9)


def test_a_tail_keeps_as_many_microbatches_as_the_last_rank() -> None:
    """Gives each rank one layer, and the first rank the head as well."""
    layout = Layout(pp=4, microbatches=8, active=4)
    parts = [[part(f"layer {i}")] for i in range(4)]
    head = part("head", False, tied=ELEMENTS)
    stages = of_parts([([*own], 0, 0) for own in (*parts, [head])], 4)
    contents = contents_of(stages, 4, 1)
    kept = [held.activations / 1e6 for held in held_by_rank(contents, layout)]
    assert kept == [4 + 1, 3, 2, 1]
