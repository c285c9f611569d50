"""The parts of `make gpu`, in the order in which they run: what comes first is needed most."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.gpu.figures import Figures


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        module: beside this one; its ``body`` measures.
        words: subject of the part.
    """

    module: str
    words: str

    def body(self) -> Callable[[Figures], None]:
        """Imports the module; returns the function that measures."""
        found: Callable[[Figures], None] = importlib.import_module(
            f"benchmarks.gpu.{self.module}"
        ).body
        return found


PARTS = {
    "build": Part("build", "Build of the extension"),
    "kernels": Part("kernels", "Operators and optimizers against references"),
    "training": Part("training", "Training, waits of the host, offload, split families"),
    "bandwidth": Part("bandwidth", "Bandwidth of operators and optimizers"),
    "attention": Part("attention", "Attention"),
    "gptj-layer": Part("gptj", "One layer of GPT-J"),
    "gptj-28": Part("gptj", "GPT-J-6B"),
    "share": Part("share", "Two ranks on one GPU"),
    "nccl": Part("nccl", "NCCL between ranks on one GPU"),
    "graph": Part("graph", "CUDA graphs"),
}


def main() -> int:
    """Prints the arguments, or all parts, one a line; fails if one is no part."""
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"PART: no part is called {unknown}; there are {' '.join(PARTS)}", file=sys.stderr)
        return 2
    print("\n".join(names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
