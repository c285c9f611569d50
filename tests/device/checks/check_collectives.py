"""Collectives of late tensors, in the order of streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.checks.ranks import run_ranks


@pytest.mark.parametrize(
    "program", ["numbers", "order", "kept", "synchronous", "data_parallel", "abort"]
)
def test_collectives(program: str, tmp_path: Path) -> None:
    run_ranks(program, tmp_path)
