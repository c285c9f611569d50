"""Pipelines whose tensors come late: lanes of tests leave NaN until a copy is over.

``SMP_TEST_LANES`` puts every tensor that one rank sends to another one on such a lane; a ring of
two slots is full now and then. All numbers are the bits of a run without lanes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import smp
from smp.world import runtime
from tests.dist import test_soak, test_timeline, training, two_models
from tests.dist.pool import Pool
from tests.dist.programs.language import Program
from tests.dist.programs.running import assert_identical, run_distributed
from tests.dist.test_random_programs import Seen, over_bundles
from tests.samples import part_of

LANES = {"SMP_TEST_LANES": "7:400:2"}
RING = {"SMP_TEST_LANES": "7:400:2:ring"}
MEET = {"SMP_TEST_LANES": "7:400:2:meet"}
BOTH = {"SMP_TEST_LANES": "7:400:2:ring:meet"}
COUNTERS = (
    "lane_tensors_sent",
    "lane_tensors_received",
    "lane_times_full",
    "lane_times_too_large",
)
NUM_PROGRAMS = 12
SOAK_STEPS = 80


def counted(rank: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Returns a function's result, and the counters of its lanes.

    The function may end smp several times.
    """
    counts: Counter[str] = Counter()
    end = smp.shutdown

    def count_and_end() -> None:
        if smp.is_initialized():
            stats = smp.metrics.server_stats()
            counts.update({name: int(stats[name]) for name in COUNTERS})
        end()

    smp.shutdown = count_and_end  # type: ignore[assignment]
    try:
        result = function(rank, *args)
        smp.shutdown()
    finally:
        smp.shutdown = end
    return result, counts


def sent_by_lanes(late: list[tuple[Any, Counter[str]]]) -> Counter[str]:
    """Checks that lanes have carried tensors of each rank; returns the counters' sums."""
    counts: Counter[str] = sum((counts for _, counts in late), Counter())
    assert all(counts["lane_tensors_sent"] > 0 for _, counts in late), "a rank sent nothing"
    assert counts["lane_tensors_sent"] == counts["lane_tensors_received"]
    assert counts["lane_times_full"] < counts["lane_tensors_sent"]
    return counts


def assert_same_bits(plain: Any, late: Any) -> None:
    """Checks that records of one run on one rank are equal bit by bit."""
    assert plain.losses == late.losses
    for ours, theirs in zip([*plain.grads, plain.params], [*late.grads, late.params], strict=True):
        assert set(ours) == set(theirs)
        for name, value in ours.items():
            if value is None:
                assert theirs[name] is None, name
            else:
                assert torch.equal(value, theirs[name]), name


def check_same(
    pool: Pool,
    size: int,
    train_all: Callable[..., Any],
    runs: list[Any],
    *kinds: dict[str, str],
) -> None:
    """Compares runs without lanes with those over lanes of some kinds, `LANES` by default."""
    plain = pool.run(size, counted, train_all, (runs,))
    assert all(not any(counts.values()) for _, counts in plain), "the CPU has no lanes"
    for env in kinds or (LANES,):
        late = pool.run(size, counted, train_all, (runs,), env=env)
        counts = sent_by_lanes(late)
        for (ours, _), (theirs, _) in zip(plain, late, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                assert_same_bits(one, other)
        if env is LANES:  # slots of a ring are free sooner
            assert counts["lane_times_full"] > 0, "no lane was ever full"
        else:
            passed_by = counts["lane_times_full"] + counts["lane_times_too_large"]
            assert passed_by < counts["lane_tensors_sent"] / 2, env


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("case", ["chain", "gpt2"])
def test_schedules_give_the_bits_of_a_run_without_lanes(pool: Pool, case: str, pp: int) -> None:
    """Between real processes, also over slots that two of them map, and by copies that need both.

    Copies of the last kind move when both processes have asked for them, as those of NCCL.
    """
    runs = [
        training.Run(case, pp, 1, schedule, microbatches=8, steps=2)
        for schedule in ("interleaved", "simple", "zero_bubble")
    ]
    check_same(pool, pp, training.train_all, runs, LANES, RING, MEET)


def test_virtual_stages_give_the_bits_of_a_run_without_lanes(pool: Pool) -> None:
    config = (("virtual_stages", 2),)
    runs = [training.Run("gpt2", 2, 1, "virtual_interleaved", config=config)]
    check_same(pool, 2, training.train_all, runs)


def lanes_between_hosts(rank: int) -> Any:
    os.environ["SMP_HOSTNAME"] = f"host{rank // 2}"
    return lanes_of(rank, 4)


def test_hosts_are_connected_by_copies_that_need_both_ranks(pool: Pool) -> None:
    for table in pool.run(4, lanes_between_hosts, env=BOTH):
        assert len(table) == 12
        for source, destination, lane, why in table:
            is_near = source // 2 == destination // 2
            assert lane == ("ipc" if is_near else "nccl")
            assert is_near or why == "they are on different hosts"
    for table in pool.run(4, lanes_between_hosts, env=RING):
        lanes = {row[2]: row[3] for row in table}
        assert lanes["host"].startswith("they are on different hosts; no NCCL: global_rank ")


def lanes_of(rank: int, pp: int = 2) -> Any:
    smp.init({"pipeline_parallel_degree": pp, "ddp": True})
    mailbox = runtime.current().rank.mailbox
    assert mailbox is not None
    return mailbox.lanes()


def refused_lane(rank: int, has_hosts: bool) -> str:
    if has_hosts:
        os.environ["SMP_HOSTNAME"] = f"host{rank}"
    with pytest.raises(ValueError) as refused:
        smp.init({"pipeline_parallel_degree": 2})
    return str(refused.value)


def test_lane_is_chosen_by_pair_and_can_be_forced(pool: Pool) -> None:
    assert pool.run(2, lanes_of) == [[], []]
    for env, lane in ((RING, "ipc"), (RING | {"SMP_LANE": "host"}, "host")):
        for table in pool.run(2, lanes_of, env=env):
            assert [row[:3] for row in table] == [(0, 1, lane), (1, 0, lane)]


@pytest.mark.parametrize("pp", [1, 2])
def test_only_ranks_of_one_pipeline_share_memory(pool: Pool, pp: int) -> None:
    for table in pool.run(4, lanes_of, pp, env=RING | {"SMP_LANE": "ipc"}):
        pairs = {(source, destination) for source, destination, *_ in table}
        assert pairs == ({(0, 1), (1, 0), (2, 3), (3, 2)} if pp == 2 else set())


def test_lane_that_cannot_be_is_refused_on_all_ranks(pool: Pool) -> None:
    for text in pool.run(2, refused_lane, False, env={"SMP_LANE": "ipc"}):
        assert "SMP_LANE=ipc needs CUDA devices" in text
    for text in pool.run(2, refused_lane, True, env=RING | {"SMP_LANE": "ipc"}):
        assert "they are on different hosts" in text and "SMP_LANE=auto" in text


@pytest.mark.sample
def test_two_models_give_the_bits_of_a_run_without_lanes(pool: Pool) -> None:
    first = ("adversaries", "three")
    cases = [*first, *(case for case in two_models.PROGRAMS if case not in first)]
    runs = [two_models.Run(case, 2, 1) for case in part_of(cases, len(first))]
    check_same(pool, 2, two_models.train_all, runs)


def test_random_programs_give_the_bits_of_a_run_without_lanes(pool: Pool) -> None:
    seen = Seen(NUM_PROGRAMS)
    total: Counter[str] = Counter()

    def check(programs: list[Program]) -> None:
        texts = list(seen.news(programs))
        if not texts:
            return
        try:
            plain = pool.run(programs[0].pp, run_distributed, texts)
        except AssertionError:  # a program that is refused
            seen.refused.update(texts)
            return
        late = pool.run(programs[0].pp, counted, run_distributed, (texts,), env=LANES)
        for idx, text in enumerate(texts):
            assert_identical([ranks[idx] for ranks in plain], [ranks[idx] for ranks, _ in late])
            seen.equal.add(text)
        for _, counts in late:
            total.update(counts)

    over_bundles(seen, check)
    assert seen.enough
    assert len(seen.refused) <= NUM_PROGRAMS // 2, "smp refuses too much"
    assert total["lane_tensors_sent"] > NUM_PROGRAMS


FAKE = {"SMP_TEST_LANES": "7:3000:64"}
FAKE_RING = {"SMP_TEST_LANES": "7:3000:64:ring"}
FAKE_MEET = {"SMP_TEST_LANES": "7:3000:16:meet"}


def trace_lanes(rank: int, path: str) -> None:
    step = test_timeline.make_step(training.Run("chain", 2, 1, manual=True))
    step(0)
    with smp.trace(path):
        step(1)


def test_a_trace_shows_what_lanes_carry(pool: Pool, tmp_path: Path) -> None:
    """Every tensor of the pipeline, at both ends, from the post until its copy was over."""
    cases = ((None, None), (FAKE, "fake lane"), (FAKE_RING, "mapped memory"), (FAKE_MEET, "NCCL"))
    for env, lane in cases:
        pool.run(2, trace_lanes, str(tmp_path / "lanes"), env=env)
        trace = test_timeline.read(tmp_path / "lanes")
        events = trace["traceEvents"]
        names = {
            (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
        }
        copies = [e for e in events if e.get("cat") == "lane"]
        if lane is None:
            assert not copies and not any("lane" in name for name in names.values())
            continue
        assert names[1, min(e["tid"] for e in copies if e["pid"] == 1)] == "lane to rank 0"
        sent, received = Counter[Any](), Counter[Any]()
        for e in copies:
            way = (e["args"]["source"], e["args"]["target"], e["args"]["bytes"])
            name = names[e["pid"], e["tid"]]
            if name.startswith("lane to"):
                assert e["pid"] == way[0] and name.startswith(f"lane to rank {way[1]}")
                sent[way] += 1
            else:
                assert e["pid"] == way[1] and name.startswith(f"lane from rank {way[0]}")
                received[way] += 1
            assert e["args"]["lane"] == lane
        assert sent == received
        ways = Counter(
            (begin["pid"], end["pid"], begin["args"]["bytes"])
            for begin, end in test_timeline.arrows_of(trace)
        )
        assert sent == ways and {way[:2] for way in sent} == {(0, 1), (1, 0)}
        for kind in ("to", "from"):
            times = [e["dur"] for e in copies if f"lane {kind}" in names[e["pid"], e["tid"]]]
            assert max(times) > 300, "either part of a copy takes up to 3 ms"


def run_shorter(rank: int) -> Any:
    test_soak.STEPS, test_soak.WARM_UP = SOAK_STEPS, SOAK_STEPS // 2
    before, after, losses = test_soak.run_long(rank)
    return before.stats, after.stats, losses


@pytest.mark.sample(keep=0)
def test_many_steps_leave_nothing_on_lanes(pool: Pool) -> None:
    plain = pool.run(2, run_shorter)
    late = pool.run(2, counted, run_shorter, (), env=LANES)
    for (_, _, losses), ((before, after, others), _) in zip(plain, late, strict=True):
        assert losses == others and len(losses) == SOAK_STEPS * 3 // 4
        for name in ("records", "stored"):
            assert before[name] == after[name] == 0
        assert after["lane_tensors_sent"] > before["lane_tensors_sent"] > 0
    assert sent_by_lanes(late)["lane_tensors_sent"] > SOAK_STEPS
