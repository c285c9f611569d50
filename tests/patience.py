"""Waits of tests: how long for, and what says that one is over.

Claims about time are proven by what ended a wait, never by a clock. The error of a watch, of a
limit that the test has set or of a peer's fault names itself; all other limits are far away, this
patience first and `SMP_TIMEOUT_S` behind it (`tests/lint/test_clocks.py`). Figures are measured by
`benchmarks/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds until a test gives a wait up; far above what one takes on a busy machine.
PATIENCE_S = 600.0


def wait_until(
    is_over: Callable[[], bool],
    show: Callable[[], object],
    can_come: Callable[[], bool] = lambda: True,
    pause_s: float = 0.02,
) -> None:
    """Asks again and again whether a wait is over.

    Args:
        is_over: the question.
        show: text for the error, e.g. output so far.
        can_come: False once the wait is in vain, e.g. because a process has ended.
        pause_s: seconds between two questions.

    Raises:
        AssertionError: the wait is in vain, or was not over within `PATIENCE_S`.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        is_in_vain = not can_come() or time.monotonic() > deadline_s
        if is_over():
            return
        if is_in_vain:
            raise AssertionError(f"what a test waits for does not come: {show()}")
        time.sleep(pause_s)
