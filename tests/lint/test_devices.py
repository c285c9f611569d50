"""Checks that what any accelerator has is not asked of CUDA by name."""

from __future__ import annotations

import re

from tests.lint.layers import REPO

# Each names CUDA for something that only CUDA has.
_OWNERS = {
    "python/smp/_device.py": "compute capabilities with products of 8 bits",
    "python/smp/_torch_releases.py": "a guard that exists without CUDA only",
    "python/smp/context_parallel/block_attention.py": "attention kernels",
    "python/smp/compilation/trial.py": "devices for which PyTorch compiles",
    "python/smp/dropout/by_sample.py": "TF32",
    "python/smp/dropout/frames.py": "cuDNN",
    "python/smp/nn/attention_order.py": "attention kernels, by compute capability",
    "python/smp/nn/attention_rule.py": "attention kernels",
    "python/smp/nn/attend.py": "attention kernels",
    "python/smp/observe/device_use.py": "NVML",
    "python/smp/observe/memory/failure.py": "the observer of its allocator",
    "python/smp/observe/metrics.py": "a figure of CUDA by its documentation",
    "python/smp/v1/smddp_backend.py": "NCCL",
    "python/smp/world/groups.py": "NCCL",
    "python/smp/world/nccl.py": "its queues, which are set before CUDA is used",
    "python/smp/world/rendezvous.py": "NCCL",
    "python/smp/world/settings.py": "the default, and NCCL",
}
_PYTHON = re.compile(r"torch\.cuda\.|torch\.backends\.cuda|\.is_cuda\b|[!=]= \"cuda\"")
_CPP = re.compile(r"is_cuda\(\)")


def test_only_what_is_cudas_is_asked_of_cuda() -> None:
    files = sorted((REPO / "python/smp").rglob("*.py"))
    found = {p.relative_to(REPO).as_posix() for p in files if _PYTHON.search(p.read_text())}
    assert found == set(_OWNERS)


def test_csrc_asks_by_one_predicate() -> None:
    files = [*(REPO / "csrc").rglob("*.h"), *(REPO / "csrc").rglob("*.cpp")]
    found = {p.relative_to(REPO).as_posix() for p in files if _CPP.search(p.read_text())}
    assert found == {"csrc/lanes/lane_table.cpp"}


def test_the_rule_sees_what_it_forbids() -> None:
    for line in ('if device.type == "cuda":', "torch.cuda.synchronize()", "if x.is_cuda:"):
        assert _PYTHON.search(line), line
