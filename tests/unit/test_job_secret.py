"""The secret of a job: where it comes from, and what is refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from smp.world.job_secret import check_same_secret, fingerprint, given_secret, share_secret

SECRET = "0123456789abcdef0123456789abcdef"


def test_a_job_without_a_secret_draws_one() -> None:
    assert given_secret({}) is None
    assert given_secret({"SMP_JOB_SECRET": "", "SMP_JOB_SECRET_FILE": ""}) is None
    store = dist.HashStore()
    drawn = share_secret(store, 0, None)
    assert len(drawn) == 32
    assert share_secret(store, 1, None) == drawn
    assert share_secret(dist.HashStore(), 0, None) != drawn


def test_a_given_secret_does_not_go_through_the_store() -> None:
    store = dist.HashStore()
    assert share_secret(store, 0, SECRET.encode()) == SECRET.encode()
    assert store.num_keys() == 0


def test_a_secret_comes_from_the_environment_or_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    assert given_secret({"SMP_JOB_SECRET": SECRET}) == SECRET.encode()
    assert given_secret({"SMP_JOB_SECRET_FILE": str(path)}) == SECRET.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"has mode {mode:04o}.*chmod 600"):
        given_secret({"SMP_JOB_SECRET_FILE": str(path)})


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    with pytest.raises(ValueError, match="belongs to user 12345"):
        given_secret({"SMP_JOB_SECRET_FILE": str(path)})


def test_what_cannot_be_a_secret_is_refused_without_telling_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 9 bytes; give at least 32") as caught:
        given_secret({"SMP_JOB_SECRET": "too short"})
    assert "too short" not in str(caught.value)
    with pytest.raises(ValueError, match="both set"):
        given_secret({"SMP_JOB_SECRET": SECRET, "SMP_JOB_SECRET_FILE": "/x"})
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        given_secret({"SMP_JOB_SECRET_FILE": str(tmp_path / "none")})


def test_all_ranks_have_the_same_secret_or_none() -> None:
    one, other = fingerprint(SECRET.encode()), fingerprint(SECRET.upper().encode())
    assert fingerprint(None) == ""
    assert re.fullmatch("[0-9a-f]{16}", one) and one != other
    check_same_secret([one, one, one])
    check_same_secret(["", ""])
    with pytest.raises(ValueError, match=r"ranks \[1, 2\] have no SMP_JOB_SECRET"):
        check_same_secret([one, "", ""])
    with pytest.raises(ValueError, match=r"of ranks \[1\] differs from that of rank 0"):
        check_same_secret([one, other, one])
