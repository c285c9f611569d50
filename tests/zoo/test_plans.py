"""Families with a plan, split by it over tensor-parallel ranks: a sample."""

from __future__ import annotations

import pytest

from tests.dist.pool import Pool
from tests.zoo.__main__ import choose, run_entry
from tests.zoo.judging import EQUAL
from tests.zoo.modes import MODES

pytest.importorskip("transformers", minversion="5.0")

#: Plain, with norms between columns and rows, experts that are packed, latent
#: attention, sinks, an activation with parameters, images, sounds and text, much rounding.
PLANNED = (
    "cohere", "gemma2", "glm4", "qwen3_vl_moe", "qwen3_moe", "deepseek_v2", "granitemoe_swa",
    "apertus", "olmo2", "glm4v_moe", "voxtral_realtime", "gemma4",
)  # fmt: skip
SPLIT = ("tp2", "tp2own", "tp4", "pp2tp2")


@pytest.mark.sample(keep=2)
@pytest.mark.parametrize("family", PLANNED)
@pytest.mark.parametrize("mode", SPLIT)
def test_planned_family_has_the_numbers_of_one_process(pool: Pool, family: str, mode: str) -> None:
    entry = choose(f"transformers/{family}/", False)[0]
    [result] = run_entry(pool, entry, [MODES[mode]])
    assert result.outcome == EQUAL, f"{result.reason}\n{result.details}"
    assert result.num_planned >= 4 and not result.reason
