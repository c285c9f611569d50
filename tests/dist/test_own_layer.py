"""The example of a user's own split layer trains like the plain module, in every mode."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.dist.one_step import assert_gradients
from tests.dist.pool import Pool
from tests.dist.processes import REPO, launch, torchrun
from tests.harness import square_loss, train_step_of
from tests.reference.models import randomise_

EXAMPLE = REPO / "examples" / "own_layer"
MODES = tuple(itertools.product(("memory", "speed"), (False, True)))
SAMPLES, LENGTH, WIDTH = 3, 5, 8


def example() -> Any:
    sys.path.insert(0, str(EXAMPLE))
    try:
        import gated_mlp
    finally:
        sys.path.pop(0)
    return gated_mlp


def batch_of(idx: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(idx)
    return torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)


def train_once(rank: int, tp: int, optimize: str, prescaled: bool) -> tuple[dict[str, Any], int]:
    """Gradients of this rank after one step, and the number of split parameters."""
    import smp
    from tests.dist.steps import marked_values

    config = {"tensor_parallel_degree": tp, "ddp": True, "optimize": optimize}
    smp.init({**config, "prescaled_batch": prescaled})
    module = example()
    with smp.tensor_parallelism():
        network = randomise_(module.Network(WIDTH, 2).double(), 1)
    model = smp.DistributedModel(network)
    train_step = train_step_of(model)
    train_step(batch_of(smp.rdp_rank() if prescaled else smp.dp_rank()))
    num_split = sum(model.is_distributed_parameter(p) for p in model.parameters())
    return marked_values(model, "grad"), num_split


@pytest.mark.sample(keep=4)
@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize(("optimize", "prescaled"), MODES)
def test_own_layer_has_the_gradients_of_one_process(
    pool: Pool, tp: int, optimize: str, prescaled: bool
) -> None:
    results = pool.run(tp, train_once, tp, optimize, prescaled)
    assert all(num_split == 2 * 5 + 1 for _, num_split in results)  # gate, up, down; the head
    plain: nn.Module = randomise_(example().Network(WIDTH, 2).double(), 1)
    batches = [batch_of(idx) for idx in range(1 if prescaled else tp)]
    where = f"tp {tp} {optimize} {prescaled}"
    assert_gradients([grads for grads, _ in results], plain, batches, where, square_loss)


@pytest.mark.sample(keep=0)
def test_the_example_runs_as_it_is_described() -> None:
    done = launch([*torchrun(2), str(EXAMPLE / "gated_mlp.py")])
    assert done.returncode == 0, done.stdout
    assert "16 parameters are split" in done.stdout
