"""Models whose parts are compiled by inductor train as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.compiled_training import (
    STEPS,
    code_folder,
    gradients_of,
    reference_updates,
    train_compiled,
    train_layout,
)
from tests.dist.pool import Pool
from tests.dist.training import Run, check_against_reference
from tests.reference.tolerances import TOLERANCE, assert_close, largest, relative_difference

__all__ = ["code_folder"]

FAMILIES = ("gpt2", "gptj", "llama")
# The code of a block is compiled once for all of them, and again for inputs without gradients;
# Llama has a norm beside its blocks.
MAX_GRAPHS = {"gpt2": 2, "gptj": 2, "llama": 4}


def num_blocks(units: list[str]) -> int:
    return sum(unit.rpartition(".")[2].isdigit() for unit in units)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ((2, 1), (1, 2)), ids=("pp2", "dp2"))
def test_compiled_blocks_train_as_in_one_process(
    pool: Pool, code_folder: Path, family: str, layout: tuple[int, int]
) -> None:
    # With memory in the balance no block is cut, and each is one unit.
    whole = (("memory_weight", 0.8),)
    run = Run(f"hf/{family}+nocache", *layout, dtype=torch.float32, config=whole)
    results = pool.run(2, train_compiled, code_folder, run)
    assert sum(num_blocks(result.units) for result in results) == 4 * run.dp
    for result in results:
        assert result.units and 1 <= result.num_graphs <= MAX_GRAPHS[family], result.num_graphs
    check_against_reference([result.record for result in results], run)


@pytest.mark.sample(keep=0)
def test_attention_that_inductor_cannot_run_in_float64_runs_in_eager_mode(
    pool: Pool, code_folder: Path
) -> None:
    """Checks attention whose backward would fail on both ranks.

    The rest of the blocks is compiled.
    """
    run = Run("hf/gpt2+nocache", 2, 1, dtype=torch.float64)
    first, second = pool.run(2, train_compiled, code_folder, run)
    check_against_reference([first.record, second.record], run)
    for result in (first, second):
        assert sum(unit.endswith(".mlp") for unit in result.units) == 2, result.units
        assert not [unit for unit in result.units if unit.endswith(".attn") or num_blocks([unit])]
    told = [line for line in first.said if "without torch.compile" in line]
    assert [line.split()[1] for line in told] == ["GPT2Block", "GPT2Attention"], told
    assert all("expected scalar type Double but found Float" in line for line in told)
    assert not [line for line in second.said if "without torch.compile" in line]


SHARDED = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}
SHARDED |= {"sdp_gradient_clipping": 1e9}


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "config",
    # With batches of their own, masks of transformers have other shapes on each rank.
    (SHARDED, {"tensor_parallel_degree": 2, "prescaled_batch": True}),
    ids=("sharded2", "tp2"),
)
def test_compiled_blocks_beside_sharded_and_split_ones_train_as_in_one_process(
    pool: Pool, code_folder: Path, family: str, config: dict[str, Any]
) -> None:
    """Checks losses, gradients and parameters of blocks of which some are compiled.

    With tensor parallelism every other block is split. Split blocks run in eager mode, and the
    others are compiled.
    """
    is_split = "tensor_parallel_degree" in config
    results = pool.run(2, train_layout, code_folder, family, config)
    losses, states = reference_updates(family, replicas=1 if is_split else 2)
    limit = TOLERANCE[torch.float32]
    for rank, result in enumerate(results):
        assert num_blocks(result.units) == (2 if is_split else 4), result.units
        assert 1 <= result.num_graphs <= MAX_GRAPHS[family], result.num_graphs
        for step in range(STEPS):
            got, expected = (
                torch.tensor(result.losses[step]),
                torch.tensor(losses[step][0 if is_split else rank]),
            )
            assert relative_difference(got, expected) <= limit, f"losses of step {step}"
            # Split blocks have other names; the losses of the next step depend on them.
            known = result.states[0].keys() & states[0].keys()
            assert len(known) >= (0.4 if is_split else 1.0) * len(states[0])
            wanted = gradients_of(states, step)
            grads = gradients_of(result.states, step)
            assert largest(grads) > 1e-3
            # An update in float32 tells the gradient up to the rounding of the parameter.
            assert_close(
                {name: grads[name] for name in known & grads.keys()},
                {name: wanted[name] for name in known & wanted.keys()},
                torch.float32,
                f"gradients of step {step}",
                tolerance=2e-4,
            )
            assert_close(
                {name: result.states[step + 1][name] for name in known},
                {name: states[step + 1][name] for name in known},
                torch.float32,
                f"parameters after step {step}",
            )
