"""The entry point of examples/sagemaker, by the variables that the service documents."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ENTRY = Path(__file__).resolve().parents[2] / "examples" / "sagemaker" / "entry.py"
SERVICE = {"SM_HOSTS": '["algo-2","algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}


@pytest.mark.parametrize(
    ("more", "words", "expected"),
    [
        ({}, ["train.py", "--ranks-per-host", "3"], ["--nproc-per-node=8", "--node-rank=1"]),
        ({"SM_NUM_GPUS": "0"}, ["train.py"], ["--nproc-per-node=1", "--node-rank=1"]),
        (
            {"SM_CURRENT_HOST": "algo-1"},
            ["--ranks-per-host", "2", "train.py"],
            ["--nproc-per-node=2", "--node-rank=0"],
        ),
    ],
)
def test_the_ranks_of_a_host_are_started(
    more: dict[str, str], words: list[str], expected: list[str]
) -> None:
    found = runpy.run_path(str(ENTRY))["command"]({**SERVICE, **more}, words)
    assert [word for word in found if word.startswith(("--nproc", "--node-rank"))] == expected
    assert "--nnodes=2" in found and "--master-addr=algo-1" in found
    assert found[found.index("train.py") :] == words[words.index("train.py") :]
