"""The command ``smp run``, with ranks that do not load torch."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from smp_cli import environment as environments
from smp_cli import sagemaker
from smp_cli.environment import Share
from smp_cli.main import COMMANDS, build_parser
from smp_cli.supervisor import EXIT_RESUME

import smp
from smp.world import nccl
from tests.installed import python_path
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.waits


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    """The command line that runs a program of the test."""

    def make(source: str, *options: str) -> list[str]:
        script = tmp_path / "script.py"
        script.write_text(source)
        return [sys.executable, "-m", "smp_cli", "run", *options, str(script)]

    return make


def environment(**more: str) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SM_", "SMP_", "OMP_"))}
    return {**env, "PYTHONPATH": python_path(), **more}


def execute(
    command: list[str], *script_args: str, cwd: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *script_args],
        env=environment(**env),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


# ---- the command -------------------------------------------------------------------


def test_help_loads_neither_torch_nor_smp() -> None:
    code = (
        "import sys\nfrom smp_cli import main\n"
        "for words in (['--help'], ['run', '--help'], ['doctor', '--help']):\n"
        "    try:\n        main(words)\n"
        "    except SystemExit as end:\n        assert end.code == 0\n"
        "assert not {'torch', 'smp'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for word in ("run", "doctor", "--max-restarts", "--json"):
        assert word in done.stdout


def test_command_alone_is_help_and_has_a_version() -> None:
    help_text = execute([sys.executable, "-m", "smp_cli", "--help"]).stdout
    done = execute([sys.executable, "-m", "smp_cli"])
    assert (done.returncode, done.stdout) == (0, help_text)
    done = execute([sys.executable, "-m", "smp_cli", "--version"])
    assert (done.returncode, done.stdout) == (0, f"smp {smp.__version__}\n")


def test_every_command_takes_its_configuration_in_one_form() -> None:
    with_config = {"run", "verify", "explain", "simulate", "estimate"}
    for command in COMMANDS:
        parser = build_parser(command.name)
        (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        options = subparsers.choices[command.name]._option_string_actions
        assert ("--config" in options) == (command.name in with_config), command.name
        if command.name in with_config:
            option = options["--config"]
            assert (option.metavar, option.nargs) == (sagemaker.CONFIG_FORM, None), command.name


def test_module_of_the_package_is_the_same_command() -> None:
    done = execute([sys.executable, "-m", "smp", "--help"])
    assert done.returncode == 0 and "doctor" in done.stdout, done.stderr


def test_a_further_command_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "extra_cli.py").write_text(
        "def add_parser(subparsers):\n"
        "    parser = subparsers.add_parser('extra', help='more')\n"
        "    parser.add_argument('word')\n"
        "    parser.set_defaults(execute=lambda arguments: print('said', arguments.word) or 7)\n"
    )
    code = (
        "import sys\nfrom smp_cli.main import COMMANDS, Command, main\n"
        "commands = (*COMMANDS, Command('extra', 'more', 'extra_cli'))\n"
        "assert main(['extra', 'hello'], commands) == 7\nassert 'extra_cli' in sys.modules\n"
    )
    path = python_path(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "said hello" in done.stdout


# ---- ranks and their environment ---------------------------------------------------


def test_each_rank_runs_once_with_its_arguments_and_prefix(
    command: Callable[..., list[str]], tmp_path: Path
) -> None:
    source = (
        "import os, sys\n"
        "print(sys.argv[1:], os.environ['SMP_RANK'], os.environ['SMP_WORLD_SIZE'])\n"
        "print('bar\\rdone', end='', file=sys.stderr)\n"
    )
    logs = tmp_path / "logs"
    done = execute(command(source, "-n", "3", "--log-dir", str(logs)), "-n", "x")
    assert done.returncode == 0, done.stderr
    expected = [f"[{rank}] ['-n', 'x'] {rank} 3" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == expected
    errors = [f"[{rank}] {word}" for rank in range(3) for word in ("bar", "done")]
    assert sorted(done.stderr.splitlines()) == sorted(errors)
    lines = (logs / "rank1.log").read_text().splitlines()
    assert sorted(lines) == sorted(["['-n', 'x'] 1 3", "bar", "done"])


def test_raw_output_has_no_prefix(command: Callable[..., list[str]]) -> None:
    done = execute(command("print('plain')", "-n", "1", "--output", "raw"))
    assert done.stdout == "plain\n"


def test_environment_is_ours_and_not_torchruns(tmp_path: Path) -> None:
    share = Share(["a"], {"A": "b"}, num_ranks=2, world_size=4, first_rank=2)
    env = share.environment_of(3, 2, tmp_path)
    assert env["A"] == "b"
    assert (env["SMP_RANK"], env["SMP_WORLD_SIZE"], env["SMP_RESTART_COUNT"]) == ("3", "4", "2")
    assert (env["SMP_LOCAL_RANK"], env["SMP_LOCAL_SIZE"]) == ("1", "2")
    assert env["SMP_FAILURE_FILE"] == str(tmp_path / "failure3.json")
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & env.keys(), "Accelerate reads them"
    env = replace(share, torch_env=True).environment_of(3, 2, tmp_path)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [env[name] for name in names] == ["3", "4", "1", "2"]


def test_ranks_of_one_machine_meet_in_a_file(command: Callable[..., list[str]]) -> None:
    names = ("SMP_RENDEZVOUS", "MASTER_ADDR", "MASTER_PORT")
    source = f"import os\nprint(*(os.environ[name] for name in {names}))\n"
    done = execute(command(source, "-n", "2"), SMP_RENDEZVOUS="file:///elsewhere", MASTER_PORT="5")
    places = {line.split("] ")[1] for line in done.stdout.splitlines()}
    (place,) = places
    assert place.startswith("file:///") and place.endswith("/rendezvous 127.0.0.1 5"), done


def test_threads_are_divided_unless_the_user_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environments, "usable_cores", lambda: 8)

    def threads(size: int, base: dict[str, str]) -> str:
        env = Share(["a"], base, size, 2 * size).environment_of(0, 0, Path())
        return env["OMP_NUM_THREADS"]

    assert [threads(size, {}) for size in (1, 3, 8, 16)] == ["8", "2", "1", "1"]
    assert threads(16, {"OMP_NUM_THREADS": "5"}) == "5"


def test_devices_get_all_hardware_queues_unless_the_user_says_how_many() -> None:
    def queues(base: dict[str, str]) -> str:
        env = Share(["a"], base, 1, 1).environment_of(0, 0, Path())
        return env[nccl.DEVICE_QUEUES]

    assert queues({}) == str(nccl.NUM_QUEUES)
    assert queues({nccl.DEVICE_QUEUES: "1"}) == "1"


def test_variables_of_an_outer_launcher_do_not_reach_the_ranks(
    command: Callable[..., list[str]],
) -> None:
    source = "import os\nassert 'LOCAL_RANK' not in os.environ and 'RANK' not in os.environ\n"
    assert execute(command(source, "-n", "1"), LOCAL_RANK="3", RANK="3").returncode == 0


# ---- SageMaker's variables ---------------------------------------------------------


def test_config_pairs_become_typed_json() -> None:
    text = "partitions=2,ddp=True, optimize=speed,sdp_reduce_bucket_size=5e8,bf16=false"
    assert sagemaker.read_config(text) == {
        "partitions": 2,
        "pipeline_parallel_degree": 2,
        "ddp": True,
        "optimize": "speed",
        "sdp_reduce_bucket_size": 5e8,
        "bf16": False,
    }


def test_config_file_gets_both_names_of_the_degree(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"pipeline_parallel_degree": 4, "ddp": true}')
    config = sagemaker.read_config(str(path))
    assert config == {"pipeline_parallel_degree": 4, "partitions": 4, "ddp": True}
    path.write_text("{}")
    assert sagemaker.read_config(str(path))["partitions"] == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("partitions=2,pipeline_parallel_degree=4", "differs"),
        ("partitions=2,ddp", "cannot read 'ddp'.*write --config FILE|KEY=VALUE"),
        ("partitions=2,,ddp=True", "neither a file nor key=value"),
        ("=2", "neither a file nor key=value"),
        ("nowhere.json", "cannot read"),
    ],
)
def test_wrong_config_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"smp config: .*{complaint}"):
        sagemaker.read_config(text)


def test_config_has_files_and_keys_of_which_later_ones_win(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.yaml"
    first.write_text('{"partitions": 4, "microbatches": 2, "bf16": true}')
    second.write_text("microbatches: 8\n")
    text = f"ddp=False,{first},{second},ddp=True,names=[1,2]"
    assert sagemaker.read_config(text) == {
        **{"ddp": True, "partitions": 4, "pipeline_parallel_degree": 4, "microbatches": 8},
        **{"bf16": True, "names": [1, 2]},
    }


@pytest.mark.parametrize("text", ["[1]", "{"])
def test_wrong_config_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="smp config: .*a.json"):
        sagemaker.read_config(str(tmp_path / "a.json"))


def test_config_reaches_the_ranks_as_on_sagemaker(
    command: Callable[..., list[str]], tmp_path: Path
) -> None:
    source = (
        "import json, os\n"
        "print(json.dumps({k: v for k, v in os.environ.items() if k[:2] in ('SM', 'SA')}))\n"
    )
    words = command(source, "-n", "1", "--output", "raw", "--config", "partitions=2,ddp=True")
    done = execute(words, cwd=tmp_path, SM_CHANNEL_TRAIN="given")
    env = json.loads(done.stdout)
    parameters = json.loads(env["SM_HP_MP_PARAMETERS"])
    assert parameters == {"partitions": 2, "pipeline_parallel_degree": 2, "ddp": True}
    assert json.loads(env["SM_FRAMEWORK_PARAMS"]) == {"sagemaker_mpi_enabled": True}
    assert env["SM_CHANNEL_TRAIN"] == "given", "what is set stays"
    assert Path(env["SM_MODEL_DIR"]).is_dir() and Path(env["SM_OUTPUT_DATA_DIR"]).is_dir()
    needed = "SM_NUM_GPUS SM_CHANNEL_TEST SM_CURRENT_HOST SM_MODULE_DIR SAGEMAKER_JOB_NAME".split()
    assert set(needed) <= env.keys()
    assert json.loads(env["SM_HOSTS"]) == [env["SM_CURRENT_HOST"]]


def test_gpus_are_counted_without_torch(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    counts = [
        sagemaker.count_gpus(env, tmp_path)
        for env in ({}, {"CUDA_VISIBLE_DEVICES": "1,2"}, {"CUDA_VISIBLE_DEVICES": ""})
    ]
    assert counts == [3, 2, 0]
    assert sagemaker.count_gpus({}, tmp_path / "none") == 0


# ---- failures ----------------------------------------------------------------------

FAILS = (
    "import os, sys, time, signal\nrank = os.environ['SMP_RANK']\n"
    "if rank == '1': time.sleep(0.3); {what}\n"
    "time.sleep(9999)\n"
)


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [
        ("sys.exit(7)", 7, "rank 1 exited with status 7"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_failure_of_a_rank_ends_all_and_is_named(
    command: Callable[..., list[str]], what: str, status: int, words: str
) -> None:
    done = execute(command(FAILS.format(what=what), "-n", "3", "--grace-s", "0.5"))
    assert (done.returncode, words in done.stderr) == (status, True), done.stderr
    assert "ending the ranks [0, 2], which still run, with SIGTERM" in done.stderr


def test_culprit_is_whom_the_victims_name(command: Callable[..., list[str]]) -> None:
    source = (
        "import json, os, sys, time\n"
        "rank, path = os.environ['SMP_RANK'], os.environ['SMP_FAILURE_FILE']\n"
        "if rank == '0':\n"
        "    json.dump({'culprit': 1, 'error': 'PeerFailure'}, open(path, 'w')); sys.exit(1)\n"
        "time.sleep(0.5); sys.exit(9)\n"
    )
    done = execute(command(source, "-n", "2"))
    assert done.returncode == 9 and "rank 1 exited with status 9" in done.stderr


@pytest.mark.parametrize("culprit", [1, None])
def test_rank_that_left_with_status_0_is_named(
    command: Callable[..., list[str]], culprit: int | None
) -> None:
    """Names the rank that left, also where all others wait for each other and name no culprit."""
    source = (
        "import json, os, sys, time\n"
        "rank, path = os.environ['SMP_RANK'], os.environ['SMP_FAILURE_FILE']\n"
        "if rank == '1': sys.exit(0)\n"
        "time.sleep(0.5)\n"
        f"json.dump({{'culprit': {culprit}, 'error': 'PeerFailure'}}, open(path, 'w'))\n"
        "sys.exit(1)\n"
    )
    done = execute(command(source, "-n", "2"))
    words = "rank 1 left (status 0) while other ranks needed it; rank 0 exited with status 1"
    assert done.returncode == 1 and words in done.stderr, done.stderr


def test_ranks_that_ignore_sigterm_are_killed(command: Callable[..., list[str]]) -> None:
    source = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['SMP_RANK'] == '1': time.sleep(0.2); sys.exit(2)\ntime.sleep(9999)\n"
    )
    done = execute(command(source, "-n", "2", "--grace-s", "0.3"))
    assert done.returncode == 2 and "with SIGKILL" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on(command: Callable[..., list[str]], number: signal.Signals) -> None:
    source = (
        f"import signal, sys, time\nsignal.signal({int(number)}, lambda *_: sys.exit(5))\n"
        "print('ready')\ntime.sleep(9999)\n"
    )
    process = subprocess.Popen(
        command(source, "-n", "2", "--max-restarts", "0"),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert {process.stdout.readline().split()[1] for _ in range(2)} == {"ready"}
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 5
    process.stdout.close()


def test_ranks_do_not_outlive_a_killed_launcher(
    command: Callable[..., list[str]], tmp_path: Path
) -> None:
    source = "import os, time\nprint(os.getpid())\ntime.sleep(9999)\n"
    process = subprocess.Popen(
        command(source, "-n", "2", "--output", "raw", "--log-dir", str(tmp_path)),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    process.stdout.close()
    wait_until(lambda: not any(map(_is_alive, pids)), lambda: "ranks are still there")


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ---- restarts ----------------------------------------------------------------------

RESTARTS = (
    "import os, sys\nattempt = int(os.environ['SMP_RESTART_COUNT'])\n"
    "print('attempt', attempt)\n"
    "if os.environ['SMP_RANK'] == '1' or {all}: sys.exit({codes}[attempt])\n"
)


@pytest.mark.parametrize(
    ("codes", "max_restarts", "status", "num_attempts"),
    [
        ([4, 4, 0], 2, 0, 3),
        ([4, 4, 0], 1, 4, 2),
        ([4, 0], 0, 4, 1),
        ([EXIT_RESUME, EXIT_RESUME, 4, 0], 1, 0, 4),
        ([EXIT_RESUME, 0], 0, EXIT_RESUME, 1),
    ],
)
def test_all_ranks_are_started_again(
    command: Callable[..., list[str]],
    codes: list[int],
    max_restarts: int,
    status: int,
    num_attempts: int,
) -> None:
    source = RESTARTS.format(all=EXIT_RESUME in codes, codes=codes)
    done = execute(command(source, "-n", "2", "--max-restarts", str(max_restarts)))
    assert done.returncode == status, done.stderr
    expected = [f"[{rank}] attempt {i}" for i in range(num_attempts) for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == sorted(expected)
