"""The training run of `training.py`, of which a trace is wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.docs.setup.training import loader, smp, train_step

__all__ = ["loader", "smp", "train_step"]


def after(names: dict[str, Any]) -> None:
    """Checks that both files exist."""
    if smp.rank() == 0:
        assert Path("pipeline.html").stat().st_size > 10_000
        assert Path("pipeline.json").exists()
