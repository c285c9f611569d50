"""Several hosts train like one process, by any launcher, and cross the network only when they must.

The hosts are namespaces of this machine (`network.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.dist import split_training, test_resume, training
from tests.dist.pool import Pool
from tests.dist.processes import REPO, mpirun
from tests.dist.resume_training import Job
from tests.hosts.network import Network, why_not
from tests.hosts.ranks import TRANSPORTS, HostRanks, Launched, write_agent
from tests.hosts.traffic import Measured, send_objects, train_pipelines

pytestmark = [
    pytest.mark.waits,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

TENSOR_BYTES = 16 << 20
# Headers of packets, acknowledgements, and what ranks tell each other beside the tensors.
MOST_OVERHEAD = 0.05
# Bytes of barriers and other short messages, where no tensor has to cross.
TALK_BYTES = 400_000


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("hosts,per_host", [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("layout", ["pp", "dp", "tp", "pp2"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_hosts_train_like_one_process(
    pool: Pool, hosts: int, per_host: int, layout: str, transport: str
) -> None:
    size = hosts * per_host
    with Network(hosts) as network:
        ranks = HostRanks(network, pool, per_host, transport)
        if layout == "tp":
            split_training.check_runs(ranks, [split_training.SplitRun("gpt2", 1, size, 1)])
        else:
            pp = {"pp": size, "dp": 1, "pp2": 2}[layout]
            training.check_runs(ranks, [training.Run("reuse", pp, size // pp)])
        sent = [network.traffic(index).sent for index in range(hosts)]
        assert min(sent) > 10_000, f"hosts have sent {sent} bytes: nothing was distributed"


# ---- launchers ---------------------------------------------------------------

RUN = training.Run("reuse", 2, 2)


Commands = Sequence[Sequence[str]]
"""What is started on each host, the first ones, in front of script and arguments."""


def torchrun_with_a_rendezvous(network: Network, folder: Path) -> Commands:
    words = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=host0:29400", "--rdzv-id=job"),
    ]
    return [words, words]


def torchrun_with_an_address(network: Network, folder: Path) -> Commands:
    return [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"),
            *(f"--node-rank={index}", "--master-addr=host0", "--master-port=29400"),
        ]
        for index in range(2)
    ]


def _mpirun(network: Network, folder: Path, *variables: str) -> Commands:
    """Returns one mpirun, which starts its daemon on the other host by a substitute for ssh."""
    command = mpirun(4)
    if command is None:
        pytest.skip("no mpirun on this machine")
    words = [
        *command[:-1],
        *("--prtemca", "plm_ssh_agent", str(write_agent(network, folder))),
        *("--host", "host0:2,host1:2"),
        *(word for name in ("PYTHONPATH", "OMP_NUM_THREADS", *variables) for word in ("-x", name)),
    ]
    return [[*words, command[-1]]]


def mpirun_with_an_agent(network: Network, folder: Path) -> Commands:
    return _mpirun(network, folder, "MASTER_ADDR=host0", "MASTER_PORT=29400")


def mpirun_of_sagemaker(network: Network, folder: Path) -> Commands:
    """A job of the service with MPI: its ranks know nothing but the names of the hosts."""
    return _mpirun(network, folder, 'SM_HOSTS=["host0","host1"]', "SAGEMAKER_JOB_NAME=train-1")


def smp_run_with_an_agent(network: Network, folder: Path) -> Commands:
    words = [sys.executable, "-m", "smp_cli", "run", "-n", "4", "--hosts", "host0,host1"]
    return [[*words, "--agent", str(write_agent(network, folder))]]


def entry_of_sagemaker(network: Network, folder: Path) -> Commands:
    """A job of the service without a distribution, by the variables that it sets."""
    entry = str(REPO / "examples" / "sagemaker" / "entry.py")
    return [
        [
            *("env", 'SM_HOSTS=["host1", "host0"]', f"SM_CURRENT_HOST={network.name(index)}"),
            *("SM_NUM_GPUS=0", sys.executable, entry, "--ranks-per-host", "2"),
        ]
        for index in range(2)
    ]


LAUNCHERS = (
    torchrun_with_a_rendezvous,
    torchrun_with_an_address,
    mpirun_with_an_agent,
    smp_run_with_an_agent,
    entry_of_sagemaker,
    mpirun_of_sagemaker,
)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers_start_two_hosts(
    tmp_path: Path, launcher: Callable[[Network, Path], Commands]
) -> None:
    with Network(2) as network:
        training.check_runs(Launched(network, launcher(network, tmp_path)), [RUN])


# ---- bytes -------------------------------------------------------------------


def of_hosts(measured: list[Measured]) -> list[Measured]:
    """Returns what the first ranks of two hosts with two ranks each have read."""
    return [measured[0], measured[2]]


def check_bytes(bytes_seen: int, expected: int, what: str) -> None:
    print(f"{what}: {bytes_seen} bytes, expected {expected}")
    assert expected <= bytes_seen <= expected * (1 + MOST_OVERHEAD) + TALK_BYTES, (
        f"{what}: {bytes_seen} bytes instead of {expected}"
    )


def test_messages_cross_the_network_only_between_hosts(pool: Pool) -> None:
    with Network(2) as network:
        results = HostRanks(network, pool, 2).run(
            4, send_objects, [(0, 1), (0, 2), (3, 1)], TENSOR_BYTES
        )
    for index, expected in enumerate([(0, 0), (TENSOR_BYTES, 0), (0, TENSOR_BYTES)]):
        hosts = of_hosts([result[index] for result in results])
        for host in (0, 1):
            check_bytes(hosts[host].across.sent, expected[host], f"{index}: sent by host{host}")
            check_bytes(hosts[host].inside.sent, 0, f"{index}: inside host{host}")
            check_bytes(
                hosts[host].across.received, expected[1 - host], f"{index}: received by host{host}"
            )


WIDTH = 1024
STAGE_BYTES = WIDTH * WIDTH * 4


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("placement", ["DPT", "PDT"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_steps_cross_the_network_only_between_hosts(
    pool: Pool, placement: str, transport: str
) -> None:
    """Replicas on two hosts send gradients, stages on two hosts activations and their gradients.

    With 512 rows an activation has half the bytes of a stage.
    """
    rows = WIDTH // 2
    with Network(2) as network:
        ranks = HostRanks(network, pool, 2, transport)
        hosts = of_hosts(ranks.run(4, train_pipelines, placement, WIDTH, rows))
    for index, host in enumerate(hosts):
        if placement == "DPT":  # two stages, whose gradients each of two replicas sends half twice
            expected = 2 * STAGE_BYTES
        else:  # two microbatches, each an activation there, one back, and gradients alike
            expected = 2 * 2 * rows * WIDTH * 4
        check_bytes(host.across.sent, expected, f"{placement}: sent by host{index}")
        check_bytes(host.inside.sent, 0, f"{placement}: inside host{index}")


# ---- checkpoints -------------------------------------------------------------


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize(
    ("source", "target"),
    [(Job(2, 1, 2), Job(1, 2, 2, "sdp2")), (Job(1, 1, 4, "sdp4"), Job(4, 1, 1))],
    ids=str,
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_checkpoints_in_a_shared_folder_load_on_another_layout(
    pool: Pool, tmp_path: Path, source: Job, target: Job, transport: str
) -> None:
    with Network(2) as network:
        ranks = HostRanks(network, pool, 2, transport)
        [(_, _, before, after)] = test_resume.run_all(ranks, tmp_path, {source: [target]})
    where = f"{source} to {target}"
    test_resume.check_layout(where, target, after)
    test_resume.check_loaded(where, before[0].at, after[0].at)
    test_resume.check_end(where, source, target, before[0], after[0])
