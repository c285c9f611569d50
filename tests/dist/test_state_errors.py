"""Calls that put the parts of several ranks together, made on some of these ranks only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.dist.resume_training import Job, make

PP, TP = Job(2, 1, 1, "none", "fp32"), Job(1, 2, 1, "none", "fp32")
STATE, SDP = Job(1, 1, 2, "state", "fp32"), Job(1, 1, 2, "sdp2", "fp32")

#: Layout, what the first rank calls, where the other one is, and what the advice says.
ROWS = (
    (PP, "model.state_dict", "step", "if smp.rdp_rank() == 0:`"),
    (TP, "model.state_dict", "barrier", "with tensor parallelism, `if smp.dp_rank() == 0:`"),
    (PP, "model.state_dict(gather_to_rank0=True)", "allgather", "if smp.rdp_rank() == 0:`"),
    (PP, "model.state_dict", "optimizer.state_dict", "global_rank 1 is in optimizer.state_dict"),
    (SDP, "model.state_dict", "end", "not inside of `if smp.rank() == 0:` or `if smp.rdp_rank"),
    (SDP, "model.local_state_dict", "barrier", "state = model.local_state_dict()  # on all ranks"),
    (TP, "optimizer.state_dict", "allgather", "state = optimizer.state_dict()  # on all ranks"),
    (STATE, "optimizer.state_dict", "barrier", "state = optimizer.state_dict()  # on all ranks"),
    (STATE, "optimizer.local_state_dict", "step", "gather_if_shard=False gathers nothing"),
    (PP, "smp.save", "allgather", "path, partial=False)"),
)


def call_on_one(rank: int, job: Job, what: str, elsewhere: str, folder: str) -> tuple[str, str]:
    import smp

    model, optimizer, train = make(job, seed=1)
    train(0)
    calls: dict[str, Any] = {
        "model.state_dict": model.state_dict,
        "model.state_dict(gather_to_rank0=True)": lambda: model.state_dict(gather_to_rank0=True),
        "model.local_state_dict": model.local_state_dict,
        "optimizer.state_dict": optimizer.state_dict,
        "optimizer.local_state_dict": optimizer.local_state_dict,
        "smp.save": lambda: smp.save(model.local_state_dict(), f"{folder}/x", partial=False),
        "barrier": smp.barrier,
        "step": lambda: train(1),
        "allgather": lambda: (smp.allgather(1, smp.WORLD), smp.barrier()),
        "end": lambda: None,
    }
    try:
        calls[what if rank == 0 else elsewhere]()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(
    ("job", "what", "elsewhere", "advice"), ROWS, ids=lambda value: str(value)[:40]
)
def test_states_on_some_ranks_are_an_error_with_the_snippet(
    pool: Pool, tmp_path: Path, job: Job, what: str, elsewhere: str, advice: str
) -> None:
    outcomes = pool.outcomes(2, call_on_one, job, what, elsewhere, str(tmp_path))
    kind, text = outcomes[0].value
    assert kind in ("PeerFailure", "RuntimeError"), outcomes[0]
    name = what.partition("(")[0]
    assert f"{name} was called here, and not on all ranks" in text
    assert "global_ranks 0, 1 have to call it" in text and advice in text
    assert not list(tmp_path.iterdir())


def call_on_a_replica(rank: int, job: Job, folder: str) -> list[bool]:
    """Calls state functions on one replica only, as scripts do that need one replica's state."""
    import smp

    model, optimizer, train = make(job, seed=1)
    train(0)
    seen = []
    if smp.rdp_rank() == 0:
        seen.append(bool(model.state_dict()))
        seen.append(bool(model.state_dict(gather_to_rank0=True)))
        seen.append(bool(optimizer.state_dict()))
        smp.save(model.local_state_dict(), f"{folder}/x", partial=False)
    elif smp.rank() == 3:  # alone: its replica has nothing to send
        seen.append(bool(model.state_dict(gather_to_rank0=True)))
    smp.barrier()
    seen.append(bool(model.state_dict()))
    return seen


@pytest.mark.parametrize(
    "job", (Job(2, 1, 2, "none", "fp32"), Job(1, 2, 2, "none", "fp32")), ids=str
)
def test_one_replica_is_enough(pool: Pool, tmp_path: Path, job: Job) -> None:
    results = pool.run(4, call_on_a_replica, job, str(tmp_path))
    assert sorted(map(str, results)) == sorted(
        map(str, ([True, True, True, True], [True, False, True, True], [True], [False, True]))
    )
