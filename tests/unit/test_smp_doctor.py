"""``smp doctor``: what it finds, and that nothing which is missing or hangs takes it along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from smp_cli import cores
from smp_cli.doctor import host, probes, report, transports
from smp_cli.doctor.probes import PROBES, Probe, run_probe
from smp_cli.doctor.report import Section
from smp_cli.main import main

from smp.planning import hardware
from tests.conftest import REPO
from tests.installed import python_path

HERE = "tests.unit.test_smp_doctor"
#: Of `sitecustomize`, which ranks of the doctor import.
SUBSTITUTES = REPO / "tests" / "substitutes"


# Probes of the tests; they run in processes of their own.


def hangs() -> Section:
    time.sleep(60)
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


def test_answer_of_a_probe_comes_whatever_it_prints() -> None:
    assert run("finds") == Section("finds", {"a": 1}, ["b is wrong"])


def test_probe_that_hangs_crashes_or_raises_is_a_problem() -> None:
    begin = time.monotonic()
    assert "no answer within 0.5 s" in run("hangs", 0.5).problems[0]
    assert time.monotonic() - begin < 20
    assert "was killed by signal 6: noise on stdout" in run("crashes").problems[0]
    assert "no module named torch" in run("raises").problems[0]


def test_every_probe_exists() -> None:
    assert len({probe.name for probe in PROBES}) == len(PROBES) >= 10
    assert all(callable(probe.load()) for probe in PROBES)


def test_machine_without_torch_gets_a_report(tmp_path: Path) -> None:
    """Also one without smp's extension: both fail to load, and that is what it says."""
    if os.environ.get("SMP_TEST_INSTALLED"):
        pytest.skip("PyTorch lies beside the installed smp, whose folder comes first")
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')\n")
    env = {**os.environ, "PYTHONPATH": python_path(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from smp_cli import main; sys.exit(main())"]
        + ["doctor", "--json", "--only", "packages,build,transport tcp"],
        env=env | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    # `run_probe` puts our packages first, so torch is found behind them, in the broken folder.
    for name in ("packages", "build"):
        assert any("libcudart is missing" in text for text in found[name]["problems"]), found
    assert "two ranks could not talk" in found["transport tcp"]["problems"][0]


def test_transport_is_measured_between_two_ranks() -> None:
    section = run_probe(next(p for p in PROBES if p.name == "transport tcp"), 100)
    assert section.values["shared"] is False
    assert float(section.values["round trip"].split()[0]) > 0
    assert float(section.values["bandwidth"].split()[0]) > 0


def test_lane_of_each_pair_is_told_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import smp_testing  # noqa: F401 - what the ranks import; skips where there is none

    monkeypatch.setenv("PYTHONPATH", python_path(SUBSTITUTES))
    settings = {"SMP_TEST_LANES": "1:0:4:ring"}
    section = transports.measure_lanes(settings, 3, 1 << 14)
    assert not section.problems
    assert list(section.values) == [f"ranks {pair}" for pair in ("0 and 1", "0 and 2", "1 and 2")]
    for words in section.values.values():
        lane, rate, unit = words.split()
        assert lane == "ipc," and float(rate) >= 0 and unit == "GB/s"
    assert not section.problems
    too_large = transports.measure_lanes(settings, 2, 1 << 20)
    assert "found no place on the lane" in too_large.problems[0]
    host = transports.measure_lanes(settings | {"SMP_LANE": "host"}, 2, 1 << 14)
    assert host.values["ranks 0 and 1"].startswith("host, ")
    assert host.values["ranks 0 and 1"].endswith("(SMP_LANE=host)")


def test_without_devices_tensors_travel_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "count_gpus", lambda env: 0)
    section = transports.lanes()
    assert "shared memory or sockets" in section.values["no GPUs"] and not section.problems


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

    def fails(_: Path) -> float:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(host, "_write_speed", fails)
    problems = " ".join(host.temporary_files().problems)
    assert "Read-only file system" in problems and "network file system (nfs4)" in problems


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


def test_slow_transports_are_problems() -> None:
    section = Section("x", {"round trip us": 5000.0, "bytes per s": 1e8})
    transports._judge(section)
    assert len(section.problems) == 2 and section.values["bandwidth"] == "0.10 GB/s"


def test_probes_have_limits() -> None:
    assert all(0 < probe.limit_s <= 120 for probe in probes.PROBES)


def test_calibration_is_hardware_for_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smp_cli.doctor.calibration.count_gpus", lambda environ: 0)
    file = tmp_path / "here.json"
    assert main(["doctor", "--calibrate", str(file)]) == 0
    found = hardware.load(str(file))
    assert json.loads(capsys.readouterr().out) == found.to_json()
    assert found.at_once == found.devices_per_host == cores.usable_cores()
    assert found.flops_per_byte("fp32") > 0 and found.inside.latency_s > 0
    assert found.source.startswith("measured by")
    # Processor time of one core: an element of a small transformer takes nanoseconds.
    overheads = found.overheads
    assert overheads is not None and found.collective is not None
    assert 1e-10 < overheads.microbatch_element_s < 1e-7
    assert 1e-10 < overheads.update_element_s < 1e-7
    assert 1e-6 < overheads.call_s < 1e-1 and overheads.crowded >= 1


def test_calibration_into_no_folder_is_bad_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--calibrate", str(tmp_path / "no" / "here.json")]) == 2
    assert "is no file in a folder that is there" in capsys.readouterr().err


def test_calibration_that_cannot_measure_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Section("calibration", problems=["1 ranks could not talk to each other: no torch"])
    monkeypatch.setattr("smp_cli.doctor.calibration.run_link", lambda *_: (broken, None))
    file = tmp_path / "here.json"
    assert main(["doctor", "--calibrate", str(file)]) == 1
    assert "no torch" in capsys.readouterr().err and not file.exists()
