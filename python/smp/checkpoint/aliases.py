"""Finds tensors that share memory, so that a file holds each element once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Run:
    """Elements written as one storage: ``numel`` of ``base``'s storage from ``begin`` on.

    ``begin`` is None where ``base`` is written alone, whatever its strides.
    """

    base: torch.Tensor
    begin: int | None
    numel: int


@dataclass(frozen=True)
class View:
    """A tensor that consists of elements of a run."""

    run_idx: int
    offset: int


def find_views(tensors: Sequence[torch.Tensor]) -> tuple[list[Run], list[View]]:
    """Returns runs in the order in which they are needed, and each tensor as part of one.

    Contiguous tensors that overlap in one storage are one run. Tensors that merely lie side by side
    are not, because a process that loads one would hold both. Each other tensor is a run of its
    own.
    """
    by_storage: dict[tuple[torch.device, int, torch.dtype], list[int]] = {}
    run_of: dict[int, int] = {}  # index of the tensor whose number names the run
    bounds: dict[int, tuple[int, int]] = {}
    for i, tensor in enumerate(tensors):
        run_of[i] = i
        if tensor.numel() and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            key = (tensor.device, tensor.untyped_storage()._cdata, tensor.dtype)
            by_storage.setdefault(key, []).append(i)
    for members in by_storage.values():
        _join_overlapping(tensors, members, run_of, bounds)
    runs: list[Run] = []
    idx_of: dict[int, int] = {}
    views = []
    for i, tensor in enumerate(tensors):
        name = run_of[i]
        if name not in idx_of:
            idx_of[name] = len(runs)
            begin, end = bounds.get(name, (None, 0))
            numel = tensor.numel() if begin is None else end - begin
            runs.append(Run(tensor, begin, numel))
        begin = runs[idx_of[name]].begin
        views.append(
            View(idx_of[name], 0 if begin is None else int(tensor.storage_offset()) - begin)
        )
    return runs, views


def _join_overlapping(
    tensors: Sequence[torch.Tensor],
    members: list[int],
    run_of: dict[int, int],
    bounds: dict[int, tuple[int, int]],
) -> None:
    members.sort(key=lambda i: tensors[i].storage_offset())
    name = -1
    for i in members:
        begin = int(tensors[i].storage_offset())
        end = begin + tensors[i].numel()
        if name >= 0 and begin < bounds[name][1]:
            bounds[name] = (bounds[name][0], max(end, bounds[name][1]))
        else:
            name = i
            bounds[name] = (begin, end)
        run_of[i] = name
