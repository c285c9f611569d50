"""``python -m benchmarks.gpu.ended <part> <status>``: writes down that a part was killed."""

from __future__ import annotations

from benchmarks.gpu.device import Named
from benchmarks.gpu.figures import note_end, parser

if __name__ == "__main__":
    arguments_of = parser(__doc__)
    arguments_of.add_argument("part")
    arguments_of.add_argument("status", type=int)
    arguments = arguments_of.parse_args()
    note_end(arguments.part, arguments.out, Named(arguments.device), arguments.status)
