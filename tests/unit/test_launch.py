"""Rank, size and meeting point from the variables of each launcher."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smp.world import launch
from smp.world.launch import Launch, Rendezvous, TorchGroup

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-8982@1",
    "PMIX_SERVER_TMPDIR": "/tmp/ompi.8982",
    "PMIX_SERVER_URI4": "prterun-host-8982@0.0;tcp4://127.0.0.1:42155",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1874919425",
    "OMPI_MCA_ess_base_jobid": "1874919425",
    "OMPI_MCA_orte_hnp_uri": "1874919424.0;tcp://10.0.0.2:40217",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "node[03-04]",
}


def rendezvous(env: dict[str, str]) -> Rendezvous:
    return launch.plan_rendezvous(launch.read_launch(env, "here"), env, "/scratch", 1000)


# ---- ranks -------------------------------------------------------------------------


def test_torchrun_variables_are_read() -> None:
    assert launch.read_launch(TORCHRUN, "here") == Launch("torchrun", 3, 4, 1, 2, "here")


@pytest.mark.parametrize("env", [OPEN_MPI_5, OPEN_MPI_4])
def test_open_mpi_variables_are_read(env: dict[str, str]) -> None:
    rank = int(env["OMPI_COMM_WORLD_RANK"])
    assert launch.read_launch(env, "here") == Launch("mpi", rank, 2, rank, 2, "here")


def test_slurm_variables_are_read() -> None:
    assert launch.read_launch(SLURM, "here") == Launch("slurm", 5, 8, 1, 4, "here")


def test_slurm_step_is_smaller_than_its_job() -> None:
    step = launch.read_launch({**SLURM, "SLURM_STEP_NUM_TASKS": "6"}, "here")
    assert step.world_size == 6


def test_slurm_tasks_per_node_are_expanded() -> None:
    env = {k: v for k, v in SLURM.items() if k != "SLURM_NTASKS_PER_NODE"}
    env |= {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}
    assert launch.read_launch(env, "here").local_size == 2
    assert launch.read_launch({**env, "SLURM_NODEID": "1"}, "here").local_size == 3


def test_ranks_of_smp_run_are_read_whatever_surrounds_them() -> None:
    env = {"SMP_RANK": "1", "SMP_WORLD_SIZE": "3", "SMP_RENDEZVOUS": "file:///a"}
    expected = Launch("smp", 1, 3, 1, 3, "here")
    assert launch.read_launch(env, "here") == expected
    outside = {**TORCHRUN, **OPEN_MPI_5, **SLURM}
    assert launch.read_launch({**outside, **env}, "here") == expected
    again = {**env, "SMP_RESTART_COUNT": "1"}
    assert rendezvous(env).identity != rendezvous(again).identity


def test_no_launcher_is_a_single_process() -> None:
    assert launch.read_launch({}, "here") == Launch("single", 0, 1, 0, 1, "here", ("here",))
    assert rendezvous({}).kind == "hash"


def test_torchrun_inside_another_launcher_counts_as_torchrun() -> None:
    assert launch.read_launch({**SLURM, **OPEN_MPI_5, **TORCHRUN}, "here").launcher == "torchrun"
    assert launch.read_launch({**SLURM, **OPEN_MPI_5}, "here").launcher == "mpi"


def test_host_name_can_be_replaced() -> None:
    assert launch.read_launch({**TORCHRUN, "SMP_HOSTNAME": "b"}, "here").hostname == "b"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
        ({"RANK": "x"}, "RANK='x' is not an integer"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"RANK": "-1"}, "rank -1 of 4"),
    ],
)
def test_broken_variables_are_refused_by_name(
    change: dict[str, str | None], complaint: str
) -> None:
    env = {k: v for k, v in {**TORCHRUN, **change}.items() if v is not None}
    with pytest.raises(ValueError, match=complaint):
        launch.read_launch(env, "here")


def test_local_ranks_are_counted_from_simulated_hosts() -> None:
    hosts = ["a", "b", "a", "b", "b"]
    seen = []
    for rank, host in enumerate(hosts):
        own = launch.with_hosts(Launch("torchrun", rank, 5, rank, 5, host), hosts)
        seen.append((own.local_rank, own.local_size))
        assert not own.is_one_host
    assert seen == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert launch.with_hosts(Launch("torchrun", 1, 2, 0, 0, "a"), ["a", "a"]).is_one_host


# ---- meeting points ----------------------------------------------------------------


def test_torchrun_reuses_the_store_of_its_agent() -> None:
    plan = rendezvous(TORCHRUN)
    expected = Rendezvous("tcp", host="node0", port=29500, has_server=True, attempt="2")
    assert plan == expected


def test_restarted_ranks_meet_under_another_identity() -> None:
    again = {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "3"}
    assert rendezvous(TORCHRUN).identity != rendezvous(again).identity


def test_given_file_wins_over_all_else() -> None:
    plan = rendezvous({**TORCHRUN, "SMP_RENDEZVOUS": "file:///tmp/x"})
    assert (plan.kind, plan.path, plan.private_folder) == ("file", "/tmp/x", False)
    with pytest.raises(ValueError, match="SMP_RENDEZVOUS"):
        rendezvous({**TORCHRUN, "SMP_RENDEZVOUS": "/tmp/x"})


def test_mpirun_on_one_host_meets_in_a_private_file_of_the_job() -> None:
    plan = rendezvous(OPEN_MPI_5)
    assert (plan.kind, plan.private_folder) == ("file", True)
    assert plan.path.startswith("/scratch/smp-1000/")
    assert rendezvous({**OPEN_MPI_5, "OMPI_COMM_WORLD_RANK": "0"}) == plan
    other_job = {**OPEN_MPI_5, "PMIX_NAMESPACE": "prterun-host-9000@1"}
    assert rendezvous(other_job).path != plan.path
    same_process_id = {**OPEN_MPI_5, "PMIX_SERVER_URI4": "prterun-host-8982@0.0;tcp4://:1"}
    assert rendezvous(same_process_id).path != plan.path
    assert rendezvous(OPEN_MPI_4).kind == "file"


def test_mpirun_over_hosts_without_an_address_is_refused() -> None:
    env = {**OPEN_MPI_5, "OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(ValueError, match="mpirun -x MASTER_ADDR"):
        rendezvous(env)
    plan = rendezvous({**env, "MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    assert (plan.kind, plan.host, plan.port, plan.has_server) == ("tcp", "node0", 1234, False)


def test_sagemaker_hosts_meet_on_the_first_of_them() -> None:
    sagemaker = {
        **OPEN_MPI_5,
        "OMPI_COMM_WORLD_SIZE": "4",
        "SM_HOSTS": '["algo-2", "algo-1"]',
        "SAGEMAKER_JOB_NAME": "job",
    }
    plan = rendezvous(sagemaker)
    assert (plan.kind, plan.host) == ("tcp", "algo-1")
    assert 20000 <= plan.port < 40000
    assert rendezvous({**sagemaker, "SAGEMAKER_JOB_NAME": "other"}).port != plan.port
    assert rendezvous({**sagemaker, "MASTER_PORT": "77"}).port == 77
    assert rendezvous({**sagemaker, "MASTER_ADDR": "a", "MASTER_PORT": "77"}).host == "a"
    with pytest.raises(ValueError, match="SM_HOSTS"):
        rendezvous({**sagemaker, "SM_HOSTS": "algo-1"})
    assert rendezvous({**sagemaker, "OMPI_COMM_WORLD_SIZE": "2"}).kind == "file", "one host"


def test_requeued_slurm_job_meets_anew() -> None:
    again = {**SLURM, "SLURM_RESTART_COUNT": "1"}
    assert rendezvous(again).identity != rendezvous(SLURM).identity


def test_mpirun_without_a_job_id_is_refused() -> None:
    env = {k: v for k, v in OPEN_MPI_5.items() if not k.startswith("PMIX")}
    with pytest.raises(ValueError, match="PMIX_NAMESPACE"):
        rendezvous(env)


def test_slurm_meets_on_the_first_node_at_a_port_of_the_step() -> None:
    plan = rendezvous(SLURM)
    assert (plan.kind, plan.host) == ("tcp", "node03")
    assert 20000 <= plan.port < 40000
    assert rendezvous({**SLURM, "SLURM_PROCID": "0"}) == plan
    assert rendezvous({**SLURM, "SLURM_STEP_ID": "1"}).port != plan.port
    given = rendezvous({**SLURM, "MASTER_ADDR": "node9", "MASTER_PORT": "77"})
    assert (given.host, given.port) == ("node9", 77)


def test_ranks_without_any_address_are_refused() -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT"):
        rendezvous({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        rendezvous({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[01-04,07],gpu3", "node01"),
        ("rack[3,5]-n", "rack3-n"),
        ("a-b[9]", "a-b9"),
        ("queue1-dy-gpu-[2-4],queue1-st-gpu-1", "queue1-dy-gpu-2"),  # of ParallelCluster
    ],
)
def test_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert launch.first_slurm_host(nodes) == first


# ---- a group of torch ----------------------------------------------------------------

MET = Rendezvous("tcp", host="node7", port=4711, has_server=True)
GROUP = TorchGroup(1, 2, MET, "TCPStore")
ALONE = TorchGroup(1, 2, None, "HashStore")


def of_group(env: dict[str, str], group: TorchGroup) -> tuple[Launch, Rendezvous]:
    found = launch.read_launch(env, "here", group)
    return found, launch.plan_rendezvous(found, env, "/scratch", 1000, group)


def test_processes_that_have_a_group_of_torch_are_its_ranks_and_meet_there() -> None:
    assert of_group({}, GROUP) == (Launch("torch", 1, 2, 0, 0, "here"), MET)
    address = {"MASTER_ADDR": "node0", "MASTER_PORT": "1"}
    assert of_group(address, GROUP)[1] == MET, "where the group has met for certain"
    file = {"SMP_RENDEZVOUS": "file:///tmp/x"}
    assert of_group(file, GROUP)[1] == Rendezvous("file", path="/tmp/x")


def test_variables_of_a_launcher_count_more_than_a_group_of_torch() -> None:
    found, plan = of_group(TORCHRUN, GROUP)
    assert (found.launcher, found.global_rank, plan.host) == ("torchrun", 3, "node0")


def test_ranks_without_an_address_meet_where_their_group_of_torch_has() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2"}
    assert of_group(env, GROUP)[1] == MET
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT is not set"):
        of_group({"RANK": "0", "WORLD_SIZE": "2"}, GROUP)  # another rank: another group


def test_a_group_of_torch_of_one_is_a_single_process() -> None:
    found, plan = of_group({}, TorchGroup(0, 1, MET, "TCPStore"))
    assert (found.launcher, found.world_size, plan.kind) == ("single", 1, "hash")


def test_a_group_of_torch_that_has_met_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 1 of 2 with a HashStore, .* set MASTER_ADDR"):
        of_group({}, ALONE)


@pytest.mark.parametrize("env", [TORCHRUN, SLURM, OPEN_MPI_5])
def test_the_last_processes_of_other_launchers_wait(env: dict[str, str]) -> None:
    plain = launch.read_launch(env, "here")
    found = launch.read_launch({**env, "SMP_SPARES": "1"}, "here")
    size = plain.world_size - 1
    assert (found.world_size, found.first_size, found.spares) == (size, size, 1)
    assert found.global_rank == plain.global_rank
    assert found.is_spare == (plain.global_rank == size)
    too_many = {**env, "SMP_SPARES": str(plain.world_size)}
    with pytest.raises(ValueError, match="are to wait; start more, at least one rank"):
        launch.read_launch(too_many, "here")


def test_ranks_meet_in_a_store_of_its_own() -> None:
    env = {**TORCHRUN, "SMP_RENDEZVOUS": "tcp://node9:29400/job7"}
    plan = rendezvous(env)
    assert (plan.kind, plan.host, plan.port, plan.has_server) == ("tcp", "node9", 29400, True)
    others = [
        rendezvous({**env, "SMP_RENDEZVOUS": "tcp://node9:29400/job8"}),
        rendezvous({**env, "TORCHELASTIC_RESTART_COUNT": "9"}),
    ]
    assert all(other.attempt != plan.attempt for other in others), "keys of their own"


@pytest.mark.parametrize(
    "text",
    [
        "tcp://node9",
        "tcp://node9:5/",
        "tcp://:5",
        "tcp://node9:x",
        "http://a:1",
        "file://a/b",
        "tcp://a:99999",
    ],
)
def test_other_places_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not understood; expected file:///absolute/path, or"):
        rendezvous({**TORCHRUN, "SMP_RENDEZVOUS": text})


def test_numbers_behind_the_ranks_are_those_of_processes_that_wait() -> None:
    env = {"SMP_WORLD_SIZE": "4", "SMP_SPARES": "2"}
    for number in range(6):
        place = launch.read_launch({**env, "SMP_RANK": str(number)}, "node")
        assert place.is_spare == (number >= 4) and place.spares == 2
    late = launch.read_launch({"SMP_WORLD_SIZE": "4", "SMP_SPARES": "0", "SMP_RANK": "9"}, "node")
    assert late.is_spare and (late.spares, late.first_size) == (0, 4)
    place = replace(late, global_rank=1, world_size=2)
    assert not place.is_spare and place.first_size == 4
    with pytest.raises(ValueError, match="gives rank 4 of 4 processes"):
        launch.read_launch({"SMP_WORLD_SIZE": "4", "SMP_RANK": "4"}, "node")
