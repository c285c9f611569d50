"""Import paths of processes that tests start: the checkout's smp, or the installed one.

`SMP_TEST_INSTALLED=1` asks for the installed one: of Debian's package, or of a wheel.
"""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent


def python_path(*more: Path | str) -> str:
    """PYTHONPATH of such a process: the checkout's smp, unless the installed one is asked for.

    Args:
        more: further folders, looked at afterwards; empty ones are left out.
    """
    own = [] if os.environ.get("SMP_TEST_INSTALLED") else [REPO / "python"]
    return os.pathsep.join(str(path) for path in (*own, *more) if str(path))
