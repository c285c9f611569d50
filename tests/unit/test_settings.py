"""Environment settings and the choice of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smp.world import settings


def test_defaults() -> None:
    assert settings.read_settings({}) == settings.Settings(
        1800.0, "auto", False, "gloo", True, 8, host_pool=True
    )


def test_values_are_read() -> None:
    env = {
        "SMP_TIMEOUT_S": "2.5",
        "SMP_DEVICE": "cpu",
        "SMP_SHARE_GPU": "1",
        "SMP_TRANSPORT": "mpi",
        "SMP_SHM": "0",
        "SMP_SHM_RING_MB": "2",
        "SMP_LANE": "nccl",
        "SMP_LANE_SLOT_MB": "64",
        "SMP_HOST_POOL": "0",
        "SMP_DETECT_NONFINITE": "raise",
        "SMP_CHECK_FIRST_STEP": "1",
        "SMP_VERIFY": "order.json",
        "SMP_STORE_FOLDER": "~/checkpoints",
        "SMP_UPLOAD_WAIT_S": "0",
        "SMP_REPLACEMENT_S": "0",
    }
    expected = settings.Settings(
        2.5,
        "cpu",
        True,
        "mpi",
        False,
        2,
        lane="nccl",
        lane_slot_mb=64,
        host_pool=False,
        detect_nonfinite="raise",
        check_first_step="1",
        verify="order.json",
        store_root=Path("~/checkpoints"),
        upload_wait_s=0.0,
        replacement_s=0.0,
    )
    assert settings.read_settings(env) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SMP_TIMEOUT_S", "soon"),
        ("SMP_TIMEOUT_S", "0"),
        ("SMP_TIMEOUT_S", "inf"),
        ("SMP_DEVICE", "tpu"),
        ("SMP_SHARE_GPU", "yes"),
        ("SMP_TRANSPORT", "pigeon"),
        ("SMP_SHM", "no"),
        ("SMP_SHM_RING_MB", "0"),
        ("SMP_SHM_RING_MB", "1.5"),
        ("SMP_SHM_RING_MB", "9999"),
        ("SMP_LANE", "nvlink"),
        ("SMP_LANE_SLOT_MB", "0"),
        ("SMP_HOST_POOL", "off"),
        ("SMP_DETECT_NONFINITE", "yes"),
        ("SMP_CHECK_FIRST_STEP", "always"),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        settings.read_settings({name: value})


def test_device_follows_what_there_is_unless_told() -> None:
    def choose(word: str, is_there: bool) -> str:
        return settings.choose_device_type(settings.Settings(device=word), is_available=is_there)

    assert choose("auto", True) == "cuda"
    assert choose("auto", False) == "cpu"
    assert choose("cpu", True) == "cpu"
    assert choose("cuda", True) == "cuda"
    assert choose("late", True) == "late"  # a device of PrivateUse1
    with pytest.raises(RuntimeError, match="SMP_DEVICE=cuda, but torch sees no CUDA device"):
        choose("cuda", False)
    with pytest.raises(RuntimeError, match="SMP_DEVICE=late, but torch sees no LATE device"):
        choose("late", False)


def test_each_local_rank_has_its_gpu() -> None:
    assert settings.device_of("cuda", 1, 4) == torch.device("cuda:1")
    assert settings.device_of("cuda", 5, 4) == torch.device("cuda:1")  # shared
    assert settings.device_of("cpu", 5, 0) == torch.device("cpu")


def test_row_14_more_processes_than_gpus_is_refused() -> None:
    with pytest.raises(ValueError) as error:
        settings.check_device_count("node7", 4, 2, share_gpu=False)
    text = str(error.value)
    assert text.startswith("smp config: ")
    assert "node7" in text
    assert "SMP_SHARE_GPU" in text
    settings.check_device_count("node7", 2, 2, share_gpu=False)
    settings.check_device_count("node7", 4, 2, share_gpu=True)


def test_row_14_counts_each_host_for_itself() -> None:
    hosts = ["a", "a", "b", "b"]
    settings.check_devices(hosts, ["cuda"] * 4, [2, 2, 2, 2], share_gpu=False)
    with pytest.raises(ValueError, match="host 'b' has 1 visible"):
        settings.check_devices(hosts, ["cuda"] * 4, [2, 2, 1, 1], share_gpu=False)
    settings.check_devices(hosts, ["cuda"] * 4, [2, 2, 1, 1], share_gpu=True)


def test_row_14_does_not_apply_to_cpu() -> None:
    settings.check_devices(["a"] * 4, ["cpu"] * 4, [0] * 4, share_gpu=False)


def test_different_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'cpu': \[0\], 'cuda': \[1\]"):
        settings.check_devices(["a", "a"], ["cpu", "cuda"], [0, 2], share_gpu=False)


def test_data_parallel_ranks_may_not_share_a_gpu() -> None:
    hosts = ["a", "a", "b", "b"]
    settings.check_gpu_sharing([[0, 1], [2, 3]], hosts, [2, 2, 2, 2])
    settings.check_gpu_sharing([[0, 2], [1, 3]], hosts, [1, 1, 1, 1])
    with pytest.raises(ValueError, match=r"ranks \[2, 3\] share GPU 0 of host 'b'"):
        settings.check_gpu_sharing([[0, 1], [2, 3]], hosts, [2, 2, 1, 1])


def test_tensor_parallel_groups_over_hosts_are_noted() -> None:
    groups = [[0, 1], [2, 3]]
    assert settings.host_advice(groups, ["a", "a", "b", "b"]) == []
    assert "['a', 'b']" in settings.host_advice(groups, ["a", "b", "a", "b"])[0]


def test_variables_of_robustness_are_read() -> None:
    env = {
        "SMP_HANG_S": "0",
        "SMP_HANG_ACTION": "report",
        "SMP_PREEMPTION_PATH": "checkpoints",
        "SMP_FAULT": "rank=1,step=2,kind=kill",
    }
    found = settings.read_settings(env)
    assert (found.hang_s, found.preemption_path) == (0.0, "checkpoints")
    assert found.hang_action == "report"
    assert found.fault is not None and found.fault.step == 2
    defaults = settings.read_settings({})
    assert (defaults.hang_s, defaults.preemption_path, defaults.fault) == (300.0, None, None)
    assert defaults.hang_action == "raise"
    with pytest.raises(ValueError, match="SMP_HANG_ACTION"):
        settings.read_settings({"SMP_HANG_ACTION": "end"})
    with pytest.raises(ValueError, match="SMP_HANG_S"):
        settings.read_settings({"SMP_HANG_S": "-1"})
    with pytest.raises(ValueError, match="SMP_FAULT"):
        settings.read_settings({"SMP_FAULT": "explode"})


def test_variables_of_the_original_library_are_accepted() -> None:
    names = ("SMP_NCCL_THROTTLE_LIMIT", "SMP_DISABLE_D2D", "SMP_D2D_GPU_BUFFER_SIZE_BYTES")
    others = ("SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", "SMDDP_AG_SORT_BUFFER_SIZE_BYTES")
    found = settings.read_settings(dict.fromkeys((*names, *others), "1"))
    assert found == settings.read_settings({})
