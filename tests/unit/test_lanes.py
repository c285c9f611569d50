"""The line in which the log describes the lanes of all pairs of ranks."""

from __future__ import annotations

from smp.world import lanes

HOSTS = "they are on different hosts"


def table(*pairs: tuple[int, int, str, str]) -> list[lanes.Lane]:
    back = [(destination, source, lane, why) for source, destination, lane, why in pairs]
    return [*pairs, *back]


def test_pairs_with_one_lane_are_counted_and_others_have_a_reason() -> None:
    text = lanes.describe(
        table(
            (0, 1, "ipc", "mapped"),
            (2, 3, "ipc", "mapped"),
            (0, 2, "host", HOSTS),
            (0, 3, "host", HOSTS),
            (1, 2, "host", HOSTS),
        )
    )
    assert text == (
        "ipc between 2 pairs of ranks; host between ranks 0 and 2 (they are on different hosts) "
        "and 2 more pairs"
    )


def test_one_pair_is_named() -> None:
    assert lanes.describe(table((0, 1, "ipc", "mapped"))) == "ipc between ranks 0 and 1 (mapped)"
    both = table((0, 1, "host", HOSTS), (0, 2, "host", HOSTS))
    assert lanes.describe(both).endswith("and 1 more pair")


def test_without_lanes_there_is_nothing_to_tell() -> None:
    assert lanes.describe([]) == ""


def test_pairs_over_nccl_say_why_they_map_no_memory() -> None:
    text = lanes.describe(table((0, 1, "ipc", "mapped"), (0, 2, "nccl", HOSTS)))
    assert text == (
        "nccl between ranks 0 and 2 (they are on different hosts); "
        "ipc between ranks 0 and 1 (mapped)"
    )
