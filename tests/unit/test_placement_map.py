"""The map of ranks that rank 0 prints: whole for small worlds, by host for large ones."""

from __future__ import annotations

from smp.world.placement_map import placement_map, placement_words, ranges


def test_numbers_are_written_as_ranges() -> None:
    assert ranges([0, 1, 2, 3, 6, 9, 8]) == "0-3 6 8-9"
    assert ranges([5]) == "5"


def test_small_world_has_a_line_for_each_rank() -> None:
    text = placement_map(
        ["a", "a", "bb", "bb"],
        ["cuda:0", "cuda:1", "cuda:0", "cuda:1"],
        [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 1)],
        "DPT",
    )
    assert text.splitlines() == [
        "smp: places of the ranks; placement_strategy DPT",
        "  global_rank 0  a   cuda:0  pp 0 tp 0 rdp 0",
        "  global_rank 1  a   cuda:1  pp 1 tp 0 rdp 0",
        "  global_rank 2  bb  cuda:0  pp 0 tp 0 rdp 1",
        "  global_rank 3  bb  cuda:1  pp 1 tp 0 rdp 1",
    ]


def test_log_says_in_words_how_many_ranks_there_are_and_where() -> None:
    places = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 0, 1), (1, 0, 0, 1)]
    assert placement_words(["a"] * 4, ["cpu"] * 4, places) == [
        "4 ranks on 1 host, CPU: 2 pipeline stages, 2 replicas"
    ]
    hosts, devices = ["a", "a", "b", "b"], ["cuda:0", "cuda:1"] * 2
    assert placement_words(hosts, devices, places) == [
        "4 ranks on 2 hosts, GPUs: 2 pipeline stages, 2 replicas",
        "ranks 0-1 on a, 2-3 on b",
    ]
    many = [f"host{rank}" for rank in range(120)]
    lines = placement_words(many, ["cpu"] * 120, [(0, rank, 0, 0) for rank in range(120)])
    assert lines == [
        "120 ranks on 120 hosts, CPU: 120 tensor-parallel ranks",
        "ranks 0 on host0, 1 on host1, 2 on host2, and 117 hosts more",
    ]


def test_context_ranks_are_shown_where_there_are_several() -> None:
    places = [(0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)]
    words = placement_words(["a"] * 4, ["cpu"] * 4, places)
    assert words == ["4 ranks on 1 host, CPU: 2 context-parallel ranks, 2 replicas"]
    rows = placement_map(["a"] * 4, ["cpu"] * 4, places, "DPCT").splitlines()[1:]
    assert [row.split()[-8:] for row in rows] == [
        f"pp 0 tp 0 cp {cp} rdp {rdp}".split() for rdp in (0, 1) for cp in (0, 1)
    ]


def test_large_world_has_a_line_for_each_host_and_few_hosts_are_shown() -> None:
    num_hosts, per_host = 120, 8
    ranks = range(num_hosts * per_host)
    text = placement_map(
        [f"host{rank // per_host}" for rank in ranks],
        [f"cuda:{rank % per_host}" for rank in ranks],
        [(rank // per_host % 6, rank % per_host, 0, rank // 48) for rank in ranks],
        "DPT",
    )
    lines = text.splitlines()
    assert len(lines) == 13, "however many hosts there are"
    assert lines[1].split() == "global_ranks 0-7 host0 cuda:0-7 pp 0 tp 0-7 rdp 0".split()
    assert lines[-2].split()[:3] == ["(109", "more", "hosts)"]
    assert lines[-1].split() == "global_ranks 952-959 host119 cuda:0-7 pp 5 tp 0-7 rdp 19".split()


def test_host_of_scattered_ranks_is_written_in_ranges() -> None:
    hosts = ["a" if rank % 2 else "b" for rank in range(20)]
    places = [(rank % 2, 0, 0, rank // 2) for rank in range(20)]
    text = placement_map(hosts, ["cpu"] * 20, places, "DPT")
    row = text.splitlines()[1].split()
    assert row[:2] == ["global_ranks", "0"] and "b" in row and "cpu" in row
    assert row[-6:] == ["pp", "0", "tp", "0", "rdp", "0-9"]
