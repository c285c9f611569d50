"""Fuzzes the decoders in Python: ``python -m tests.fuzz --runs 1000000``."""

from __future__ import annotations

import argparse
import time

from tests.fuzz.decoders import decoders
from tests.fuzz.run import run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs of each decoder")
    parser.add_argument("--seed", type=int, default=1, help="other inputs")
    given = parser.parse_args()
    for name, decoder in decoders().items():
        started_s = time.monotonic()
        count = run(name, decoder, given.runs, given.seed)
        print(
            f"{name}: {given.runs} inputs in {time.monotonic() - started_s:.0f} s, "
            f"{count.num_refused} refused",
            flush=True,
        )


if __name__ == "__main__":
    main()
