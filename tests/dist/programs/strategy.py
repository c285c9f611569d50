"""Random programs for hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.dist.programs.builder import BlockBuilder
from tests.dist.programs.effects import Summary
from tests.dist.programs.language import Block, Program, leaves_of

MAX_DEPTH = 4  # of blocks below the root
WEIGHTS = (1.0, 0.0, -0.6, 0.3)
Integer = Callable[[int, int], int]
"""Draws an integer between two bounds, both included; smaller ones are simpler."""


@st.composite
def bundles(
    draw: Callable[..., int],
    size: int,
    fine: bool = False,
    surprises: bool = False,
    dropout: bool = False,
) -> list[Program]:
    """Draws programs that run with the same settings; plain autograd accepts all but a few of them.

    Args:
        size: number of programs, which can be parts of one model.
        fine: hypothesis draws every decision, so that it can make a failing program smaller. Else
            it draws one seed: it repeats parts of earlier examples, seeds do not.
        surprises: whether results of modules may depend on the data in presence and shape.
        dropout: whether programs draw random numbers.
    """

    def drawn(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    integer = drawn if fine else random.Random(drawn(0, 2**62)).randint
    settings: dict[str, Any] = {
        "pp": (2, 2, 3, 4)[integer(0, 3)],
        "microbatches": integer(1, 4),
        "schedule": ("interleaved", "simple")[integer(0, 1)],
        "static": integer(0, 1) == 1,
        "active": integer(0, 3),
    }
    return [_program(integer, settings, surprises, dropout) for _ in range(size)]


def _program(integer: Integer, settings: dict[str, Any], surprises: bool, dropout: bool) -> Program:
    blocks: list[Block] = []
    summaries: list[Summary] = []
    uncalled: list[int] = []
    num_blocks = integer(1, 6)
    for index in range(num_blocks + 1):
        is_root = index == num_blocks
        limit = MAX_DEPTH if is_root else MAX_DEPTH - 1
        able = [i for i in range(index) if summaries[i].depth <= limit]
        if is_root:
            kids = sorted({*uncalled, *(i for i in able if integer(0, 3) == 3)})
        else:
            kids = [i for i in able if integer(0, 2) == 2]
        children = [(i, summaries[i]) for i in kids]
        builder = BlockBuilder(integer, children, is_root, surprises, dropout)
        summaries.append(builder.build(integer(2, 7)))
        blocks.append(builder.block)
        uncalled = [i for i in (*uncalled, index) if i not in kids]
        if not is_root:
            _decorate(builder.block, blocks, integer)
    num_leaves = len(leaves_of(blocks[-1].result))
    return Program(
        blocks,
        _owners(blocks, settings["pp"], integer),
        **settings,
        contexts=integer(0, 1) == 1,
        rows=[integer(1, 3) for _ in range(2)],
        weights=[1.0] + [WEIGHTS[integer(0, 3)] for _ in range(num_leaves - 1)],
        lists=integer(0, 3) == 3,
        seed=integer(0, 3),
    )


def _decorate(block: Block, blocks: list[Block], integer: Integer) -> None:
    block.frozen = integer(0, 7) == 7
    others = [i for i, other in enumerate(blocks[:-1]) if other.matrices]
    if block.matrices and others and integer(0, 4) == 4:
        block.tie = others[integer(0, len(others) - 1)]


def _owners(blocks: list[Block], pp: int, integer: Integer) -> list[int]:
    """Random, but blocks that share a parameter stay together; the root is on the first rank."""
    owners: list[int] = []
    for block in blocks[:-1]:
        owners.append(integer(0, pp - 1) if block.tie is None else owners[block.tie])
    return [*owners, 0]
