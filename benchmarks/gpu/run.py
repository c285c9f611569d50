"""``python -m benchmarks.gpu.run <part>``: runs a part; the status is 1 if something failed."""

from __future__ import annotations

import sys
import time

from benchmarks.gpu.device import Device
from benchmarks.gpu.figures import Figures, parser
from benchmarks.gpu.parts import PARTS


def main() -> int:
    arguments_of = parser(__doc__)
    arguments_of.add_argument("part", choices=list(PARTS))
    arguments = arguments_of.parse_args()
    part = arguments.part
    figures = Figures(part, arguments.out, Device(arguments.device), arguments.limit_s)
    begin = time.monotonic()
    with figures.measuring(part):
        PARTS[part].body()(figures)
    figures.add("seconds of the part", time.monotonic() - begin, "s")
    if figures.num_failed:
        print(f"FAILED {part}: {figures.num_failed} of its figures", file=sys.stderr, flush=True)
    return 1 if figures.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
