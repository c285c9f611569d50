"""``smp doctor``: what it finds, and that nothing which is missing or hangs takes it along."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from smp_cli import cores
from smp_cli.doctor import host, probes, ranks, report
from smp_cli.doctor.probes import PROBES, Probe, run_probe
from smp_cli.doctor.report import Section
from smp_cli.main import main

from tests.conftest import REPO
from tests.installed import python_path
from tests.patience import PATIENCE_S

HERE = "tests.unit.test_smp_doctor"
#: Folder of the `sitecustomize` that ranks of the doctor import.
SUBSTITUTES = REPO / "tests" / "substitutes"


# Probes of the tests; they run in processes of their own.


def hangs() -> Section:
    time.sleep(2 * PATIENCE_S)
    return Section("")


def crashes() -> Section:
    print("noise on stdout", flush=True)
    os.abort()


def raises() -> Section:
    raise ImportError("no module named torch")


def finds() -> Section:
    print("noise on stdout")
    return Section("", {"a": 1}, ["b is wrong"])


@pytest.fixture(autouse=True)
def tests_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO))


def run(name: str, limit_s: float = 60.0) -> Section:
    return run_probe(Probe(name, f"{HERE}:{name}", limit_s), limit_s)


@pytest.mark.sample(keep=0)
def test_answer_of_a_probe_comes_whatever_it_prints() -> None:
    assert run("finds") == Section("finds", {"a": 1}, ["b is wrong"])


def test_probe_that_hangs_crashes_or_raises_is_a_problem() -> None:
    assert "no answer within 0.5 s" in run("hangs", 0.5).problems[0]
    assert "was killed by signal 6: noise on stdout" in run("crashes").problems[0]
    assert "no module named torch" in run("raises").problems[0]


def test_every_probe_exists() -> None:
    assert len({probe.name for probe in PROBES}) == len(PROBES) >= 10
    assert all(callable(probe.load()) for probe in PROBES)


def test_machine_without_torch_gets_a_report(tmp_path: Path) -> None:
    """Reports that torch cannot be loaded, and that smp's extension cannot either."""
    if os.environ.get("SMP_TEST_INSTALLED"):
        pytest.skip("PyTorch lies beside the installed smp, whose folder comes first")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')\n")
    env = {**os.environ, "PYTHONPATH": python_path(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from smp_cli import main; sys.exit(main())"]
        + ["doctor", "--json", "--only", "packages,build,ranks over tcp"],
        env=env | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    # `run_probe` puts our packages first, so torch is found behind them, in the broken folder.
    for name in ("packages", "build"):
        assert any("libcudart is missing" in text for text in found[name]["problems"]), found
    assert "2 ranks could not communicate" in found["ranks over tcp"]["problems"][0]


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(
    ("name", "way"), [("ranks over tcp", "tcp"), ("ranks over shared memory", "shared memory")]
)
def test_ways_between_two_ranks_are_measured(name: str, way: str) -> None:
    section = run_probe(next(p for p in PROBES if p.name == name), 100)
    found = re.fullmatch(
        rf"{way}, round trip (\d+) us, (\d+\.\d+) GB/s", section.values["ranks 0 and 1"]
    )
    assert found and int(found[1]) > 0 and float(found[2]) > 0


@pytest.mark.sample(keep=0)
def test_lane_of_each_pair_is_named_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import smp_testing  # noqa: F401 - what the ranks import; skips where there is none

    monkeypatch.setenv("PYTHONPATH", python_path(SUBSTITUTES))
    settings = {"SMP_TEST_LANES": "1:0:4:ring"}
    section = ranks.measure_pairs("lanes", settings, 3, 1 << 14)
    assert list(section.values) == [f"ranks {pair}" for pair in ("0 and 1", "0 and 2", "1 and 2")]
    for words in section.values.values():
        assert re.fullmatch(r"ipc, round trip \d+ us, \d+\.\d+ GB/s", words)
    assert not any("no place" in problem for problem in section.problems)
    too_large = ranks.measure_pairs("lanes", settings, 2, 1 << 20)
    assert any("did not fit into the lane" in problem for problem in too_large.problems)
    host = ranks.measure_pairs("lanes", settings | {"SMP_LANE": "host"}, 2, 1 << 14)
    assert host.values["ranks 0 and 1"].startswith("host, ")
    assert host.values["ranks 0 and 1"].endswith("(SMP_LANE=host)")


def test_without_devices_tensors_travel_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "count_gpus", lambda env: 0)
    section = ranks.on_devices()
    assert "tensors travel in messages" in section.values["not measured"] and not section.problems


def test_json_and_text_have_the_same_and_the_status_counts_problems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smp_cli.doctor.PROBES", (Probe("finds", f"{HERE}:finds", 60),))
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {"finds": {"values": {"a": 1}, "problems": ["b is wrong"]}}
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert text.splitlines() == [
        "smp doctor",
        "",
        "finds",
        "  a  1",
        "  ! b is wrong",
        "",
        "1 problem found",
    ]
    assert main(["doctor", "--only", "other"]) == 2


def test_values_are_words() -> None:
    values: dict[str, Any] = {"x": None, "long name": True, "y": [1, 2.5], "z": {"k": "v"}}
    lines = report.to_text([Section("s", values)]).splitlines()
    assert lines[3:7] == [
        "  x          none",
        "  long name  yes",
        "  y          1, 2.5",
        "  z          k v",
    ]
    assert lines[-1] == "no problems found"
    assert (report.gib(3 << 29), report.gib(1 << 20)) == ("1.5 GiB", "1 MiB")


# ---- what is wrong -----------------------------------------------------------------


def test_host_probes_find_this_machine() -> None:
    system, limits = host.system(), host.limits()
    assert system.values["python"].startswith("3.")
    assert "available" in system.values["memory"]
    assert "/" in limits.values["open files (-n)"]


def test_small_and_missing_shared_memory_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No such file" in host.shared_memory(tmp_path / "none").problems[0]
    monkeypatch.setattr(host, "_MIN_SHM", 1 << 60)
    assert "--shm-size" in host.shared_memory(tmp_path).problems[0]

    def forbidden(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert any("memfd_create: Operation not permitted" in p for p in host.shared_memory().problems)


def test_low_limits_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.resource, "getrlimit", lambda _: (256, 256))
    problems = " ".join(host.limits().problems)
    assert "ulimit -n 65536" in problems and "ulimit -u 65536" in problems


def test_unwritable_and_network_folders_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(host, "file_system", lambda _: "nfs4")
    assert "network file system (nfs4)" in " ".join(host.temporary_files().problems)

    def fails() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(host.tempfile, "gettempdir", fails)
    assert "set TMPDIR" in host.temporary_files().problems[0]


def test_file_system_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"d / ext4 rw\nd {tmp_path} nfs rw\nd {tmp_path}/a tmpfs rw\n")
    (tmp_path / "a").mkdir()
    found = [host.file_system(f, mounts) for f in (tmp_path / "a", tmp_path, Path("/usr"))]
    assert found == ["tmpfs", "nfs", "ext4"]


def test_quota_of_the_control_group_bounds_the_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000")
    assert cores.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000")
    assert cores.cpu_quota(tmp_path) == 1.5
    assert cores.usable_cores(tmp_path) == 1
    old = tmp_path / "old" / "cpu"
    old.mkdir(parents=True)
    (old / "cpu.cfs_quota_us").write_text("-1")
    (old / "cpu.cfs_period_us").write_text("100000")
    assert cores.cpu_quota(tmp_path / "old") is None


def test_slow_pairs_are_problems() -> None:
    section = Section("x")
    ranks._judge(section, [{"round_trip_s": 5e-3, "bytes_per_s": 1e8}])
    assert section.problems[0].startswith("a message takes 5.0 ms there and back")
    assert section.problems[1].startswith("100 MB/s between two ranks of one machine is slow")


def test_probes_have_limits() -> None:
    assert all(0 < probe.limit_s <= 120 for probe in probes.PROBES)
