"""Adapters of PEFT on quantized models that are cut over ranks train as in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.clients import quantized_training as training
from tests.dist.pool import Pool

for package in ("peft", "bitsandbytes", "torchao"):
    pytest.importorskip(
        package, reason=f"{package} is not installed; pip install -r requirements/quantized.txt"
    )


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("base"))
    training.write_base(folder)
    return folder


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("kind", training.KINDS)
@pytest.mark.parametrize("layout", training.LAYOUTS)
def test_adapters_train_as_in_one_process(
    pool: Pool, base: str, layout: str, kind: str, use_dora: bool
) -> None:
    (expected,) = pool.run(1, training.train, training.Job(base, kind, use_dora))
    world_size, config = training.LAYOUTS[layout]
    results = pool.run(world_size, training.train, training.Job(base, kind, use_dora, config))
    if (kind, use_dora) != ("int8", True):
        assert results[0]["keys"] == expected["keys"]
    found: dict[str, torch.Tensor] = {}
    for result in results:
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        found |= result["grads"]
    if "sharded" not in layout:
        assert found.keys() == expected["grads"].keys()
        for name, grad in expected["grads"].items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)
    for name, value in expected["values"].items():
        torch.testing.assert_close(results[0]["values"][name], value, rtol=1e-4, atol=1e-5)
