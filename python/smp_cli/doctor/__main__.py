"""Runs a probe: ``python -m smp_cli.doctor <module:function> <file descriptor of the answer>``."""

from __future__ import annotations

import json
import os
import sys

from smp_cli.doctor.probes import Probe


def main() -> None:
    """Runs the probe and writes its section as JSON."""
    function, descriptor = sys.argv[1:]
    section = Probe("", function, 0).load()()
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as answer:
        json.dump(section.to_json(), answer)


if __name__ == "__main__":
    main()
