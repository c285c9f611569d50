"""The extension loads only with the torch it was built for, and says so otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

import smp
from smp import _C
from smp.world import extension


def _package(folder: Path, **built_for: str) -> Path:
    """Makes a package with extensions by folder; ``here`` is the package itself."""
    for name, version in built_for.items():
        place = folder if name == "here" else folder / name
        place.mkdir(exist_ok=True)
        (place / "_build_info.py").write_text(f'TORCH_VERSION = "{version}"\n')
    return folder


def test_the_extension_of_the_installed_release_is_found(tmp_path: Path) -> None:
    package = _package(tmp_path, **{"torch2.11": "2.11.0+cu130", "torch2.15": "2.15.0+cu132"})
    found = extension.extensions(package)
    assert extension.folder_for("2.15.3+cpu", found) == package / "torch2.15"
    assert extension.folder_for("2.11.0", found) == package / "torch2.11"


def test_a_build_of_one_release_is_in_the_package_itself(tmp_path: Path) -> None:
    found = extension.extensions(_package(tmp_path, here="2.6.0+debian"))
    assert found == {"2.6": tmp_path}


def test_a_release_that_nothing_was_built_for_is_told_which_there_are(tmp_path: Path) -> None:
    builds = {"torch2.9": "2.9.1", "torch2.15": "2.15.0+cu132", "torch2.11": "2.11.0"}
    found = extension.extensions(_package(tmp_path, **builds))
    with pytest.raises(ImportError) as caught:
        extension.folder_for("2.12.1+cu130", found)
    text = str(caught.value)
    assert "built for torch 2.9 and 2.11 and 2.15, but torch 2.12.1+cu130 is installed" in text
    assert "install torch 2.9 or 2.11 or 2.15, or " in text
    assert "make build" in text or "pip install" in text


def test_loading_again_changes_nothing() -> None:
    before = list(smp.__path__)
    extension.load()
    assert smp.__path__ == before and smp._C is _C


def test_missing_build_says_how_to_build(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match="make build|pip install") as caught:
        extension.folder_for("2.11.0", extension.extensions(tmp_path))
    package = Path(extension.__file__).parents[1]
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
