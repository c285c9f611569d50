"""Jobs in one process whose checkpoints go to a store: pruned, given up, preempted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp.checkpoint.store import names, pending, sending
from smp.checkpoint.store.objects import ObjectStore
from smp.world import preemption
from tests.harness import train_step_of


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(preemption, "_install_handler", lambda: None)  # pytest keeps its SIGTERM
    monkeypatch.setattr(preemption._Process, "automatic", None)
    monkeypatch.setenv("SMP_STORE_FOLDER", str(tmp_path / "local"))
    monkeypatch.setenv("SMP_UPLOAD_WAIT_S", "0.5")
    yield f"file://{tmp_path}/store"
    smp.shutdown()


class Job:
    def __init__(self) -> None:
        smp.init({})
        self.model = smp.DistributedModel(nn.Linear(3, 2))
        self.optimizer = smp.DistributedOptimizer(torch.optim.AdamW(self.model.parameters()))
        train_step = train_step_of(self.model)
        self.train_step = train_step

    def train(self) -> None:
        self.train_step(torch.ones(2, 3))
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def complete(address: str) -> list[str]:
    store = ObjectStore(names.parse(address))
    return [key.name for key in store.generations() if store.stored(key).is_complete]


def test_a_job_leaves_when_its_checkpoint_is_in_the_store(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    preemption.save_to(address)
    job = Job()
    job.train()
    preemption.request()
    with pytest.raises(SystemExit) as caught:
        job.train()
    assert caught.value.code == preemption.EXIT_RESUME
    assert complete(address) == ["preempted1_partial"], "before it left"
    assert "leaving before" not in caplog.text
    saved = job.weights()
    smp.shutdown()
    again = Job()
    smp.resume_from_checkpoint(address)
    assert all(map(torch.equal, again.weights(), saved)) and saved[0].any()


def test_a_job_does_not_wait_longer_than_it_may_and_says_so(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, calls, sent = ObjectStore.put, [], []

    def slow(self: ObjectStore, key: Any, name: str, *more: Any) -> None:
        calls.append(name)
        if len(calls) > 1:
            while not self._is_stopped():
                time.sleep(0.01)
            raise OSError("cut off")
        real(self, key, name, *more)

    monkeypatch.setattr(ObjectStore, "put", slow)
    job = Job()
    job.train()
    smp.save_checkpoint(address, "last", model=job.model, optimizer=job.optimizer)
    begin = time.monotonic()
    with pytest.raises(SystemExit):
        preemption.leave()
    assert time.monotonic() - begin > 0.4, "the limit"
    assert not any(thread.name == "smp-store" for thread in threading.enumerate())
    assert "leaving before last_partial is complete in file://" in caplog.text
    assert "after 0.5 s (SMP_UPLOAD_WAIT_S)" in caplog.text
    smp.shutdown()
    assert complete(address) == [] and len(calls) == 2

    def noted(self: ObjectStore, key: Any, name: str, *more: Any) -> None:
        sent.append(name)
        real(self, key, name, *more)

    monkeypatch.setattr(ObjectStore, "put", noted)
    job = Job()
    smp.resume_from_checkpoint(address)
    assert smp.wait_for_uploads(30)
    assert complete(address) == ["last_partial"]
    assert calls[0] not in sent and calls[1] in sent, "what was there is not sent again"
    assert sent[-1] == "manifest.json"


def test_a_store_that_cannot_be_used_is_refused_before_the_first_step(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: ObjectStore) -> None:
        raise PermissionError("no credentials")

    monkeypatch.setattr(ObjectStore, "generations", denied)
    preemption.save_to(address)
    job = Job()
    with pytest.raises(RuntimeError, match="could not save to file://.*PermissionError: no cred"):
        job.train()
    with pytest.raises(ValueError, match="PermissionError: no credentials"):
        preemption._Process.automatic = None
        job.train()
        smp.save_checkpoint(address, "a", model=job.model)
    assert not list(Path(address.removeprefix("file://")).parent.glob("local/*/a_partial"))


def test_a_clock_that_goes_back_does_not_make_a_checkpoint_old(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    job.train()
    smp.save_checkpoint(address, "before", model=job.model, user_content={"number": 1})
    smp.shutdown()
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() - 10**15)
    job = Job()
    job.train()
    smp.save_checkpoint(address, "after", model=job.model, user_content={"number": 2})
    smp.shutdown()
    (tmp_path / "local").rename(tmp_path / "gone")
    job = Job()
    assert smp.resume_from_checkpoint(address) == {"number": 2}
    assert smp.resume_from_checkpoint(address, tag="before") == {"number": 1}


def test_old_ones_are_pruned_in_the_folder_and_in_the_store(address: str, tmp_path: Path) -> None:
    job = Job()
    for number in range(5):
        job.train()
        smp.save_checkpoint(
            address,
            f"step{number}",
            model=job.model,
            user_content={"number": number},
            num_kept_partial_checkpoints=2,
        )
    assert smp.wait_for_uploads(30)
    assert complete(address) == ["step3_partial", "step4_partial"]
    (root,) = (tmp_path / "local").iterdir()
    assert sorted(p.name for p in root.glob("step*")) == ["step3_partial", "step4_partial"]
    assert list((root / ".sending").iterdir()) == []
    for number in (3, 4):
        assert smp.resume_from_checkpoint(address, f"step{number}") == {"number": number}


def test_what_was_given_up_does_not_fill_the_disk(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = ObjectStore.put

    def denied(*_: Any) -> None:
        raise PermissionError("expired")

    monkeypatch.setattr(ObjectStore, "put", denied)
    job = Job()

    def save(tag: str) -> None:
        job.train()
        smp.save_checkpoint(address, tag, model=job.model, num_kept_partial_checkpoints=2)

    for number in range(4):
        save(f"step{number}")
    with pytest.raises(RuntimeError, match="step3_partial is not in .*expired"):
        smp.wait_for_uploads(30)
    assert "Training goes on" in caplog.text
    (root,) = (tmp_path / "local").iterdir()
    left = sorted(p.name.split(".")[0] for p in (root / ".sending").iterdir() if p.is_dir())
    assert left == ["step2_partial", "step3_partial"]
    save("step4")
    with pytest.raises(RuntimeError, match="step4_partial is not in .*expired"):
        smp.wait_for_uploads(30)
    monkeypatch.setattr(ObjectStore, "put", real)
    save("step5")
    assert smp.wait_for_uploads(30), "what is older does not matter any more"
    assert complete(address) == ["step5_partial"]
    left = sorted(p.name.split(".")[0] for p in (root / ".sending").iterdir() if p.is_dir())
    assert left == ["step4_partial"], "one more is kept"
    smp.shutdown()


def test_two_parts_of_lost_checkpoints_are_kept(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError("expired")

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", denied)
        job = Job()
        job.train()
        for number in range(3):
            smp.save_checkpoint(address, f"step{number}", model=job.model, user_content=number)
        with pytest.raises(RuntimeError, match="expired"):
            smp.wait_for_uploads(30)
        smp.shutdown()
    (root,) = (tmp_path / "local").iterdir()
    lost = [next((root / ".sending").glob(f"step{number}*/rng_0.pt")) for number in range(3)]
    away = [path.rename(tmp_path / f"{number}.pt") for number, path in enumerate(lost)]

    def left() -> list[str]:
        return sorted(p.name[:5] for p in (root / ".sending").iterdir() if p.is_dir())

    job = Job()
    smp.resume_from_checkpoint(address)
    assert left() == ["step1", "step2"] and caplog.text.count("cannot be completed in file://") == 3
    smp.shutdown()
    away[2].rename(lost[2])
    job = Job()
    smp.resume_from_checkpoint(address)
    assert smp.wait_for_uploads(30)
    assert complete(address) == ["step2_partial"] and left() == ["step1"]
    smp.save_checkpoint(address, "a", model=job.model, num_kept_partial_checkpoints=2)
    assert smp.wait_for_uploads(30) and left() == [], "two newer ones are in the store"


def test_a_store_in_memory_is_for_one_process(address: str, tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}/x"
    job = Job()
    job.train()
    smp.save_checkpoint(place, "a", model=job.model, user_content=1, blocking=False)
    assert smp.wait_for_uploads(30)
    (tmp_path / "local").rename(tmp_path / "gone")
    saved = job.weights()
    job.train()
    assert smp.resume_from_checkpoint(place) == 1
    assert all(map(torch.equal, job.weights(), saved))


def test_a_folder_that_fails_does_not_make_anybody_wait(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ObjectStore, "put", full)
    monkeypatch.setattr(sending, "_PAUSES_S", ())
    monkeypatch.setattr(pending.Pending, "say_failed", full)
    job = Job()
    job.train()
    smp.save_checkpoint(address, "a", model=job.model)
    with pytest.raises(RuntimeError, match="No space left on device"):
        smp.wait_for_uploads(30)
