"""Checks that each language has one file that asks for torch's release."""

from __future__ import annotations

import re
from pathlib import Path

from tests.lint.layers import REPO

# Numbers of releases, and questions whether torch has a name.
_PYTHON = re.compile(
    r"TorchVersion|torch\.version\.__version__"
    r"|\b(?:has|get)attr\(\s*(?:torch(?:\.\w+)*\.)?"
    r"(?:aten|dist|functorch|inductor|dynamo|_dynamo|_C|_inductor|_functorch|exc|Backend|nccl|options)\b"
    r"|\bhasattr\(\s*torch\b"
)
_CPP = re.compile(r"TORCH_VERSION|if constexpr \(requires")
_OWNERS = {"python/smp/_torch_releases.py", "csrc/common/torch_releases.h"}
# Expressions that only write the number down.
_VERSION = re.compile(r"torch\.__version__")
_WRITERS = {
    "python/smp/_torch_releases.py",
    "python/smp/world/run_record.py",
    "python/smp/world/extension.py",
    "python/smp_cli/doctor/devices.py",
    "python/smp_cli/doctor/hosts.py",
    "python/smp_cli/doctor/versions.py",
}


def _where(pattern: re.Pattern[str], *globs: str) -> set[str]:
    """Files below the repository in which a pattern is found."""
    files = (path for glob in globs for path in REPO.glob(glob))
    return {p.relative_to(REPO).as_posix() for p in files if pattern.search(Path(p).read_text())}


def test_one_file_of_each_language_tells_releases_of_torch_apart() -> None:
    asking = _where(_PYTHON, "python/**/*.py") | _where(
        _CPP, "csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu"
    )
    assert asking == _OWNERS


def test_others_only_write_down_which_release_it_is() -> None:
    assert _where(_VERSION, "python/**/*.py") == _WRITERS


def test_the_rule_sees_what_it_forbids() -> None:
    for line in (
        'if hasattr(torch.ops.aten, "_grouped_mm"):',
        'if hasattr(aten, "_grouped_mm"):',
        "getattr(torch._dynamo.exc, kind, ())",
        'if hasattr(options, "config"):',
        'hasattr(torch, "compile")',
    ):
        assert _PYTHON.search(line), line
    assert _CPP.search("#if TORCH_VERSION_MINOR >= 7")
    assert not _PYTHON.search("getattr(torch, name)")
