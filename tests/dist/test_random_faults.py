"""Random faults over five layouts: all others end, and name the culprit first.

200 with `SMP_GRID=all` (`SMP_NUM_FAULTS` sets another number), else 3 in `make test` and 9 others
in `make test-all`.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass

import pytest

from tests.dist.pool import Pool
from tests.dist.processes import REPO, run_ranks

pytestmark = pytest.mark.waits

SCRIPT = REPO / "tests" / "dist" / "scripts" / "alarm.py"
ALL = os.environ.get("SMP_GRID") == "all"
NUM_FAULTS = int(os.environ.get("SMP_NUM_FAULTS", "200" if ALL else "12"))
LAYOUTS = {
    "pp2": (2, ["--pp=2"]),
    "dp2": (2, []),
    "pp2-dp2": (4, ["--pp=2"]),
    "tp2-pp2": (4, ["--pp=2", "--tp=2"]),
    "pp4": (4, ["--pp=4"]),
}
ACTIONS = ("kill", "raise", "exit", "die", "throw", "leave")


@dataclass(frozen=True)
class Fault:
    layout: str
    action: str
    victim: int
    call: int
    step: int

    def argv(self) -> list[str]:
        places = [f"--call={self.call}", f"--step={self.step}"]
        return [self.action, str(self.victim), *LAYOUTS[self.layout][1], *places]


def draw(index: int) -> Fault:
    """The same in each run with one seed; layouts take turns."""
    dice = random.Random(1000 * int(os.environ["SMP_GRID_SEED"]) + index)
    layout = list(LAYOUTS)[index % len(LAYOUTS)]
    action, victim = dice.choice(ACTIONS), dice.randrange(LAYOUTS[layout][0])
    return Fault(layout, action, victim, dice.randint(1, 24), dice.randint(0, 5))


@pytest.mark.sample(keep=1)
@pytest.mark.parametrize("fault", [draw(index) for index in range(NUM_FAULTS)], ids=str)
def test_random_fault_is_named_by_all_others(pool: Pool, fault: Fault) -> None:
    results = run_ranks(pool, SCRIPT, LAYOUTS[fault.layout][0], fault.argv())
    assert "AT " in results[fault.victim].output, (
        f"the victim never came to the fault:\n{results[fault.victim].output}"
    )
    for result in results:
        text = f"{fault}, rank {result.rank} ({result.returncode}):\n{result.output}"
        assert not result.hung and result.returncode != 0, text
        if result.rank != fault.victim:
            first = re.search(r"(?<!\[)global_rank (\d+) \(pp", result.output)
            assert first and int(first[1]) == fault.victim, text
