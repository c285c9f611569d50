"""Objects that `smp.load` reads without a flag: data, and classes that this process saved."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config

import smp

pytestmark = pytest.mark.usefixtures("running")


@dataclass
class Progress:
    steps: int


@dataclass
class Foreign:
    steps: int


class Runs:
    """An object that is pickled as a call that would create a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("partial", [True, False])
def test_a_configuration_is_loaded_without_a_flag(tmp_path: Path, partial: bool) -> None:
    """Saves a configuration beside the model, as scripts of 2022 do."""
    config = GPT2Config(n_layer=3)
    args = argparse.Namespace(lr=0.5)
    content = {"model": {"w": torch.arange(3)}, "config": config, "args": args, "n": np.int64(2)}
    smp.save(content, str(tmp_path / "x.pt"), partial=partial)
    back = smp.load(str(tmp_path / "x.pt"), partial=partial)
    assert type(back["config"]) is GPT2Config and back["config"].n_layer == 3
    assert back["args"] == args and back["n"] == 2 and back["model"]["w"].tolist() == [0, 1, 2]


def test_classes_that_this_process_saved_are_loaded(tmp_path: Path) -> None:
    smp.save({"progress": Progress(3)}, str(tmp_path / "own.pt"))
    assert smp.load(str(tmp_path / "own.pt"))["progress"] == Progress(3)
    torch.save({"progress": Progress(4)}, tmp_path / "other.pt")  # another rank of the job
    assert smp.load(str(tmp_path / "other.pt"), partial=False)["progress"] == Progress(4)


def test_other_classes_and_all_functions_are_refused_by_name(tmp_path: Path) -> None:
    torch.save({"x": Foreign(3)}, tmp_path / "foreign.pt")
    with pytest.raises(ValueError, match=r"test_loaded_objects\.Foreign.*weights_only=False"):
        smp.load(str(tmp_path / "foreign.pt"), partial=False)
    loaded = smp.load(str(tmp_path / "foreign.pt"), partial=False, weights_only=False)
    assert loaded["x"] == Foreign(3)
    smp.save({"x": Runs(tmp_path / "made")}, str(tmp_path / "call.pt"), partial=False)
    with pytest.raises(ValueError, match="mkdir"):
        smp.load(str(tmp_path / "call.pt"), partial=False)
    assert not (tmp_path / "made").exists(), "a function is not let in by saving a call of it"
