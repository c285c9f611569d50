"""Plans of sending, deleting and loading, decided from names and sizes alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp.checkpoint.store import names, plan
from smp.checkpoint.store.names import Key
from smp.checkpoint.store.plan import Stored


def key(number: int, name: str = "a_partial") -> Key:
    return Key(f"{number:024x}", name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("s3://bucket/runs/1/", "s3://bucket/runs/1"),
        ("S3://bucket", "s3://bucket"),
        ("gs://bucket/a b", "gs://bucket/a b"),
        ("file:///folder/x", "file:///folder/x"),
        ("memory://x", "memory://x"),
    ],
)
def test_an_address_is_understood(text: str, shown: str) -> None:
    assert names.is_address(text) and str(names.parse(text)) == shown


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hdfs://host/x", "s3://.*not in hdfs://"),
        ("s3://", "without empty parts"),
        ("s3://bucket//x", "without empty parts"),
        ("s3://bucket/../x", "without empty parts"),
        ("file://folder", "the whole path"),
        ("simplecache::s3://bucket/x", "not an address"),
        ("s3://bucket/x::s3", "chains"),
    ],
)
def test_what_is_no_address_is_refused(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        names.parse(text)


def test_folders_are_no_addresses() -> None:
    assert not any(map(names.is_address, ("checkpoints", "/a/b", "./s3:/x", "C:\\x")))


def test_addresses_have_folders_of_their_own() -> None:
    texts = ("s3://a/b-c", "s3://a-b/c", "gs://a/b-c", "s3://a/b/c", "s3://" + "x" * 300)
    local = {names.parse(text).local_name() for text in texts}
    assert len(local) == len(texts) and all(len(name) < 80 and "/" not in name for name in local)


@given(st.text(min_size=1, max_size=20), st.integers(0, 2**96 - 1))
def test_a_key_is_found_again_by_its_folder(name: str, number: int) -> None:
    try:
        made = key(number, name).folder()
    except UnicodeEncodeError:
        return  # no text that a file could have
    assert Key.of_folder(made) == key(number, name)
    assert "/" not in made and made.isascii()


@pytest.mark.parametrize("folder", ["x", "x.1", ".000000000000000000000001", "a%.00" + "0" * 22])
def test_folders_of_others_are_no_keys(folder: str) -> None:
    assert Key.of_folder(folder) is None


@given(st.dictionaries(st.text(max_size=5), st.integers(0, 1000), max_size=30), st.integers(1, 7))
def test_shares_have_each_file_once_and_about_equal_bytes(
    sizes: dict[str, int], num_ranks: int
) -> None:
    shares = plan.shares(sizes, num_ranks)
    assert len(shares) == num_ranks
    assert sorted(name for share in shares for name in share) == sorted(sizes)
    totals = [sum(sizes[name] + 1 for name in share) for share in shares]
    assert max(totals) - min(totals) <= max(sizes.values(), default=0) + 1


def test_only_files_with_all_their_bytes_are_there() -> None:
    wanted = {"a": 3, "b": 0, "c": 5}
    assert plan.missing(wanted, {}) == ["a", "b", "c"]
    assert plan.missing(wanted, {"a": 2, "b": 0, "c": 5, "d": 1}) == ["a"]
    there = ["a", "manifest.json", "c.12.sending"]
    assert plan.surplus(there, wanted) == ["c.12.sending"]


def stored(number: int, is_complete: bool, changed_s: float = 0.0) -> Stored:
    return Stored(key(number), {"a": 1, **({"manifest.json": 9} if is_complete else {})}, changed_s)


def doomed(found: list[Stored], done: int, keep: int | None, held: set[Key]) -> list[Key]:
    return plan.doomed(found, key(done), keep, held, now_s=10_000.0, quiet_s=3600.0)


def test_old_ones_and_dead_ones_are_deleted() -> None:
    found = [
        stored(1, True),
        stored(2, False, 100.0),
        stored(3, True),
        stored(4, False, 9_000.0),  # may be alive
        stored(5, True),
        stored(6, True),
        stored(7, False, 100.0),  # newer than what is complete
    ]
    assert doomed(found, 6, None, set()) == [key(2)]
    assert doomed(found, 6, 2, set()) == [key(1), key(2), key(3)]
    assert doomed(found, 6, 2, {key(3), key(2)}) == [key(1)]
    assert doomed(found, 6, 0, set()) == [key(1), key(2), key(3), key(5)]
    # A checkpoint that became complete late drives out neither itself nor newer ones.
    assert doomed(found, 1, 1, set()) == [key(3), key(5)]


def test_the_newest_that_all_can_read_is_loaded() -> None:
    choose = lambda stored, local, tag=None: plan.choose(stored, local, tag, "_partial")  # noqa: E731
    assert choose([], [[], []]) is None
    assert choose([key(1)], [[key(2)], []]) == (key(1), False), "one rank does not see the newer"
    assert choose([key(1)], [[key(2)], [key(2)]]) == (key(2), True)
    assert choose([key(1), key(2)], [[key(2)], [key(2)]]) == (key(2), True), "not fetched"
    assert choose([key(1), key(2)], [[key(1)], [key(1)]]) == (key(2), False)
    several = [key(1, "a_partial"), key(2, "b_partial"), key(3, "a_partial")]
    assert choose(several, [[]], "b") == choose(several, [[]], "b_partial") == (several[1], False)
    assert choose(several, [[]], "a") == (several[2], False)
    assert choose(several, [[]], "c") is None
