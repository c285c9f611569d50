"""``smp run --hosts`` with an agent that starts everything here, and ranks that do not load torch.

Over a network, with ranks that train, it is tried by `tests/hosts/test_smp_run.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from smp_cli import remote
from smp_cli.environment import Share
from smp_cli.hosts import Agent, divide_again, plan_hosts
from smp_cli.remote import RemoteRanks
from smp_cli.run import _divider

from tests.installed import python_path
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.waits

# Called as ssh is: host, command. A host called "away" is not there.
AGENT = """#!/bin/sh
host=$1; shift
if [ "$host" = away ] || [ -e "lost.$host" ]; then echo "no route to $host" >&2; exit 255; fi
echo "welcome to $host"
AGENT_HOST=$host exec sh -c "$*"
"""


class Hosts:
    """Starts jobs on what it calls hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.agent = folder / "agent"
        self.agent.write_text(AGENT)
        self.agent.chmod(0o755)

    def start(
        self, source: str, *options: str, hosts: str = "one,two", ranks: int = 4, **env: str
    ) -> subprocess.Popen[str]:
        script = self.folder / "script.py"
        script.write_text(source)
        words = ["-n", str(ranks), "--hosts", hosts, "--agent", str(self.agent), *options]
        base = {k: v for k, v in os.environ.items() if not k.startswith(("SM_", "SMP_", "OMP_"))}
        return subprocess.Popen(
            [sys.executable, "-m", "smp_cli", "run", *words, str(script), "argument"],
            env={**base, "PYTHONPATH": python_path(), **env},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )

    def run(self, source: str, *options: str, **how: str | int) -> tuple[int, str, str]:
        """Status and what was printed."""
        process = self.start(source, *options, **how)  # type: ignore[arg-type]
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, out, err

    def pids(self, number: int) -> list[int]:
        """Waits until `number` ranks have written files of their name, and returns their pids."""

        def files() -> list[Path]:
            return list(self.folder.glob("pid*"))

        wait_until(lambda: len(files()) == number, files)
        return [int(file.read_text()) for file in files()]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


PRINT = """
import json, os, sys
names = ["SMP_RANK", "SMP_WORLD_SIZE", "SMP_LOCAL_RANK", "SMP_LOCAL_SIZE", "AGENT_HOST", "GIVEN"]
names += ["MASTER_ADDR", "MASTER_PORT", "HOME", "LOCAL_RANK"]
print(json.dumps({**{n: os.environ.get(n) for n in names}, "argv": sys.argv[1:]}))
print("to err", file=sys.stderr)
"""
WAIT = """
import os, pathlib, signal, sys, time
rank = os.environ["SMP_RANK"]
def end(number, frame):
    print("got", number, flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
file = pathlib.Path(f"pid{rank}")
file.with_name("new" + rank).write_text(str(os.getpid()))
file.with_name("new" + rank).rename(file)
time.sleep(9999)
"""


def has_ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def wait_for_ends(pids: list[int]) -> None:
    wait_until(lambda: all(map(has_ended, pids)), lambda: f"some of {pids} live on")


def test_each_host_runs_its_ranks_in_order(hosts: Hosts) -> None:
    status, out, err = hosts.run(PRINT, hosts="one:1,me@two:2", ranks=3, GIVEN="by me", RANK="7")
    assert status == 0, err
    found = {}
    for line in out.splitlines():
        rank, text = line.split(" ", 1)
        found[rank] = json.loads(text)
    assert sorted(found) == ["[0]", "[1]", "[2]"], out
    names = ("SMP_RANK", "SMP_LOCAL_RANK", "SMP_LOCAL_SIZE", "AGENT_HOST")
    places = [tuple(found[f"[{rank}]"][name] for name in names) for rank in range(3)]
    assert places == [
        ("0", "0", "1", "one"), ("1", "0", "2", "me@two"), ("2", "1", "2", "me@two")
    ]  # fmt: skip
    for one in found.values():
        assert (one["SMP_WORLD_SIZE"], one["GIVEN"], one["argv"]) == ("3", "by me", ["argument"])
        assert one["MASTER_ADDR"] == "one" and one["LOCAL_RANK"] is None
    assert len({one["MASTER_PORT"] for one in found.values()}) == 1
    assert sorted(line for line in err.splitlines() if "to err" in line) == [
        f"[{rank}] to err" for rank in range(3)
    ]


def test_the_address_and_the_variables_of_a_service_are_given(hosts: Hosts) -> None:
    source = "import os\nprint(*(os.environ[n] for n in ('SM_HOSTS', 'SM_CURRENT_HOST')))\n"
    source += "print('at', os.environ['MASTER_ADDR'])\n"
    status, out, err = hosts.run(
        source, "--config", "ddp=True", ranks=2, MASTER_ADDR="10.0.0.1", MASTER_PORT="1"
    )
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        '[0] ["one", "two"] one', "[0] at 10.0.0.1", '[1] ["one", "two"] two', "[1] at 10.0.0.1"
    ]  # fmt: skip


def test_logs_are_written_where_the_command_runs(hosts: Hosts) -> None:
    status, out, _ = hosts.run(
        "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe no text\\n')\n",
        "--log-dir", "logs", "--output", "raw", ranks=2,
    )  # fmt: skip
    assert status == 0 and not out.count("[")
    logs = sorted((hosts.folder / "logs").iterdir())
    assert [log.read_bytes() for log in logs] == [b"\xff\xfe no text\n"] * 2


def test_much_output_arrives_whole(hosts: Hosts) -> None:
    """More than a pipe holds, at once, and larger yet as a message between the processes."""
    source = (
        "import os\nos.write(1, b''.join(b'%d %s\\n' % (i, b'\\xe9' * 99) for i in range(3000)))\n"
    )
    status, out, err = hosts.run(source, ranks=2)
    assert (status, err) == (0, "")
    for rank in range(2):
        lines = [line for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] {i} {chr(0xDCE9) * 99}" for i in range(3000)]


def test_all_end_when_one_fails(hosts: Hosts) -> None:
    """Rank 3 does when all have come as far."""
    fails = (
        "while rank == '3' and len(list(pathlib.Path().glob('pid*'))) < 4:\n"
        "    time.sleep(0.05)\n"
        "if rank == '3':\n"
        "    sys.exit(7)\n"
        "time.sleep(9999)"
    )
    source = WAIT.replace("time.sleep(9999)", fails)
    status, out, err = hosts.run(source, "--grace-s", "5")
    assert status == 7 and "smp run: rank 3 exited with status 7" in err, err
    wait_for_ends(hosts.pids(4))
    assert out.count("got 15") == 3


def test_signals_reach_all_ranks(hosts: Hosts) -> None:
    process = hosts.start(WAIT)
    pids = hosts.pids(4)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}] got 15" for rank in range(4)]
    wait_for_ends(pids)


def test_ranks_end_with_the_command(hosts: Hosts) -> None:
    process = hosts.start(WAIT)
    pids = hosts.pids(4)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    wait_for_ends(pids)


def node_of(pid: int) -> int:
    """Parent of a rank: the process on its host."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"PPid:\s+(\d+)", status)[0])


def test_a_host_that_is_lost_is_named(hosts: Hosts) -> None:
    process = hosts.start(WAIT, "--grace-s", "1")
    pids = hosts.pids(4)
    os.kill(node_of(int((hosts.folder / "pid2").read_text())), signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 255
    assert re.search(r"host two: .*agent ended with status 137; its ranks \[2, 3\] are lost", err)
    wait_for_ends(pids)


@pytest.mark.parametrize(
    ("names", "options", "expected"),
    [
        ("one,away", (), "host away: .*agent ended with status 255: no route to away; nothing is"),
        ("one,two", ("--agent", "/no/such"), "host one: cannot run '/no/such': No such file"),
        # Both hosts lack it, and either may say so first.
        ("one,two", ("--python", "/no/python"), "host (one|two): .* status 127: .*/no/python"),
    ],
)
def test_what_does_not_start_is_named(
    hosts: Hosts, names: str, options: tuple[str, ...], expected: str
) -> None:
    status, _, err = hosts.run(WAIT, *options, hosts=names)
    assert status == 1 and re.search(expected, err), err
    assert not list(hosts.folder.glob("pid*"))


def test_a_folder_that_a_host_lacks_is_named(hosts: Hosts) -> None:
    agent = AGENT.replace("AGENT_HOST", '[ "$host" = one ] || rmdir gone\nAGENT_HOST')
    hosts.agent.write_text(agent)
    (hosts.folder / "gone").mkdir()
    base = {**os.environ, "PYTHONPATH": python_path()}
    words = ["-n", "2", "--hosts", "one,two", "--agent", f"env -C {hosts.folder} {hosts.agent}"]
    done = subprocess.run(
        [sys.executable, "-m", "smp_cli", "run", *words, "script.py"],
        env=base, cwd=hosts.folder / "gone",
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 255
    assert re.search(r"host two: cannot enter .*gone, where the command was started", done.stderr)


RESTARTS = """
import os, sys
n = int(os.environ["SMP_RESTART_COUNT"])
print("start", n, flush=True)
sys.exit([3, 75, 0][n] if os.environ["SMP_RANK"] == "1" else 0)
"""


def test_all_are_started_again(hosts: Hosts) -> None:
    status, out, err = hosts.run(RESTARTS, "--max-restarts", "1", ranks=2)
    assert status == 0, err
    assert sorted(out.splitlines()) == [f"[{r}] start {n}" for r in (0, 1) for n in (0, 1, 2)]
    assert "rank 1 exited with status 3" in err and "want to be resumed" in err


def test_the_rank_that_others_name_is_the_culprit(hosts: Hosts) -> None:
    source = """
import json, os, sys, time
rank = int(os.environ["SMP_RANK"])
if rank == 3:
    time.sleep(2)
    os._exit(9)
open(os.environ["SMP_FAILURE_FILE"], "w").write(json.dumps({"culprit": 3, "error": "PeerFailure"}))
sys.exit(1)
"""
    status, _, err = hosts.run(source)
    assert status == 9 and "rank 3 exited with status 9" in err, err


# ---- plans ---------------------------------------------------------------------------


def test_ranks_are_divided_over_hosts() -> None:
    plans = plan_hosts("a,b", 4)
    assert [(p.name, list(p.ranks)) for p in plans] == [("a", [0, 1]), ("b", [2, 3])]
    plans = plan_hosts("me@a:3,b:1", 4)
    assert [(p.address, list(p.ranks)) for p in plans] == [("a", [0, 1, 2]), ("b", [3])]


@pytest.mark.parametrize(
    ("text", "num_ranks", "expected"),
    [
        ("a,b", 3, "cannot be divided over 2 hosts"),
        ("a:1,b:1", 3, "has 2 processes, and -n and --spares say 3"),
        ("a:1,b", 2, "give each host a number"),
        ("a,a", 2, "expected different names"),
        ("a,", 2, "expected different names"),
    ],
)
def test_plans_that_do_not_fit_are_refused(text: str, num_ranks: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        plan_hosts(text, num_ranks)


def test_fewer_ranks_are_divided_over_the_hosts_that_are_left() -> None:
    plans = plan_hosts("a:2,b:1,c:3", 6)
    number, fewer = divide_again(plans, {"a", "c"}, [6, 4, 2], leaves_waiting=False)
    assert number == 4
    assert [(p.name, list(p.ranks)) for p in fewer] == [("a", [0, 1]), ("c", [2, 3])]
    number, fewer = divide_again(plans, {"a", "c"}, [6, 4, 2], leaves_waiting=True)
    assert number == 4
    assert [(p.name, list(p.ranks)) for p in fewer] == [("a", [0, 1]), ("c", [2, 3, 4])]
    number, fewer = divide_again(plans, {"a", "b", "c"}, [6, 4, 2], leaves_waiting=True)
    assert number == 6 and fewer == plans
    number, fewer = divide_again(plans, {"c"}, [6, 2], leaves_waiting=False)
    assert number == 2 and [p.name for p in fewer] == ["c"]
    with pytest.raises(ValueError, match="1 places are left .* at least 2 ranks"):
        divide_again(plans, {"b"}, [6, 4, 2], leaves_waiting=True)


LOSE_HOST = """
import os, pathlib, time
print(*(os.environ.get(n) for n in ("SMP_WORLD_SIZE", "SM_HOSTS", "SM_HP_MP_PARAMETERS")))
if os.environ["SMP_RESTART_COUNT"] == "0":
    pathlib.Path("lost.two").touch()
    raise SystemExit(3)
"""


def test_a_job_that_has_lost_a_host_starts_again_with_fewer_ranks(hosts: Hosts) -> None:
    fewer = ["--fewer-ranks", "1", "--fewer-ranks", "2:microbatches=7"]
    status, out, err = hosts.run(
        LOSE_HOST, "--max-restarts=1", *fewer, "--config=microbatches=5", hosts="one:3,two:1"
    )
    assert status == 0, err
    assert "host two: " in err and "no route to two" in err
    assert "2 ranks are started on the hosts one" in err
    first, again = out.splitlines()[:4], out.splitlines()[4:]
    assert all(' 4 ["one", "two"]' in line and '"microbatches": 5' in line for line in first)
    assert [line.split(" {")[0] for line in sorted(again)] == [f'[{r}] 2 ["one"]' for r in (0, 1)]
    assert all('"microbatches": 7' in line for line in again)


def test_a_host_that_answers_too_late_takes_no_rank_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 was on it before, and is on another host now."""
    monkeypatch.setattr(remote, "_HELLO_AGAIN_S", 4.0)
    monkeypatch.setenv("PYTHONPATH", python_path())
    (tmp_path / "agent").write_text('#!/bin/sh\n[ "$1" = late ] && sleep 5\nshift\nsh -c "$*"\n')
    (tmp_path / "agent").chmod(0o755)
    share = Share([sys.executable, "-c", "import time; time.sleep(8)"], {}, 2, 2)
    plans, agent = plan_hosts("late,near", 2), Agent([str(tmp_path / "agent")])
    divide = _divider(share, plans, {1: {}})
    ranks = RemoteRanks(share, plans, agent, lambda *_: None, tmp_path, divide=divide)
    try:
        ranks.start(1)
        wait_until(lambda: ranks.wait(0.2) or not ranks.running, lambda: str(ranks.running))
    finally:
        ranks.end()
    assert ranks.ended == [(0, 0)]
    said = capfd.readouterr().err
    assert "host late: no answer within 4 s" in said
    assert "1 ranks are started on the hosts near" in said


CROWDED = """
import os, pathlib, signal, sys, time
number, notes = os.environ["SMP_RANK"], pathlib.Path(os.environ["SMP_FAILURE_FILE"]).parent
def note(name, text):
    with (notes / name).open("a") as file:
        file.write(text + "\\n")
def wait_for(path):
    while not path.exists():
        time.sleep(0.02)
def stop(*_):
    pathlib.Path("stopped").touch()
    sys.exit(75)
if os.environ["SMP_RESTART_COUNT"] == "1":
    print("again of", os.environ["SMP_WORLD_SIZE"])
    sys.exit(0)
if number == "0":
    note("given_up", "")  # others may go on
    wait_for(pathlib.Path("lost.two"))
    note("given_up", "1")
    wait_for(notes / "taken")
    wait_for(pathlib.Path("told"))
    signal.signal(signal.SIGTERM, stop)
    note("stoppable", "0")
elif number == "1":
    wait_for(pathlib.Path("ready"))
    pathlib.Path("lost.two").touch()
    os.kill(os.getppid(), signal.SIGKILL)
else:
    note("taken", number)
    wait_for(pathlib.Path("stopped"))
    sys.exit(75)
time.sleep(9999)
"""


def test_ranks_that_are_too_many_for_a_host_are_asked_to_stop_once_they_can(
    hosts: Hosts, tmp_path: Path
) -> None:
    options = ["--max-restarts=1", "--max-replacements=1", "--fewer-ranks=1"]
    process = hosts.start(CROWDED, *options, ranks=2)
    (tmp_path / "ready").touch()
    assert process.stderr
    lines = list[str]()
    for line in process.stderr:
        lines.append(line)
        if "which they have not yet" in line:
            (tmp_path / "told").touch()
    said, out = "".join(lines), process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0 and "[0] again of 1" in out, said
    assert "process 2 is started in place of 1" in said
    assert said.count("which they have not yet") == 1 == said.count("the ranks are asked to save")
    assert said.index("which they have not yet") < said.index("the ranks are asked to save")


def test_a_job_ends_if_too_few_hosts_are_left(hosts: Hosts) -> None:
    options = ["--max-restarts=1", "--fewer-ranks=3"]
    status, out, err = hosts.run(LOSE_HOST, *options)
    assert status == 1 and "2 places are left" in err and len(out.splitlines()) == 4, err


@pytest.mark.parametrize("options", [["2"], ["0"], ["x:ddp=true"], ["1", "--fewer-ranks=1"]])
def test_numbers_of_fewer_ranks_that_make_no_sense_are_refused(
    hosts: Hosts, options: list[str]
) -> None:
    words = ["--max-restarts=1", "--fewer-ranks", *options]
    status, _, err = hosts.run(WAIT, *words, ranks=2)
    assert status == 2 and "expected a number of ranks below that of -n, 2" in err


def test_fewer_ranks_want_restarts(hosts: Hosts) -> None:
    status, _, err = hosts.run(WAIT, "--fewer-ranks=1", ranks=2)
    assert status == 2 and "goes with --hosts --max-restarts" in err


def test_preflight_wants_hosts(hosts: Hosts) -> None:
    status, _, err = hosts.run(WAIT, "--preflight", hosts="one", ranks=1)
    assert status == 2 and "name at least two with --hosts" in err
