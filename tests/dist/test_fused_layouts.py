"""Fused optimizers give the same updates wherever the elements of a parameter are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.dist.half_training import HalfRun, joined, train
from tests.dist.pool import Pool

LAYOUTS = [
    HalfRun("fp32", dp=2, sharding="optimizer"),
    HalfRun("fp32", pp=2, dp=2, sharding="data"),
    HalfRun("fp32", "gpt2", pp=2, tp=2),
]
_plain: dict[Any, Any] = {}


def plain(pool: Pool, run: HalfRun, kind: str) -> dict[str, torch.Tensor]:
    """Values after the same training without anything that spreads a parameter."""
    alone = dataclasses.replace(run, pp=1, tp=1, sharding="", split=run.is_split)
    if (alone, kind) not in _plain:
        records = pool.run(alone.world_size, train, alone, kind)
        _plain[alone, kind] = joined(records, alone, lambda record: record.masters)
    return _plain[alone, kind]


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("kind", ["FusedAdam", "FusedLAMB", "FusedNovoGrad"])
@pytest.mark.parametrize("run", LAYOUTS, ids=str)
def test_updates_do_not_depend_on_the_layout(pool: Pool, run: HalfRun, kind: str) -> None:
    # LAMB has a number per parameter and one of the whole model, NovoGrad one per parameter.
    records = pool.run(run.world_size, train, run, kind)
    ours = joined(records, run, lambda record: record.masters)
    expected = plain(pool, run, kind)
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)
