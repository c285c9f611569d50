"""Single files and whole models: written in one step, found again with what belongs to them."""

from __future__ import annotations

import os
import signal
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import smp
from smp.checkpoint.file_generation import FileGeneration


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    smp.init({"ddp": True})
    yield
    smp.shutdown()


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


@pytest.mark.parametrize("mask", (0o022, 0o027, 0o002))
def test_files_have_the_mode_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        smp.save({"a": 1}, tmp_path / "part", partial=True)
        smp.save({"a": 1}, tmp_path / "full", partial=False)
    finally:
        os.umask(before)
    assert _names(tmp_path) == ["full", "part_0"]
    for path in tmp_path.iterdir():
        assert _mode(path) == 0o666 & ~mask, f"{path.name}: {_mode(path):o}"


def _model() -> Any:
    return smp.DistributedModel(nn.Linear(2, 2))


class _DiesHere:
    """Kills its process when it is written."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def _die_in(body: Callable[[], object]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(3)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), status


def test_the_next_save_of_a_file_deletes_what_the_dead_left(tmp_path: Path) -> None:
    smp.save({"a": 1}, tmp_path / "x", partial=False)
    _die_in(lambda: smp.save({"a": _DiesHere()}, tmp_path / "x", partial=False))
    assert len(_names(tmp_path)) == 3, "a temporary file and a lock"
    (tmp_path / ".x.writing-deadbeef").touch()
    smp.save({"a": 3}, tmp_path / "x", partial=False)
    assert _names(tmp_path) == ["x"]
    assert smp.load(tmp_path / "x", partial=False) == {"a": 3}


def test_saves_of_other_files_leave_a_living_one_alone(tmp_path: Path) -> None:
    """Another job saves to the same folder meanwhile, and so does another process to the file."""

    class SavesOthers:
        def __reduce__(self) -> Any:
            smp.save({"a": 2}, tmp_path / "x", partial=False)
            smp.save_checkpoint(tmp_path, "full.pt", partial=False, model=model)
            smp.save_checkpoint(tmp_path, "p", model=model)
            return OrderedDict, ()

    model = _model()
    smp.save({"a": 1, "b": SavesOthers()}, tmp_path / "x", partial=False)
    assert smp.load(tmp_path / "x", partial=False) == {"a": 1, "b": {}}
    assert not [name for name in _names(tmp_path) if name.startswith(".")]


def test_a_whole_save_deletes_what_the_dead_left(tmp_path: Path) -> None:
    model = _model()
    for name in ("full.pt", "user_content_full.pt", "config.json"):
        (tmp_path / f".{name}.writing-deadbeef").write_text("half")

    def begin() -> None:
        FileGeneration.begin(tmp_path, "full.pt", "1")
        os.kill(os.getpid(), signal.SIGKILL)

    _die_in(begin)
    assert {".full.pt.writing-1", ".generation-1.lock"} == set(_names(tmp_path))
    smp.save_checkpoint(tmp_path, "full.pt", partial=False, model=model)
    assert not [name for name in _names(tmp_path) if name.startswith(".")]


def test_a_living_whole_save_is_left_alone(tmp_path: Path) -> None:
    class SavesPartially:
        def __reduce__(self) -> Any:
            smp.save_checkpoint(tmp_path, "p", model=model)
            return OrderedDict, ()

    model = _model()
    content = {"x": SavesPartially()}
    smp.save_checkpoint(tmp_path, "full.pt", partial=False, model=model, user_content=content)
    weights = torch.load(tmp_path / "full.pt")
    assert torch.equal(weights["weight"], model.state_dict()["weight"])
    assert torch.load(tmp_path / "user_content_full.pt") == {"x": {}}
    assert not [name for name in _names(tmp_path) if name.startswith(".")]


class _Configured(nn.Linear):
    class config:  # noqa: N801 - the name that models of transformers have
        @staticmethod
        def to_json_string() -> str:
            return "{}"


def test_a_configuration_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = smp.DistributedModel(_Configured(2, 2))
    replace = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "config.json":
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as other:
        other.setattr(os, "replace", full)
        with pytest.raises(RuntimeError, match="No space left"):
            smp.save_checkpoint(tmp_path, "model.safetensors", partial=False, model=model)
    assert _names(tmp_path) == []
    smp.save_checkpoint(tmp_path, "model.safetensors", partial=False, model=model)
    assert (tmp_path / "config.json").read_text() == "{}"


def _resume(path: Path, **arguments: Any) -> Any:
    return smp.resume_from_checkpoint(path, load_optimizer=False, **arguments)


@pytest.mark.parametrize("name", ("full.pt", "model.safetensors"))
def test_the_newest_may_be_a_whole_model(tmp_path: Path, name: str) -> None:
    model = _model()
    weight = model.state_dict()["weight"].clone()
    smp.save_checkpoint(tmp_path, "old.pt", partial=False, model=model, user_content={"n": 0})
    smp.save_checkpoint(tmp_path, name, partial=False, model=model, user_content={"n": 1})
    assert (tmp_path / "newest").read_text() == name
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert _resume(tmp_path, partial=False) == {"n": 1}
    assert torch.equal(model.state_dict()["weight"], weight)
    assert _resume(tmp_path, partial=False, tag="old.pt") == {"n": 0}


def test_content_is_that_of_the_file_that_is_found(tmp_path: Path) -> None:
    model = _model()
    smp.save_checkpoint(
        tmp_path, "model.safetensors", partial=False, model=model, user_content={"n": 1}
    )
    (tmp_path / "user_content_pytorch_model.bin").touch()  # of a file that is no more
    for tag in ("model.safetensors", "pytorch_model.bin", None):
        assert _resume(tmp_path, partial=False, tag=tag) == {"n": 1}, tag
    (tmp_path / "newest").unlink()
    assert _resume(tmp_path, partial=False) == {"n": 1}
    (tmp_path / "inside").mkdir()
    for item in ("model.safetensors", "user_content_model.safetensors"):
        (tmp_path / item).rename(tmp_path / "inside" / item)
    assert _resume(tmp_path, partial=False, tag="inside") == {"n": 1}


def test_partial_and_whole_ones_in_one_folder(tmp_path: Path) -> None:
    model = _model()

    def save(tag: str, partial: bool) -> None:
        content = {"tag": tag}
        smp.save_checkpoint(tmp_path, tag, partial, model=model, user_content=content)

    save("model.safetensors", False)
    attempts: tuple[dict[str, Any], ...] = ({}, {"tag": "model.safetensors"})
    for arguments in attempts:
        with pytest.raises(FileNotFoundError, match=r"a whole model.*partial=False"):
            _resume(tmp_path, **arguments)
    save("a", True)
    save("b", True)
    assert (tmp_path / "newest").read_text() == "b_partial"
    assert _resume(tmp_path) == {"tag": "b"}
    assert _resume(tmp_path, partial=False) == {"tag": "model.safetensors"}
    save("full.pt", False)
    assert _resume(tmp_path) == {"tag": "b"}, "the newest of those that can be resumed"
    assert _resume(tmp_path, partial=False) == {"tag": "full.pt"}
    (tmp_path / "full.pt").unlink()
    assert _resume(tmp_path, partial=False) == {"tag": "model.safetensors"}
    with pytest.raises(FileNotFoundError, match=r"'newest' in .* names 'full.pt'.*b_partial"):
        _resume(tmp_path)


def test_a_whole_model_of_another_name_is_asked_for_by_tag(tmp_path: Path) -> None:
    model = _model()
    torch.save(model.state_dict(), tmp_path / "mine.pt")
    with pytest.raises(FileNotFoundError, match=r"there are: mine.pt.*tag="):
        _resume(tmp_path, partial=False)
