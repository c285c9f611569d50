"""Runs docs/quickstart.md with the installed package: for Debian packages and for wheels.

The page's scripts are written into a new folder and its commands are run there. Output that the
page shows has to be in the output of the commands. ``smp doctor`` comes first.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SOURCES))

from tests.docs.pages import blocks_of, missing_lines  # noqa: E402

PAGE = SOURCES / "docs" / "quickstart.md"
TIMEOUT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--without", action="append", default=[], help="program not to start")
    without = set(parser.parse_args().without)
    where = output_of([sys.executable, "-c", "import smp; print(smp.__file__)"]).strip()
    if SOURCES / "python" in Path(where).parents:
        sys.exit(f"smp comes from {where}, not from the package")
    output_of(["smp", "doctor"])
    printed, num_compared = "", 0
    for block in blocks_of(PAGE):
        if "not run" in block.marks:
            continue
        if "file" in block.marks:
            Path(block.marks["file"]).write_text(block.source)
            if block.marks["run"] == "1":
                printed = output_of([sys.executable, block.marks["file"]])
        elif block.language == "sh":
            printed = ""
            for command in map(str.split, block.source.splitlines()):
                if command[0] in without:
                    print(f"left out: {' '.join(command)}")
                else:
                    printed += output_of(command)
        elif "prints" in block.marks:
            missing = missing_lines(block, printed)
            if missing:
                sys.exit(f"{block.where}: {missing} are not in\n{printed}")
            num_compared += 1
    if num_compared < 2:
        sys.exit(f"{PAGE} has {num_compared} outputs to compare, of one and of two processes")
    print(f"{PAGE.name}: {num_compared} outputs are those of the page")


def output_of(command: list[str]) -> str:
    begin = time.monotonic()
    ended = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    print(f"$ {' '.join(command)}   # {time.monotonic() - begin:.0f} s\n{ended.stdout}", flush=True)
    if ended.returncode:
        sys.exit(f"{command[0]} ended with {ended.returncode}")
    return ended.stdout


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        main()
