"""Jobs of several ranks whose checkpoints go to stores, and come from there on other layouts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.dist.resume_training import BEFORE, Job, Seen, make, resume_many, state_of
from tests.dist.test_resume import check_end, check_equal, check_loaded
from tests.unit import s3_server

SOURCE = Job(2, 1, 1, "none", "fp32", dropout=False)
TARGETS = (SOURCE, Job(1, 1, 2, "state", "fp32"), Job(1, 1, 1, "none", "fp32"))
STORES = ["file", pytest.param("s3", marks=s3_server.NEEDED)]


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    with s3_server.running() as env:
        yield env


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, str]]:
    """The address, and the variables of the ranks."""
    env = {"SMP_STORE_FOLDER": str(tmp_path / "local")}
    if request.param == "s3":
        return f"s3://{s3_server.BUCKET}/{tmp_path.name}", env | request.getfixturevalue("s3")
    return f"file://{tmp_path}/store", env


def save(rank: int, job: Job, env: dict[str, str], address: str, blocking: bool) -> Any:
    """Trains, saves twice under two tags, and goes on; says what this rank has sent."""
    import smp
    from smp.checkpoint.store import uploader
    from smp.world import runtime

    os.environ.update(env)
    sent: list[str] = []
    real = uploader.sending.send_share

    def noted(
        store: Any, pending: Any, mine: int, num_ranks: int, progress: Any, *more: Any
    ) -> None:
        assert (mine, num_ranks) == (rank, job.world_size)
        real(store, pending, mine, num_ranks, progress, *more)
        sent.extend(f"{pending.key.name}/{name}" for name in progress.sent)

    uploader.sending.send_share = noted
    try:
        model, optimizer, train = make(job, seed=1)
        seen = Seen()
        for step in range(BEFORE):
            seen.losses.append(train(step))
            seen.at = state_of(model, optimizer)
            handle = smp.save_checkpoint(
                address, f"step{step + 1}", model=model, optimizer=optimizer,
                user_content={"steps": step + 1}, blocking=blocking,
            )  # fmt: skip
            assert (handle is None) == blocking
        for step in range(BEFORE, BEFORE + 2):
            seen.losses.append(train(step))
        seen.end = state_of(model, optimizer)
        assert smp.wait_for_uploads(60)
        assert runtime.current().rank.global_rank == rank
        return seen, sent
    finally:
        uploader.sending.send_share = real
        smp.shutdown()


def resume_fetching(rank: int, job: Job, env: dict[str, str], address: str) -> Any:
    """Goes on from the newest; says what this rank has fetched, and how many files there are."""
    from smp.checkpoint.store import job as jobs

    os.environ.update(env)
    made: list[Any] = []
    real = jobs.Fetched

    def noted(*arguments: Any, **more: Any) -> Any:
        made.append(real(*arguments, **more))
        return made[-1]

    jobs.Fetched = noted  # type: ignore[assignment, misc]
    try:
        [seen] = resume_many(rank, [(job, None)], address)  # type: ignore[list-item]
    finally:
        jobs.Fetched = real  # type: ignore[misc]
    return seen, [name for one in made for name in one.fetched], [
        len(one.manifest.files) for one in made
    ]  # fmt: skip


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize(
    ("place", "blocking"),
    [("file", True), pytest.param("s3", False, marks=s3_server.NEEDED)],
    indirect=["place"],
)
def test_what_ranks_send_goes_on_elsewhere(
    pool: Pool, tmp_path: Path, place: tuple[str, dict[str, str]], blocking: bool
) -> None:
    address, env = place
    results = pool.run(SOURCE.world_size, save, SOURCE, env, address, blocking)
    before = results[0][0]
    sent = [set(own) for _, own in results]
    assert all(sent) and not set.intersection(*sent), "each rank sent a share, each file once"
    assert len(set.union(*sent)) > 8
    for target in TARGETS:
        shutil.rmtree(tmp_path / "local")  # another machine
        after = pool.run(target.world_size, resume_fetching, target, env, address)
        check_loaded(str(target), before.at, after[0][0].at)
        check_end(str(target), SOURCE, target, before, after[0][0])
        assert after[0][0].content == {"steps": BEFORE}
        (num_files,) = {count for _, _, counts in after for count in counts}
        fetched = [name for _, names, _ in after for name in names]
        assert len(set(fetched)) == len(fetched) <= num_files
        assert target == SOURCE or len(fetched) < num_files, "random states are not needed"
    # A machine that has the checkpoint fetches nothing.
    pool.run(SOURCE.world_size, save, SOURCE, env, address, blocking)
    local = pool.run(SOURCE.world_size, resume_fetching, SOURCE, env, address)
    assert [names for _, names, _ in local] == [[], []]
    check_equal("from the folder", before.at, local[0][0].at)


def save_without_store(rank: int, job: Job, env: dict[str, str], address: str, path: str) -> Any:
    """Saves while the store takes nothing; leaves as a job that has no time to send."""
    import smp
    from smp.checkpoint.store import sending
    from smp.checkpoint.store.objects import ObjectStore

    os.environ.update(env)
    real, pauses = ObjectStore.put, sending._PAUSES_S

    def put(self: Any, key: Any, name: str, *more: Any) -> None:
        if name == path:
            raise OSError("the network is away")
        real(self, key, name, *more)

    ObjectStore.put, sending._PAUSES_S = put, (0.01,)  # type: ignore[method-assign]
    try:
        model, optimizer, train = make(job, seed=1)
        train(0)
        smp.save_checkpoint(
            address, "first", model=model, optimizer=optimizer, user_content={"steps": 1}
        )
        state = state_of(model, optimizer)
        with pytest.raises(
            RuntimeError, match=f"first_partial is not in .*{path}.*network is away"
        ):
            smp.wait_for_uploads(60)
        train(1)  # goes on
        return state
    finally:
        ObjectStore.put, sending._PAUSES_S = real, pauses  # type: ignore[method-assign]
        smp.shutdown()


def only_wait(rank: int, job: Job, env: dict[str, str], address: str) -> Any:
    """A job that resumes sends what an earlier one has left."""
    import smp

    os.environ.update(env)
    model, optimizer, train = make(job, seed=2)
    content = smp.resume_from_checkpoint(address)
    train(0)
    assert smp.wait_for_uploads(60)
    smp.shutdown()
    return content


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_what_could_not_be_sent_is_sent_by_the_next_job(
    pool: Pool, tmp_path: Path, place: tuple[str, dict[str, str]]
) -> None:
    address, env = place
    job = Job(2, 1, 1, "none", "fp32")
    (saved, _) = pool.run(2, save_without_store, job, env, address, "rng_1.pt")
    (folder,) = (tmp_path / "local").iterdir()
    (pending,) = (folder / ".sending").glob("first_partial.*[0-9a-f]")
    assert pending.is_dir()
    # On another number of ranks.
    other = Job(1, 1, 1, "none", "fp32")
    (content,) = pool.run(1, only_wait, other, env, address)
    assert content == {"steps": 1}
    assert list((folder / ".sending").iterdir()) == []
    shutil.rmtree(tmp_path / "local")
    (again, _, counts), *_ = pool.run(1, resume_fetching, other, env, address)
    assert len(counts) == 1, "it came from the store"
    check_equal("sent by the next job", saved, again.at)


def refuse(rank: int, env: dict[str, str]) -> list[str]:
    import smp

    os.environ.update(env)
    job = Job(1, 1, 2, "none", "fp32")
    model, optimizer, train = make(job, seed=1)
    errors = []
    for address in ("memory://x", "ftp://x/y", "gs://"):
        try:
            smp.save_checkpoint(address, "a", model=model)
        except ValueError as error:
            errors.append(str(error))
        try:
            smp.resume_from_checkpoint(address)
        except ValueError as error:
            errors.append(str(error))
    try:
        smp.save_checkpoint(f"file://{env['SMP_STORE_FOLDER']}", "a", partial=False, model=model)
    except ValueError as error:
        errors.append(str(error))
    try:
        smp.resume_from_checkpoint(f"file://{env['SMP_STORE_FOLDER']}/nothing")
    except FileNotFoundError as error:
        errors.append(str(error))
    smp.shutdown()
    return errors


def test_addresses_that_cannot_be_are_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, refuse, {"SMP_STORE_FOLDER": str(tmp_path)})
    for errors in results:
        assert "in the memory of one process, and this job has 2" in errors[0] and errors[1]
        assert "s3://, gs://, file://, memory://" in errors[2] and "not in ftp" in errors[3]
        assert "without empty parts" in errors[4] and "without empty parts" in errors[5]
        assert "save the whole model to a folder" in errors[6]
        assert "has no complete checkpoint, nor has" in errors[7]
        assert len(errors) == 8


def be_preempted(rank: int, env: dict[str, str], address: str) -> Any:
    """Rank 1 is told to stop; both save, wait for the store and leave."""
    import smp
    from smp.checkpoint.store.job import stores_in_use
    from smp.world import preemption, runtime

    os.environ.update(env)
    preemption._install_handler = lambda: None  # the pool's workers keep their SIGTERM
    model, optimizer, train = make(Job(2, 1, 1, "none", "fp32"), seed=1)
    preemption.save_to(address, user_content=lambda: {"rank": rank})
    try:
        train(0)
        state = state_of(model, optimizer)
        if rank == 1:
            preemption.request()
        with pytest.raises(SystemExit) as caught:
            for step in range(1, 50):
                state = state_of(model, optimizer)
                train(step)
        waiting = [
            key for store in stores_in_use(runtime.current()) for key in store.uploader.waiting()
        ]
        return caught.value.code, waiting, state
    finally:
        preemption._Process.automatic = None
        smp.shutdown()


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_ranks_that_are_preempted_leave_when_the_store_has_all(
    pool: Pool, tmp_path: Path, place: tuple[str, dict[str, str]]
) -> None:
    address, env = place
    results = pool.run(2, be_preempted, env, address)
    assert [(code, waiting) for code, waiting, _ in results] == [(75, [])] * 2
    shutil.rmtree(tmp_path / "local")
    after = pool.run(1, resume_fetching, Job(1, 1, 1, "none", "fp32"), env, address)
    check_equal("after a preemption", results[0][2], after[0][0].at)
    assert after[0][0].content == {"rank": 0}
