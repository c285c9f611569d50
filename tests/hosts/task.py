"""Runs a function of the tests as one rank of a launcher. Usage: task.py FOLDER

FOLDER has `task.pkl` with a module, the name of a function at its top level and arguments; the
result of ``function(rank, *arguments)`` becomes `result<rank>.pkl`. The rank is the launcher's.
"""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
from pathlib import Path
from typing import Any

import smp
from smp.world.launch import read_launch


def main() -> None:
    folder = Path(sys.argv[1])
    task = pickle.loads((folder / "task.pkl").read_bytes())
    rank = read_launch(os.environ, socket.gethostname()).global_rank
    function: Any = getattr(importlib.import_module(task["module"]), task["function"])
    value = function(rank, *task["args"])
    smp.shutdown()
    (folder / f"result{rank}.pkl").write_bytes(pickle.dumps(value))


if __name__ == "__main__":
    main()
