"""The secret of a job, which both sides of each of our connections prove to have.

See `csrc/health/handshake.h` for the proof, and docs/security.md for what it protects.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping, Sequence

import torch.distributed as dist

import smp._C as _C
from smp.config import given_files

SECRET_VARIABLE = "SMP_JOB_SECRET"
FILE_VARIABLE = "SMP_JOB_SECRET_FILE"
#: Key under which rank 0 stores the secret if the environment gives none.
SECRET_KEY = "secret"
_HOW = "for instance what `openssl rand -hex 32` prints"


def given_secret(env: Mapping[str, str]) -> bytes | None:
    """Returns the secret that the environment gives; None if the job is to draw one.

    Args:
        env: `SMP_JOB_SECRET` is the secret; `SMP_JOB_SECRET_FILE` is the path of a file that has
            it, owned by this user with mode 0600 or 0400.

    Raises:
        ValueError: both are set, the secret is too short, or the file cannot be read or can be
            read by others. The text never contains the secret.
    """
    text, path = env.get(SECRET_VARIABLE, ""), env.get(FILE_VARIABLE, "")
    if text and path:
        raise ValueError(
            f"smp launch: {SECRET_VARIABLE} and {FILE_VARIABLE} are both set; remove one of them"
        )
    if not text and not path:
        return None
    where = SECRET_VARIABLE if text else f"{path} ({FILE_VARIABLE})"
    secret = text.strip().encode() if text else _read_private(path)
    if len(secret) < _C.MIN_SECRET_BYTES:
        raise ValueError(
            f"smp launch: the secret in {where} has {len(secret)} bytes; give at least "
            f"{_C.MIN_SECRET_BYTES} random ones, {_HOW}"
        )
    return secret


def _read_private(path: str) -> bytes:
    try:
        with given_files.open_regular(path) as file:
            info = os.fstat(file.fileno())
            text = file.read(given_files.MOST_BYTES).strip()
    except OSError as error:
        raise ValueError(
            f"smp launch: {FILE_VARIABLE}={path!r} cannot be read: {error.strerror}; correct it"
        ) from None
    if info.st_uid not in (os.getuid(), 0) or info.st_mode & 0o077:
        raise ValueError(
            f"smp launch: {FILE_VARIABLE}={path!r} has mode {stat.S_IMODE(info.st_mode):04o} and "
            f"belongs to user {info.st_uid}; it must be a file that only user {os.getuid()} may "
            "read: chmod 600"
        )
    return text


def fingerprint(secret: bytes | None) -> str:
    """Returns a text that is equal for equal secrets and reveals nothing else; empty for None."""
    if secret is None:
        return ""
    return hmac.digest(secret, b"smp fingerprint", "sha256").hex()[:16]


def check_same_secret(fingerprints: Sequence[str]) -> None:
    """Checks that all ranks were given the same secret, or that none was given one.

    Args:
        fingerprints: fingerprint of each rank's secret, index = global rank.

    Raises:
        ValueError: names the ranks; the same text on all of them.
    """
    if len(set(fingerprints)) < 2:
        return
    without = [rank for rank, one in enumerate(fingerprints) if not one]
    if without:
        raise ValueError(
            f"smp launch: ranks {without} have no {SECRET_VARIABLE} (nor {FILE_VARIABLE}), "
            "other ranks have one; give all ranks of a job the same secret, or none at all"
        )
    others = [rank for rank, one in enumerate(fingerprints) if one != fingerprints[0]]
    raise ValueError(
        f"smp launch: {SECRET_VARIABLE} (or {FILE_VARIABLE}) of ranks {others} differs from "
        "that of rank 0; give all ranks of a job the same secret"
    )


def share_secret(store: dist.Store, global_rank: int, given: bytes | None) -> bytes:
    """Returns the secret of this job. Collective if none was given.

    Args:
        store: keys of this init. If the job draws the secret, it is sent through the store, so
            everyone who can read the store has the secret.
        global_rank: global rank of this process; rank 0 draws.
        given: secret from the environment, on all ranks or on none.
    """
    if given is not None:
        return given
    if global_rank == 0:
        store.set(SECRET_KEY, secrets.token_hex(32))
    return bytes.fromhex(store.get(SECRET_KEY).decode())
