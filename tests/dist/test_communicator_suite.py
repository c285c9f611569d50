"""The checks of tests/cpp/comm/communicator_suite.h on processes: Gloo, shared memory, MPI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from smp import _C
from tests.dist.pool import Pool
from tests.dist.processes import REPO, launch, mpirun, run_ranks

SCRIPT = REPO / "tests" / "dist" / "scripts" / "communicator_suite.py"
NUM_CHECKS = 24


def run_gloo(pool: Pool, checks: str, size: int, folder: Path, kind: str = "gloo") -> list[str]:
    """Output of each rank, after all have ended well."""
    ended = run_ranks(pool, SCRIPT, size, [kind, checks, str(folder)])
    for process in ended:
        assert process.returncode == 0 and not process.hung, f"{process.rank}: {process.output}"
    return [process.output for process in ended]


def mpirun_or_skip(size: int) -> list[str]:
    if not _C.mpi_available():
        pytest.skip("smp was built without MPI")
    command = mpirun(size)
    if command is None:
        pytest.skip("no mpirun on PATH")
    return command


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gloo_keeps_every_promise_of_a_communicator(pool: Pool, size: int, tmp_path: Path) -> None:
    for output in run_gloo(pool, "all", size, tmp_path):
        assert output.count(" ok ") == NUM_CHECKS, output
        assert "finished" in output


@pytest.mark.parametrize("size", [2, 4])
def test_shared_memory_keeps_every_promise_of_a_communicator(
    pool: Pool, size: int, tmp_path: Path
) -> None:
    for output in run_gloo(pool, "all", size, tmp_path, "shared"):
        assert output.count(" ok ") == NUM_CHECKS, output
        assert "finished" in output


@pytest.mark.parametrize("size", [2, 4])
def test_shared_memory_abort_ends_waits_and_the_process_can_leave(
    pool: Pool, size: int, tmp_path: Path
) -> None:
    for output in run_gloo(pool, "abort", size, tmp_path, "shared"):
        assert "aborted" in output


@pytest.mark.sample(keep=0)
@pytest.mark.alone
def test_shared_memory_is_several_times_as_fast_as_gloo(pool: Pool, tmp_path: Path) -> None:
    output = run_gloo(pool, "round_trip", 2, tmp_path, "shared")[0]
    found = {name: float(text) for name, text in re.findall(r"(\w+)_us=([\d.]+)", output)}
    # Measured: 0.2 to 0.3.
    assert found["all_reduce_4mb"] < 0.8 * found["plain_all_reduce_4mb"], output


@pytest.mark.parametrize("size", [2, 4])
def test_gloo_abort_ends_waits_and_the_process_can_leave(
    pool: Pool, size: int, tmp_path: Path
) -> None:
    for output in run_gloo(pool, "abort", size, tmp_path):
        assert "aborted" in output


@pytest.mark.alone
def test_gloo_round_trips_do_not_wait_for_any_polling(pool: Pool, tmp_path: Path) -> None:
    output = run_gloo(pool, "round_trip", 2, tmp_path)[0]
    found = {name: float(text) for name, text in re.findall(r"(\w+)_us=([\d.]+)", output)}
    # A sleep between two looks would cost as much as many round trips of Gloo itself.
    assert found["round_trip"] < 5 * found["plain_round_trip"], output
    assert found["all_reduce_4mb"] < 5 * found["plain_all_reduce_4mb"], output


def test_mpi_keeps_every_promise_of_a_communicator(tmp_path: Path) -> None:
    ended = launch([*mpirun_or_skip(2), str(SCRIPT), "mpi", "all", str(tmp_path)])
    assert ended.returncode == 0, ended.stdout
    # Both ranks run them on the world and on a group in another order.
    assert ended.stdout.count(" ok ") == 4 * NUM_CHECKS, ended.stdout


@pytest.mark.sample(keep=0)
def test_mpi_abort_ends_waits_and_fails_the_job(tmp_path: Path) -> None:
    ended = launch([*mpirun_or_skip(2), str(SCRIPT), "mpi", "abort", str(tmp_path)])
    assert ended.stdout.count(": aborted") == 2, ended.stdout
    assert ended.returncode != 0, ended.stdout
