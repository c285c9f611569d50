"""A rank that all tokens go to holds no more than the documents say."""

from __future__ import annotations

import json
from pathlib import Path

from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_to_the_end
from tests.dist.scripts.experts_memory import HIDDEN, TOKENS

SCRIPT = REPO / "tests" / "dist" / "scripts" / "experts_memory.py"
RANKS = 4


def test_memory_of_the_fullest_rank_is_bounded(metered_pool: Pool, tmp_path: Path) -> None:
    run_to_the_end(metered_pool, SCRIPT, RANKS, [str(tmp_path)])
    found = json.loads((tmp_path / "rank0.json").read_text())
    print(found)
    even, uneven, at_once = (found[load] for load in ("even", "one rank", "one rank at once"))
    # Rows that come, their gradients, their results and theirs, and sums of slices on their way.
    rows = 4 * RANKS * TOKENS * HIDDEN * 4
    assert uneven["peak"] <= 2.1 * even["peak"] + 2 * rows, found
    assert uneven["kept"] <= even["kept"] + rows, found
    # Four times the even load is what would be there else.
    assert at_once["kept"] > 3.5 * even["kept"] > 3.5 * 1024**2, found
    assert at_once["peak"] > 1.4 * uneven["peak"], found
