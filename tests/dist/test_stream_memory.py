"""Ranks that send or write a model tensor by tensor hold one tensor of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_to_the_end

SCRIPT = REPO / "tests" / "dist" / "scripts" / "stream_memory.py"
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pipeline_parallel_degree": 2},
    {"tensor_parallel_degree": 2},
    {"sharded_data_parallel_degree": 2, "sdp_gradient_clipping": 0.0},
)


@pytest.mark.sample(keep=0)
@pytest.mark.parametrize("config", LAYOUTS, ids=lambda config: next(iter(config)))
def test_no_rank_holds_more_than_a_tensor(
    metered_pool: Pool, tmp_path: Path, config: dict[str, Any]
) -> None:
    run_to_the_end(metered_pool, SCRIPT, 2, [str(tmp_path), json.dumps(config)])
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    in_tensors = [{k: v / rank["tensor"] for k, v in rank.items()} for rank in ranks]
    print(in_tensors)
    for rank in in_tensors:
        assert rank["model"] == 16
        # A tensor and its slices, the one before, and copies of pieces on their way.
        assert max(rank["one"], rank["all"]) < 3.2, rank
        assert rank["files"] < 3.2, rank
    assert min(rank["one"] for rank in in_tensors) < 1.5, "a rank that sends"
    assert max(rank["whole"] for rank in in_tensors) > 7.9, "others gather the model"
