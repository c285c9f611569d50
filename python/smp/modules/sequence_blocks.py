"""Finds the blocks of a model that context-parallel ranks compute in parts of sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

_MARK = "is_indivisible"


def find_blocks(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules that lists and sequences of a model hold, the outermost ones."""
    found: list[tuple[str, nn.Module]] = []
    known = set[nn.Module]()

    def search(prefix: str, module: nn.Module) -> None:
        for key, child in module.named_children():
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(module, nn.ModuleList | nn.Sequential) and _is_block(child):
                if child not in known:
                    found.append((name, child))
                known.add(child)
            else:
                search(name, child)

    search("", root)
    return found


def _is_block(module: nn.Module) -> bool:
    """Returns whether a module has a forward of its own, and modules inside."""
    holders = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
    return not isinstance(module, holders) and next(module.children(), None) is not None


def mark_indivisible(block: nn.Module) -> None:
    """Marks a block so that a partition leaves it whole on one pipeline rank.

    A module inside, on another rank, would compute attention of its tokens alone.
    """
    block.__dict__[_MARK] = True


def unmark_indivisible(block: nn.Module) -> None:
    """Undoes `mark_indivisible`. May be called twice."""
    block.__dict__.pop(_MARK, None)


@contextmanager
def indivisible(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Marks blocks inside of a context; those that have a mark keep it."""
    marked = [block for block in blocks if _MARK not in block.__dict__]
    for block in marked:
        mark_indivisible(block)
    try:
        yield
    finally:
        for block in marked:
            unmark_indivisible(block)
