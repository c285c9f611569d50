"""A rank holds the activations that the simulator counts, and nothing besides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_to_the_end
from tests.dist.scripts.activation_memory import TOLERANCE

SCRIPT = REPO / "tests" / "dist" / "scripts" / "activation_memory.py"


def cases_of(num_ranks: int, microbatches: int) -> list[tuple[str, int, int | None]]:
    return [
        (schedule, microbatches, active)
        for schedule in ("interleaved", "simple")
        for active in (num_ranks, None)
        if (schedule, microbatches, active) != ("simple", num_ranks, None)  # the same as before it
    ]


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_peak_of_each_rank_is_the_simulated_number_of_activations(
    metered_pool: Pool, num_ranks: int, microbatches: int, tmp_path: Path
) -> None:
    cases = cases_of(num_ranks, microbatches)
    argv = [json.dumps(cases), str(tmp_path)]
    run_to_the_end(metered_pool, SCRIPT, num_ranks, argv)
    by_rank: list[list[dict[str, Any]]] = [
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(num_ranks)
    ]
    wrong = []
    for case, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        for found in ranks:
            text = f"{case} rank {found['rank']}: {found['count']} activations, " + " ".join(
                f"{ratio:.3f}" for ratio in found["ratios"]
            )
            print(text)
            if min(abs(ratio - 1) for ratio in found["ratios"]) > TOLERANCE:
                wrong.append(text)
    assert not wrong, "\n".join(wrong)
