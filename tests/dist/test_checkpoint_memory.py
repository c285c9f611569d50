"""A rank's peak of memory falls with checkpointing as the number of kept tensors predicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_to_the_end
from tests.dist.scripts.checkpoint_memory import BLOCKS, HIDDEN, MICROBATCHES, TOKENS

SCRIPT = REPO / "tests" / "dist" / "scripts" / "checkpoint_memory.py"


@pytest.mark.sample(keep=0)
def test_peaks_fall_to_what_is_kept(metered_pool: Pool, tmp_path: Path) -> None:
    strategies = ["", "each", "contiguous", "budget:0.025"]
    run_to_the_end(metered_pool, SCRIPT, 2, [json.dumps(strategies), str(tmp_path)])
    hidden = TOKENS * HIDDEN * 4  # bytes of one hidden state
    blocks = BLOCKS // 2  # of one rank
    # Each block keeps its argument, the wide product and its activation.
    block = 9
    # Gradients on their way, one or two wide ones, results of the neighbour.
    passing = 9
    for rank in range(2):
        peaks = json.loads((tmp_path / f"rank{rank}.json").read_text())
        plain, each, contiguous, budget = (peak / hidden for peak in peaks)
        print(f"rank {rank}: in hidden states {[round(peak / hidden, 1) for peak in peaks]}")
        # The simple schedule keeps all microbatches.
        assert plain > 0.98 * MICROBATCHES * blocks * block
        assert each < MICROBATCHES * blocks + block + passing
        assert contiguous < MICROBATCHES + blocks * block + passing
        assert each < budget < 0.025 * 2**30 / hidden + passing < plain
