"""Jobs whose hosts share no folder: checkpoints are on their disks first, then in the store."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp.checkpoint import manifest as manifests
from tests.dist.pool import Pool, RankFailure
from tests.dist.resume_training import BEFORE, Job, Seen, make, state_of
from tests.dist.test_resume import check_end, check_equal, check_loaded
from tests.dist.test_stores import resume_fetching
from tests.unit import s3_server

#: Two pipeline ranks with two replicas; ranks 0 and 1 are on the first host.
SOURCE = Job(2, 1, 2, "state", "fp32", dropout=False)
PER_HOST = 2


def env_of(rank: int, folder: str) -> dict[str, str]:
    host = rank // PER_HOST
    return {
        "SMP_HOSTNAME": f"host{host}",
        "SMP_STORE_FOLDER": f"{folder}/local{host}",
        "SMP_STORE_PER_HOST": "1",
        "SMP_TRANSPORT": "tcp",
    }


def save(
    rank: int, job: Job, folder: str, blocking: bool, failing: str = "", address: str = ""
) -> Any:
    """Trains and saves after each step; ``failing`` is a file that the store does not take."""
    import smp
    from smp.checkpoint.store import sending
    from smp.checkpoint.store.objects import ObjectStore

    os.environ.update(env_of(rank, folder))
    real, pauses = ObjectStore.put, sending._PAUSES_S

    def put(self: Any, key: Any, name: str, *more: Any) -> None:
        if failing and name == failing and key.name == "step2_partial":
            raise PermissionError("the network is away")
        real(self, key, name, *more)

    ObjectStore.put, sending._PAUSES_S = put, (0.01,)  # type: ignore[method-assign]
    try:
        model, optimizer, train = make(job, seed=1)
        seen = Seen()
        for step in range(BEFORE):
            seen.losses.append(train(step))
            seen.at = state_of(model, optimizer)
            smp.save_checkpoint(
                address or f"file://{folder}/store",
                f"step{step + 1}", model=model, optimizer=optimizer,
                user_content={"steps": step + 1}, blocking=blocking,
            )  # fmt: skip
        for step in range(BEFORE, BEFORE + 2):
            seen.losses.append(train(step))
        seen.end = state_of(model, optimizer)
        if not failing:
            assert smp.wait_for_uploads(60)
        else:
            reason = ".*" if rank // PER_HOST else "global_rank [23]: .*"
            with pytest.raises(RuntimeError, match=f"{reason}{failing} could not be sent"):
                smp.wait_for_uploads(60)  # less than the time-out of ranks that are not told
        return seen
    finally:
        ObjectStore.put, sending._PAUSES_S = real, pauses  # type: ignore[method-assign]
        smp.shutdown()


def resume(rank: int, job: Job, folder: str, address: str = "") -> Any:
    return resume_fetching(rank, job, env_of(rank, folder), address or f"file://{folder}/store")


def names_in(folder: Path, tag: str) -> tuple[set[str], set[str]]:
    """Returns the files of a checkpoint on a host, and those of its manifest."""
    (path,) = folder.glob(f"*/{tag}_partial")
    names = {file.name for file in path.iterdir()} - {"manifest.json"}
    return names, set(manifests.read(path).files)


@pytest.mark.parametrize("blocking", [True, False])
def test_each_host_has_its_files_and_the_store_has_all(
    pool: Pool, tmp_path: Path, blocking: bool
) -> None:
    results = pool.run(4, save, SOURCE, str(tmp_path), blocking)
    before = results[0]
    (first, every), (second, same) = (names_in(tmp_path / f"local{h}", "step2") for h in (0, 1))
    assert first | second == every == same and not first & second
    assert {"rng_0.pt", "rng_1.pt"} <= first and {"rng_2.pt", "rng_3.pt"} <= second
    stored = [path for path in (tmp_path / "store").iterdir() if (path / "manifest.json").exists()]
    assert len(stored) == BEFORE
    for path in stored:
        assert {file.name for file in path.iterdir()} == {*every, "manifest.json"}
    for host in (0, 1):
        assert not list((tmp_path / f"local{host}").glob("*/.sending/*"))

    # On the same hosts ranks read the files there; only what the first rank alone wrote is fetched.
    after = pool.run(4, resume, SOURCE, str(tmp_path))
    assert after[0][0].content == {"steps": BEFORE}
    for (_, fetched, counts), host in zip(after, (0, 0, 1, 1), strict=True):
        assert counts == [len(every)]
        assert not set(fetched) & (second if host else first)
        assert not any(name.startswith("rng") for name in fetched)
    assert not any(fetched for _, fetched, _ in after[:2])
    check_equal("on the same hosts", before.at, after[0][0].at)

    # A host was replaced; then all of them, on another layout.
    shutil.rmtree(tmp_path / "local1")
    after = pool.run(4, resume, SOURCE, str(tmp_path))
    assert {name for _, fetched, _ in after[2:] for name in fetched} >= {"rng_2.pt", "rng_3.pt"}
    check_equal("a host was replaced", before.at, after[0][0].at)
    shutil.rmtree(tmp_path / "local0")
    target = Job(1, 1, 2, "none", "fp32")
    after = pool.run(2, resume, target, str(tmp_path))
    check_loaded(str(target), before.at, after[0][0].at)
    check_end(str(target), SOURCE, target, before, after[0][0])


@s3_server.NEEDED
def test_hosts_send_to_an_object_store(pool: Pool, tmp_path: Path) -> None:
    address = f"s3://{s3_server.BUCKET}/{tmp_path.name}"
    with s3_server.running() as env:
        before = pool.run(4, with_env, env, save, SOURCE, str(tmp_path), False, "", address)[0]
        listed = s3_server.client(env).list_objects_v2(Bucket=s3_server.BUCKET)["Contents"]
        stored = {Path(one["Key"]).name for one in listed}
        for host in (0, 1):
            names, _ = names_in(tmp_path / f"local{host}", "step2")
            assert names < stored
            shutil.rmtree(tmp_path / f"local{host}")
        target = Job(1, 1, 2, "none", "fp32")
        after = pool.run(2, with_env, env, resume, target, str(tmp_path), address)
    check_loaded(str(target), before.at, after[0][0].at)
    check_end(str(target), SOURCE, target, before, after[0][0])


def with_env(rank: int, env: dict[str, str], run: Callable[..., Any], *arguments: Any) -> Any:
    os.environ.update(env)
    return run(rank, *arguments)


def test_what_is_not_in_the_store_goes_on_from_the_hosts(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(4, save, SOURCE, str(tmp_path), True, "rng_3.pt")
    stored = [path for path in (tmp_path / "store").iterdir() if (path / "manifest.json").exists()]
    assert [path.name.split(".")[0] for path in stored] == ["step1_partial"]
    after = pool.run(4, resume, SOURCE, str(tmp_path))
    assert after[0][0].content == {"steps": BEFORE}
    check_equal("from both hosts", results[0].at, after[0][0].at)
    # The job that resumed has sent the rest.
    stored = [path for path in (tmp_path / "store").iterdir() if (path / "manifest.json").exists()]
    assert len(stored) == 2
    assert not list(tmp_path.glob("local*/*/.sending/*"))


def test_without_a_host_an_older_one_counts(pool: Pool, tmp_path: Path) -> None:
    saved = pool.run(4, save, SOURCE, str(tmp_path), True, "rng_3.pt")
    (tmp_path / "local1").rename(tmp_path / "away")
    after = pool.run(4, resume, SOURCE, str(tmp_path))
    assert after[0][0].content == {"steps": 1}
    shutil.rmtree(tmp_path / "local1")
    (tmp_path / "away").rename(tmp_path / "local1")
    after = pool.run(4, resume, SOURCE, str(tmp_path))
    assert after[0][0].content == {"steps": BEFORE}, "the host is back"
    check_equal("from both hosts", saved[0].at, after[0][0].at)
    assert not list(tmp_path.glob("local*/*/.sending/*"))


def fail_to_write(rank: int, job: Job, folder: str, blocking: bool) -> list[str]:
    """The second save fails on rank 3."""
    import smp
    from smp.checkpoint import archive

    os.environ.update(env_of(rank, folder))
    real, errors = archive.write, []

    def write(path: Path, *arguments: Any, **options: Any) -> Any:
        raise OSError("the disk is full")

    try:
        model, optimizer, train = make(job, seed=1)
        train(0)
        address = f"file://{folder}/store"
        smp.save_checkpoint(address, "good", model=model, optimizer=optimizer)
        if rank == 3:
            archive.write = write
        try:
            handle = smp.save_checkpoint(
                address, "bad", model=model, optimizer=optimizer, blocking=blocking
            )
            if handle is not None:
                handle.wait()
        except RuntimeError as error:
            errors.append(str(error))
        if blocking:
            assert smp.wait_for_uploads(60)
        return errors
    finally:
        archive.write = real
        with contextlib.suppress(RuntimeError):  # the error of the background once more
            smp.shutdown()


@pytest.mark.parametrize("blocking", [False, True])
def test_a_failure_on_one_host_ends_the_save_on_all(
    pool: Pool, tmp_path: Path, blocking: bool
) -> None:
    for (error,) in pool.run(4, fail_to_write, SOURCE, str(tmp_path), blocking):
        assert "global_rank 3" in error and "the disk is full" in error
    for host in (0, 1):
        (folder,) = (tmp_path / f"local{host}").iterdir()
        assert [path.name for path in folder.glob("[!.]*_partial")] == ["good_partial"]
        assert (folder / "newest").read_text() == "good_partial"


def disagree(rank: int, folder: str) -> None:
    import smp

    os.environ.update({**env_of(rank, folder), "SMP_STORE_PER_HOST": str(rank % 2)})
    model, optimizer, train = make(Job(1, 1, 2, "none", "fp32"), seed=1)
    train(0)
    smp.save_checkpoint(f"file://{folder}/store", "a", model=model)


def test_ranks_that_disagree_are_an_error(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="SMP_STORE_PER_HOST"):
        pool.run(2, disagree, str(tmp_path))


def test_the_manifest_is_that_of_a_shared_folder(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, save, SOURCE, str(tmp_path), True)
    texts = [
        json.loads(next((tmp_path / f"local{h}").glob("*/step1_partial/manifest.json")).read_text())
        for h in (0, 1)
    ]
    assert texts[0] == texts[1]
