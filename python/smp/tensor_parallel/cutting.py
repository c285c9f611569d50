"""Cuts parts out of whole tensors, and puts them together again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from smp.tensor_parallel.parts import Part
from smp.tensor_parallel.sharding import interval_of


def part_of(tensor: Tensor, begin: int = 0, numel: int | None = None) -> Part:
    """Returns elements of this tensor-parallel rank's slice of a parameter as part of the whole.

    Args:
        tensor: parameter of the model, or a buffer.
        begin, numel: range of the flattened slice; all of it if not given.
    """
    size = tensor.numel() if numel is None else numel
    return Part.of_slice(tensor.shape, interval_of(tensor), begin, size)


def slice_of(whole: Tensor, part: Part) -> Tensor:
    """Returns the slice that has a part, as a view of the whole tensor.

    Args:
        whole: contiguous tensor.
        part: a part of it.
    """
    seen = whole if part.view is None else whole.view(part.view)
    if part.dim == -1:
        return seen.reshape(-1).narrow(0, part.begin, part.end - part.begin)
    return seen.narrow(part.dim, part.begin, part.end - part.begin)


def cut(whole: Tensor, part: Part) -> Tensor:
    """Returns the elements of a part, flat; a view if they are contiguous."""
    return slice_of(whole, part).reshape(-1).narrow(0, part.flat_begin, part.flat_numel)


def join(pieces: Sequence[tuple[Tensor, Part]], shape: Sequence[int]) -> Tensor:
    """Joins all parts of a tensor into a new one.

    Args:
        pieces: elements, of any sizes and devices, and the parts that they are; in any order. If
            several pieces have an element, the first counts; all slices are of one dim.
        shape: shape of the whole tensor.

    Returns:
        the tensor, on the device of the first piece.

    Raises:
        ValueError: elements are missing.
    """
    device = pieces[0][0].device
    # A rank may hold nothing of a tensor, for example of another rank's experts.
    pieces = [piece for piece in pieces if piece[1].flat_numel] or pieces
    first = pieces[0][1]
    view = shape if first.view is None else first.view
    in_order = sorted(pieces, key=lambda piece: (piece[1].begin, piece[1].flat_begin))
    joined: list[Tensor] = []
    held: list[str] = []
    end = 0
    for begin, group in itertools.groupby(in_order, lambda piece: piece[1].begin):
        same = list(group)
        part = same[0][1]
        held.append(f"[{begin}, {part.end})")
        if begin == end:
            end = part.end
            elements = [tensor.to(device) for tensor in _in_a_row(same, part.sizes_of_slice(view))]
            if first.dim == -1:
                joined += elements
            else:
                slice_ = elements[0] if len(elements) == 1 else torch.cat(elements)
                joined.append(slice_.view(part.sizes_of_slice(view)))
    if end != first.extent:
        raise ValueError(
            f"is split along dim {first.dim} of size {first.extent}, but only "
            f"{', '.join(held)} are there"
        )
    return torch.cat(joined, max(first.dim, 0)).view(tuple(shape))


def _in_a_row(pieces: Sequence[tuple[Tensor, Part]], sizes: Sequence[int]) -> list[Tensor]:
    """Returns flat tensors that make up a slice, from its pieces in the order of their begins."""
    elements: list[Tensor] = []
    end = 0
    for tensor, part in pieces:
        if part.flat_begin == end and (part.flat_numel or not elements):
            elements.append(tensor.reshape(-1))
            end += part.flat_numel
    if end != math.prod(sizes):
        raise ValueError(f"with sizes {list(sizes)} has {end} elements without a gap")
    return elements
