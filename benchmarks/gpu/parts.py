"""The parts of `make gpu`, in the order in which they run: what comes first is needed most."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

from benchmarks.gpu.rows import Row


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        module: beside this one; its ``rows(part, is_dry)`` are measured.
        words: subject of the part.
    """

    module: str
    words: str

    def rows(self, is_dry: bool) -> list[Row]:
        """Imports the module; returns what it measures, in order."""
        [name] = [name for name, part in PARTS.items() if part is self]
        module = importlib.import_module(f"benchmarks.gpu.{self.module}")
        found: list[Row] = module.rows(name, is_dry)
        return found


PARTS = {
    "build": Part("build", "Build of the extension"),
    "kernels": Part("kernels", "Operators and optimizers against references"),
    "training": Part("training", "Training, waits of the host, offload, split families"),
    "bandwidth": Part("bandwidth", "Bandwidth of operators and optimizers"),
    "attention": Part("attention", "Attention"),
    "attention-order": Part("attention_order", "Backends of attention by shape"),
    "gptj-layer": Part("gptj", "One layer of GPT-J-6B, with a vocabulary of 512"),
    "gptj-steps": Part("gptj", "Whole steps with as many layers of GPT-J-6B as fit"),
    "share": Part("share", "Two ranks on one GPU"),
    "nccl": Part("nccl", "NCCL between ranks on one GPU"),
    "graph": Part("graph", "CUDA graphs"),
    "sanitizer": Part("sanitizer", "Operators and optimizers under compute-sanitizer"),
}


#: Parts of each call on a machine that is lent for half an hour in all. Each builds first: the
#: machine of a later call may be another one. `scripts/gpu.sh` has the limit of a call.
CALLS = (
    ("kernels", "training"),
    ("bandwidth", "attention", "attention-order"),
    ("gptj-layer", "gptj-steps"),
    ("share", "nccl", "graph", "sanitizer"),
)


def named(arguments: list[str]) -> list[str]:
    """Returns the parts that arguments name: ``--call 2``, some parts, or nothing for all.

    Raises:
        ValueError: there is no such call.
    """
    if arguments[:1] != ["--call"]:
        return arguments or list(PARTS)
    numbers = [str(number) for number in range(1, len(CALLS) + 1)]
    if len(arguments) != 2 or arguments[1] not in numbers:
        raise ValueError(f"CALL: expected one of {' '.join(numbers)}, got {arguments[1:]}")
    return list(CALLS[int(arguments[1]) - 1])


def main() -> int:
    """Prints the parts that the arguments name, one a line; fails if one is no part."""
    try:
        names = named(sys.argv[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"PART: no part is called {unknown}; there are {' '.join(PARTS)}", file=sys.stderr)
        return 2
    print("\n".join(names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
