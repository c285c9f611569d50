"""Runs a function that ``smp.launch`` has written to a file.

Usage: ``python -m smp.launching.rank FILE``.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path


def main() -> None:
    """Reads the function with its arguments, and runs it."""
    content = Path(sys.argv[1]).read_bytes()
    # The paths come first in the file, because the function may need modules that lie there.
    sys.path[:], function, args = pickle.loads(content)
    function(*args)


if __name__ == "__main__":
    main()
