"""The training run of `training.py` after its first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.docs.setup.training import loader, model, optimizer, smp, train_step

__all__ = ["loader", "model", "optimizer", "smp", "train_step"]

train_step(loader[0])
optimizer.step()


def after(names: dict[str, Any]) -> None:
    """Checks that the saved files and states exist."""
    if "handle" in names:
        assert names["handle"].done() and Path("background/newest").read_text().strip()
    else:
        assert {path.name for path in Path().glob("*.pt*")} >= {"state.pt_0", "model.pt"}
        assert names["state"]["optimizer"]["state"]
