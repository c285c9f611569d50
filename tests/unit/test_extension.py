"""The extension loads only with the torch it was built for, and says so otherwise."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from smp import _C
from smp.world import extension as _extension


def _pretend_built_for(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = ModuleType("smp._build_info")
    module.TORCH_VERSION = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "smp._build_info", module)


def test_other_minor_release_of_torch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_built_for(monkeypatch, "1.99.3+cpu")
    with pytest.raises(ImportError) as caught:
        _extension.load()
    text = str(caught.value)
    assert "1.99.3+cpu" in text
    assert torch.__version__ in text
    assert "make build" in text or "pip install" in text


def test_other_patch_release_of_torch_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = torch.__version__.split(".")[:2]
    _pretend_built_for(monkeypatch, f"{major}.{minor}.99+cu1")
    _extension.load()


def test_missing_build_says_how_to_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smp._build_info", None)
    with pytest.raises(ImportError, match="make build|pip install") as caught:
        _extension.load()
    package = Path(_extension.__file__).parents[1]
    assert f"is missing in {package};" in str(caught.value)
    if (package.parents[1] / "CMakeLists.txt").is_file():
        assert f"`make build` in {package.parents[1]}" in str(caught.value)


def test_rank_prefix_is_kept_in_cpp() -> None:
    before = _C.rank_prefix()
    try:
        _C.set_rank_prefix("[global_rank 3] ")
        assert _C.rank_prefix() == "[global_rank 3] "
    finally:
        _C.set_rank_prefix(before)


def test_peer_failure_is_a_runtime_error() -> None:
    assert issubclass(_C.PeerFailure, RuntimeError)
    assert not issubclass(_C.PeerFailure, ValueError)
