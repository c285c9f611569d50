"""``smp.launch`` in a script that plain python runs: ranks, results, errors, and the end."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import smp
from smp.launching.others import _print, whole_lines
from tests.dist.processes import REPO
from tests.dist.zygote import RANK_VARIABLES
from tests.installed import python_path
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.waits

SCRIPT = """
import os, sys, time
import smp
from tests.harness import Layers, own_samples, train_step_of

how = sys.argv[1]

def main(factor):
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    model = smp.DistributedModel(Layers().double())
    step = train_step_of(model)
    loss = step(factor * own_samples(0)).reduce_mean().item()
    print(f"rank {smp.rank()} of {smp.size()} is {os.getpid()}", flush=True)
    if how == "raises" and smp.rank() == 1:
        raise ValueError("the data end here")
    if how == "dies" and smp.rank() == 1:
        os._exit(3)
    while how != "ends":
        if how == "dies":
            time.sleep(0.1)  # outside of smp, where nothing notices the other rank
        else:
            step(own_samples(0))
    return loss

print("reads the script", flush=True)
found = smp.launch(main, 2, 3.0)
print(f"goes on with {found!r}, smp runs: {smp.is_initialized()}", flush=True)
if how == "ends":
    try:
        smp.launch(main, 2, 3.0)
    except RuntimeError as error:
        print(error)
"""


# Ignores Ctrl-C, as processes do that a shell has started in the background.
IGNORES = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def environment() -> dict[str, str]:
    env = {name: text for name, text in os.environ.items() if name not in RANK_VARIABLES}
    env = {name: text for name, text in env.items() if not name.startswith("SMP_")}
    return env | {"PYTHONPATH": python_path(REPO), "OMP_NUM_THREADS": "1", "SMP_DEVICE": "cpu"}


def start(folder: Path, *words: str, command: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, *command, str(script), *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate(timeout=PATIENCE_S)
    return text


def expected_loss() -> float:
    from tests.harness import Layers, samples_of

    model = Layers().double()
    return float(model(3.0 * samples_of(0)).square().mean().detach())


def pids_in(text: str) -> list[int]:
    return [int(line.rpartition(" ")[2]) for line in text.splitlines() if " of 2 is " in line]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("write_through", [False, True])
def test_lines_of_others_leave_lines_of_print_whole(
    monkeypatch: pytest.MonkeyPatch, write_through: bool
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(io.BufferedWriter(raw), write_through=write_through)
    monkeypatch.setattr(sys, "stdout", stream)
    with whole_lines():
        stream.write("own line")  # print writes the end of a line by itself
        _print(1, "out", [b"line of another"])
        stream.write("\n")
        stream.flush()
        assert raw.getvalue() == b"[1] line of another\nown line\n"
    assert stream.write_through == write_through and not stream.line_buffering


def test_a_plain_script_gets_the_result_of_rank_0_and_goes_on(tmp_path: Path) -> None:
    process = start(tmp_path, "ends")
    text = output_of(process)
    assert process.returncode == 0, text
    lines = text.splitlines()
    assert "reads the script" in lines and "[1] reads the script" in lines
    assert f"rank 0 of 2 is {process.pid}" in lines
    assert len({*pids_in(text)}) == 2 and not any(map(is_alive, pids_in(text)))
    (after,) = (line for line in lines if "goes on" in line)  # rank 1 does not
    assert after.startswith("goes on with ") and after.endswith("smp runs: False")
    loss = float(after.split()[3].rstrip(","))
    assert loss == pytest.approx(expected_loss(), rel=1e-12)
    assert "was called a second time in one script" in text


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", ("rank 1 exited with status 1", "the data end here")),
        ("dies", ("rank 1 exited with status 3",)),
    ],
)
def test_a_failed_rank_is_an_error_of_the_caller(
    tmp_path: Path, how: str, words: tuple[str, ...]
) -> None:
    process = start(tmp_path, how)
    text = output_of(process)
    assert process.returncode == 1, text
    assert "goes on" not in text
    for word in ("RuntimeError: smp.launch: ", *words):
        assert word in text
    assert len(pids_in(text)) == 2 and not any(map(is_alive, pids_in(text)))


def test_a_failed_rank_is_an_error_where_ctrl_c_is_ignored(tmp_path: Path) -> None:
    text = output_of(start(tmp_path, "dies", command=("-c", IGNORES)))
    assert "RuntimeError: smp.launch: rank 1 exited with status 3" in text


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, "loops")
    assert process.stdout is not None
    seen = ""
    while len(pids_in(seen)) < 2:
        line = process.stdout.readline()
        assert line, seen
        seen += line
    process.send_signal(signal.SIGINT)
    text = output_of(process)
    assert process.returncode not in (0, None)
    assert "KeyboardInterrupt" in text and "goes on" not in text
    wait_until(lambda: not any(map(is_alive, pids_in(seen))), lambda: seen)


def test_under_a_launcher_the_function_just_runs(tmp_path: Path) -> None:
    launcher = ("-m", "smp_cli", "run", "-n", "2")
    text = output_of(start(tmp_path, "ends", command=launcher))
    assert len(pids_in(text)) == 2
    assert text.count("goes on with") == 2, "all ranks were started for the whole script"
    other = output_of(start(tmp_path, "ends", command=("-m", "smp_cli", "run", "-n", "3")))
    assert "n=2, and the launcher 'smp' has started 3 ranks" in other


@pytest.mark.parametrize(
    ("main", "n", "error"),
    [
        (print, 0, "n: expected a whole number above 0, got 0"),
        (print, "2", "n: expected a whole number above 0, got '2'"),
        (3, 2, "main: expected a function, got int"),
    ],
)
def test_wrong_arguments_are_named(main: object, n: object, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        smp.launch(main, n)  # type: ignore[arg-type]
