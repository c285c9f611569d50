"""The language of random programs.

A program is a list of blocks; the last one is the root of the module tree. A block is a module with
parameters, children (other blocks; two blocks may share one) and code: a list of instructions over
*registers*. Registers hold the leaves of the arguments first; each instruction may append more.

Kinds of registers:

=====  ==========================================================
``t``  float64 tensor ``[rows, WIDTH]``
``v``  float64 tensor with a number of rows that depends on data
``i``  int64 tensor ``[rows]``, a permutation of the rows
``b``  bool tensor ``[rows, WIDTH]``
``p``  a parameter ``[WIDTH]``
``o``  ``t`` or None
``n``  None
``c``  a number or a string
=====  ==========================================================

Instructions are lists ``[name, operand, ...]``; `interpreter` has one method for each. A structure
(arguments, results) is nested: ``["r", register]``, ``["none"]``, ``["const", value]``,
``["tuple" | "list", structures]``, ``["dict", {name: structure}]``, and as results only
``["maybe", register, test, threshold]``: the register if the test register's sum is above the
threshold, else None, and ``["some", register, threshold]``: the rows whose first element is above.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

WIDTH = 4
Code = list[list[Any]]
Structure = list[Any]


@dataclass
class Block:
    """A module of a program."""

    num_inputs: int
    matrices: int = 0  # weights [WIDTH, WIDTH], each with a bias
    vectors: int = 0  # parameters [WIDTH]
    buffers: int = 0  # constants [WIDTH]
    frozen: bool = False  # parameters need no gradient
    children: list[int] = field(default_factory=list)  # indices of blocks
    tie: int | None = None  # block whose first weight is this one's first weight too
    code: Code = field(default_factory=list)
    result: Structure = field(default_factory=lambda: ["none"])


@dataclass
class Program:
    """Blocks, where they live, and how the step runs them."""

    blocks: list[Block]
    owners: list[int]  # partition of each block
    pp: int = 2
    microbatches: int = 2
    schedule: str = "interleaved"
    static: bool = False
    active: int = 0  # active_microbatches; 0: the default
    contexts: bool = False  # partition by contexts instead of set_partition
    rows: list[int] = field(default_factory=lambda: [2, 2])  # per microbatch, for each step
    weights: list[float] = field(default_factory=list)  # of output leaves in the loss
    lists: bool = False  # backward of a list of tensors instead of their sum
    seed: int = 0

    def text(self) -> str:
        """Returns the program as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_text(text: str) -> Program:
        values = json.loads(text)
        blocks = [Block(**block) for block in values.pop("blocks")]
        return Program(blocks, **values)

    def instructions(self) -> set[str]:
        """Names of the instructions in it."""
        return {line[0] for block in self.blocks for line in block.code}


def leaves_of(structure: Structure) -> list[Structure]:
    """Leaves in the order in which `interpreter.flatten` meets their values."""
    kind = structure[0]
    if kind in ("tuple", "list"):
        return [leaf for part in structure[1] for leaf in leaves_of(part)]
    if kind == "dict":
        return [leaf for part in structure[1].values() for leaf in leaves_of(part)]
    return [structure]
