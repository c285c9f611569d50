"""A rank of the communicator checks over Gloo, Gloo and shared memory, or MPI.

    communicator_suite.py gloo CHECKS FOLDER       (RANK and WORLD_SIZE are set)
    communicator_suite.py shared CHECKS FOLDER     (the same)
    communicator_suite.py mpi CHECKS FOLDER        (under mpirun)

CHECKS is "all", "abort" or "round_trip"; FOLDER is shared by the ranks and empty at first.
Prints one line per check.
"""

from __future__ import annotations

import datetime
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed

import smp._C as _C
import smp_testing


def gloo_backend(folder: Path, rank: int, size: int) -> torch.distributed.ProcessGroupGloo:
    store = torch.distributed.FileStore(str(folder / "store"), size)
    # Longer than any wait of the checks: see make_c10d_communicator.
    timeout = datetime.timedelta(minutes=30)
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout)


def report(comm: _C.Communicator, text: str) -> None:
    # One write per line, so that lines of several ranks do not mix.
    sys.stdout.write(f"rank {comm.group_rank} of {comm.size}: {text}\n")
    sys.stdout.flush()


def run_all(comm: _C.Communicator) -> None:
    for name in smp_testing.check_names():
        begin = time.monotonic()
        try:
            smp_testing.run_check(comm, name)
        except Exception as error:
            report(comm, f"FAILED {name}: {error}")
            raise
        report(comm, f"{name} ok {1000 * (time.monotonic() - begin):.1f} ms")


def run_in_group(comm: _C.Communicator) -> None:
    """The same over a group whose order is not that of the world."""
    members = list(reversed(range(comm.size)))
    group = _C.make_mpi_group(members)
    assert group.group_rank == members.index(comm.group_rank), group.group_rank
    assert group.name == "mpi:" + ",".join(map(str, members)), group.name
    run_all(group)
    try:
        _C.make_mpi_group([0, 0])
    except ValueError as error:
        assert "expected different ranks in [0, " in str(error), error
    else:
        raise AssertionError("make_mpi_group took a rank twice")


def time_round_trips(
    comm: _C.Communicator, plain: torch.distributed.ProcessGroupGloo | None
) -> None:
    """128 bytes there and back; 4 MB all_reduce (float32). In turns with Gloo itself."""
    message = torch.zeros(16, dtype=torch.float64)
    peer = 1 - comm.group_rank
    large = torch.ones(1 << 20)

    def exchange() -> None:
        for is_mine in (comm.group_rank == 0, comm.group_rank == 1):
            work = comm.send(message, peer) if is_mine else comm.recv(message, peer)
            work.wait(600)

    def exchange_plainly() -> None:
        for is_mine in (comm.group_rank == 0, comm.group_rank == 1):
            (plain.send if is_mine else plain.recv)([message], peer, 0).wait()

    calls = {
        "round_trip_us": (300, exchange),
        "all_reduce_4mb_us": (20, lambda: comm.all_reduce(large).wait(600)),
    }
    if plain is not None:
        calls["plain_round_trip_us"] = (300, exchange_plainly)
        calls["plain_all_reduce_4mb_us"] = (20, lambda: plain.allreduce([large]).wait())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(300):
        for name, (repeats, call) in calls.items():
            if index >= repeats:
                continue
            comm.barrier().wait(600)
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    report(comm, " ".join(f"{name}={1e6 * statistics.median(t):.1f}" for name, t in times.items()))


def leave_together(comm: _C.Communicator, folder: Path) -> None:
    """A rank that ends closes its connections, before the others have called abort."""
    (folder / f"aborted{comm.group_rank}").touch()
    deadline = time.monotonic() + 600
    while len(list(folder.glob("aborted*"))) < comm.size:
        if time.monotonic() > deadline:
            raise TimeoutError("the other ranks did not abort")
        time.sleep(0.01)


def main() -> None:
    kind, checks, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    plain = None
    if kind != "mpi":
        plain = gloo_backend(folder, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        comm = _C.make_c10d_communicator(plain, "gloo:suite")
    else:
        comm = _C.make_mpi_world()
    if kind == "shared":
        comm = _C.share_collectives(comm, machine="", enabled=True)
    if checks == "abort":
        # A collective that was given up cannot be taken back from MPI. Nothing is finalized:
        # mpirun sees a failed job, as it should.
        smp_testing.check_abort_ends_waits(comm, kind != "mpi")
        report(comm, "aborted")
        leave_together(comm, folder)
        return
    elif checks == "round_trip":
        time_round_trips(comm, plain)
    else:
        run_all(comm)
        if kind == "mpi":
            run_in_group(comm)
    report(comm, "finished")
    if kind == "mpi":
        _C.mpi_finalize()
        _C.mpi_finalize()


if __name__ == "__main__":
    main()
