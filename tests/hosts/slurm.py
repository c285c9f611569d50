"""Slurm on the hosts of a network: slurmctld on the first, slurmd on each, and munge.

Debian's packages slurmctld, slurmd, slurm-client and munge. Everything that they keep lies in one
folder, and nothing of it is left when the block is over.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.dist.processes import REPO
from tests.dist.zygote import die_with_parent
from tests.hosts.network import Network
from tests.installed import python_path
from tests.patience import PATIENCE_S

_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "munged": "munge",
    "srun": "slurm-client",
    "sbatch": "slurm-client",
    "scontrol": "slurm-client",
}
_READY_S = 120.0
_END_S = 20.0
# Names of hosts are those of their namespaces. A job that is queued again may start after 5 s, not
# 120, as its credentials expire so soon. The partition `urgent` takes the nodes of `spare` away.
_CONF = """
ClusterName=smp
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName={nodes} CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=spare Nodes={nodes} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes={nodes} PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Returns why this machine cannot run Slurm, or None if it can."""
    for program, package in _PROGRAMS.items():
        if _find(program) is None:
            return f"no program {program} (Debian package {package})"
    if os.geteuid() != 0:
        return "slurmd starts tasks as root"
    return None


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Slurm:
    """A cluster whose nodes are the hosts of a network; it lasts as long as the block."""

    def __init__(self, network: Network, folder: Path, cpus: int = 2) -> None:
        """
        Args:
            network: the network of the nodes.
            folder: folder that all nodes see, for all files of Slurm.
            cpus: number of processors in each node's configuration.
        """
        self.network, self.folder, self._cpus = network, folder, cpus
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> None:
        folder = self.folder
        folder.mkdir(mode=0o755)
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = ",".join(self.network.name(index) for index in range(self.network.num_hosts))
        conf = folder / "slurm.conf"
        conf.write_text(
            _CONF.format(first=self.network.name(0), nodes=names, folder=folder, cpus=self._cpus)
        )
        files = (f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed"))
        self._daemon(
            0, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files
        )
        self.until(lambda: (folder / "munge.socket").exists(), "munged does not listen")
        self._daemon(0, "slurmctld", "-D", "-f", str(conf))
        for index in range(self.network.num_hosts):
            (folder / f"spool.{self.network.name(index)}").mkdir()
            self._daemon(index, "slurmd", "-D", "-f", str(conf))
        self.until(self._is_idle, "the nodes do not become idle")

    def _daemon(self, index: int, program: str, *words: str) -> None:
        path = _find(program)
        assert path is not None
        with open(self.folder / f"{program}.{index}.out", "wb") as file:
            self._daemons.append(
                subprocess.Popen(
                    self.network.command(index, [path, *words]),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=self._environment({}),
                    preexec_fn=die_with_parent,
                )
            )

    def _is_idle(self) -> bool:
        done = self.call("sinfo", "--noheader", "--format=%T", "--partition=spare")
        return done.returncode == 0 and set(done.stdout.split()) == {"idle"}

    def until(self, condition: Callable[[], bool], complaint: str) -> None:
        """Returns when something is so, while all daemons live."""
        deadline = time.monotonic() + _READY_S
        while not condition():
            ended = [one.args for one in self._daemons if one.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{complaint}; ended: {ended}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """Returns the last output of the daemons and of the jobs."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"{file.name}:\n{file.read_text()[-2000:]}" for file in files)

    def _stop(self) -> None:
        # Processes of steps end first, then the daemons to which they report.
        deadline = time.monotonic() + _END_S
        while jobs := self.call("squeue", "--noheader", "--format=%A").stdout.split():
            self.call("scancel", "--signal=KILL", "--full", *jobs)
            self.call("scancel", *jobs)
            if time.monotonic() > deadline:
                break
            time.sleep(0.5)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons = []
        self._kill_rest()

    def _kill_rest(self) -> None:
        """Kills processes that would try for minutes to report to daemons that have ended."""
        keepers = {self.network.pid(index) for index in range(self.network.num_hosts)}
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in keepers}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(entry / "ns" / "net") in spaces and int(entry.name) not in keepers:
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:
                pass  # it has ended

    # ---- jobs ------------------------------------------------------------------

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        env = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "SMP_"))}
        path = python_path(REPO, env.get("PYTHONPATH", ""))
        env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}:/usr/sbin"
        return {**env, "SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def call(
        self, *words: str, timeout_s: float = PATIENCE_S, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first node, as its user would: ``srun``, ``sbatch`` and so on."""
        # Whoever enters a namespace of mounts is in its root folder.
        return subprocess.run(
            self.network.command(0, ["env", "-C", str(cwd or self.folder), *words]),
            env=self._environment(env),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def submit(self, *words: str, cwd: Path, **env: str) -> str:
        """Queues a batch job; returns its number."""
        done = self.call("sbatch", "--parsable", *words, cwd=cwd, **env)
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Returns the state of a job by Slurm's name."""
        said = self.call("scontrol", "show", "job", job).stdout
        return said.partition("JobState=")[2].partition(" ")[0]

    def wait(self, job: str, states: Sequence[str], limit_s: float = 240.0) -> str:
        """Waits until a job has one of these states, and returns the state."""
        deadline = time.monotonic() + limit_s
        while (state := self.state(job)) not in states:
            if time.monotonic() > deadline:
                raise AssertionError(f"job {job} is {state}, not {states}\n{self.logs()}")
            time.sleep(0.2)
        return state
