"""Split models hold what the published formula says, per rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_to_the_end

SCRIPT = REPO / "tests" / "dist" / "scripts" / "split_memory.py"
CASES = [("memory", False), ("memory", True), ("speed", False), ("speed", True)]
TOLERANCE = 0.1


def activation_bytes(shape: dict[str, int], optimize: str, tp: int) -> float:
    """Korthikanti et al. 2022, table 2, without what is not kept here.

    That is the scores of the attention, and two dropout masks of a byte for each hidden number.
    """
    numbers = shape["sequence"] * shape["samples"] * shape["hidden"]
    factor = (34 - 2) / tp if optimize == "memory" else 10 - 2 + 24 / tp
    return shape["layers"] * numbers * factor


def parameter_bytes(shape: dict[str, int], tp: int) -> float:
    """Matrices and the table are split; positions are whole. bfloat16."""
    hidden = shape["hidden"]
    split = 12 * hidden**2 * shape["layers"] + shape["vocabulary"] * hidden
    return 2 * (split / tp + shape["sequence"] * hidden)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_of_a_rank_are_those_of_the_formula(
    metered_pool: Pool, tp: int, tmp_path: Path
) -> None:
    run_to_the_end(metered_pool, SCRIPT, tp, [json.dumps(CASES), str(tmp_path)])
    wrong = []
    for rank in range(tp):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for (optimize, prescaled), found in zip(CASES, told["results"], strict=True):
            ratios = (
                found["parameters"] / parameter_bytes(told["shape"], tp),
                found["activations"] / activation_bytes(told["shape"], optimize, tp),
            )
            text = f"{optimize} prescaled {prescaled} rank {rank}: {ratios[0]:.3f} {ratios[1]:.3f}"
            print(text)
            if max(abs(ratio - 1) for ratio in ratios) > TOLERANCE:
                wrong.append(text)
    assert not wrong, "\n".join(wrong)
