"""Adam's moments in host memory: an update in pieces, whose moments are on the device meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from smp._device import device_module, is_accelerator
from smp.modules.state_bytes import BLOCK, SLOTS
from smp.optim.fused import Batch

_SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
_AWAY = ("exp_avg", "exp_avg_sq", *_SCALES)  # entries of a state that are in host memory
_ALIGNMENT = 256  # bytes


def zeros_on_host(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns zeros in host memory, in the memory order of a tensor.

    The memory is page-locked if the tensor is on an accelerator, as copies beside compute need it.
    """
    form = torch.empty_like(like.detach(), device="meta", memory_format=torch.preserve_format)
    return torch.empty_strided(
        form.shape, form.stride(), dtype=dtype, device="cpu",
        pin_memory=is_accelerator(like.device),
    ).zero_()  # fmt: skip


def cut_into_pieces(batch: Batch, most_elements: int) -> list[Batch]:
    """Returns the parameters of a batch as flat parts, in batches of a limited size.

    Parts of one parameter meet between blocks of 8-bit moments. All but the last one count the
    update in a copy of its step.

    Args:
        batch: parameters whose tensors are dense.
        most_elements: most elements of a result, at least `BLOCK`.
    """
    pieces: list[Batch] = []
    room = 0
    for index, param in enumerate(batch.params):
        offset, begin, numel = batch.begins[index] % BLOCK, 0, param.numel()
        while begin < numel or not numel:
            end = min(numel, begin + room)
            if end < numel:
                end -= (offset + end) % BLOCK
            if not pieces or (end <= begin and numel):
                pieces.append(Batch(batch.group, batch.device))
                room = most_elements
                continue
            _add_part(pieces[-1], batch, index, begin, end)
            room -= end - begin
            begin = end
            if not numel:
                break
    return pieces


def _add_part(piece: Batch, batch: Batch, index: int, begin: int, end: int) -> None:
    """Adds elements [begin, end) of a parameter and of its other tensors, as views."""
    offset = batch.begins[index] % BLOCK
    blocks = slice((offset + begin) // BLOCK, -(-(offset + end) // BLOCK))
    state = {
        name: value[blocks] if name in _SCALES else _flat(value)[begin:end]
        for name, value in batch.states[index].items()
        if name != "step"
    }
    step = batch.steps[index]
    piece.params.append(_flat(batch.params[index])[begin:end])
    piece.grads.append(_flat(batch.grads[index])[begin:end])
    piece.steps.append(step if end == batch.params[index].numel() else step.clone())
    piece.states.append(state)
    piece.positions.append(batch.positions[index])
    piece.begins.append(batch.begins[index] + begin)
    if batch.copies:
        piece.copies.append(_flat(batch.copies[index])[begin:end])


def _flat(dense: Tensor) -> Tensor:
    """Returns the elements of a tensor in the order in which they lie in memory."""
    return dense.as_strided((dense.numel(),), (1,))


class MomentSlots:
    """Copies the moments of pieces to a device and back, beside updates.

    On the CPU, copies are made all the same, one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._come: Any = None
        self._leave: Any = None
        if is_accelerator(device):
            module = device_module(device)
            self._come, self._leave = module.Stream(device), module.Stream(device)

    def update(self, pieces: Sequence[Batch], run: Callable[[Batch], None]) -> None:
        """Runs an update of each piece, and waits on the host until all moments are back.

        Args:
            pieces: results of :func:`cut_into_pieces`; their moments are in host memory.
            run: queues the update of a piece, whose moments are on the device, on the current
                stream.
        """
        size = max((sum(_padded(host) for host in _away(piece)) for piece in pieces), default=0)
        slots = [
            torch.empty(size, dtype=torch.uint8, device=self._device)
            for _ in range(min(SLOTS, len(pieces)))
        ]
        current = device_module(self._device).current_stream(self._device) if self._come else None
        _wait(self._come, _mark(current))  # the memory of the slots may have been in use there
        coming: list[tuple[list[Tensor], Any]] = []
        left: list[Any] = []
        try:
            for index, piece in enumerate(pieces):
                while len(coming) < min(index + SLOTS - 1, len(pieces)):
                    place = len(coming)
                    if place >= SLOTS:
                        _wait(self._come, left[place - SLOTS])
                    coming.append(self._load(pieces[place], slots[place % SLOTS]))
                moments, loaded = coming[index]
                _wait(current, loaded)
                run(_with_moments(piece, moments))
                _wait(self._leave, _mark(current))
                with self._on(self._leave):
                    for host, value in zip(_away(piece), moments, strict=True):
                        host.copy_(value, non_blocking=True)
                left.append(_mark(self._leave))
        finally:
            # The state is read on the host, and slots are freed without a stream.
            for stream in (self._come, current, self._leave):
                if stream is not None:
                    stream.synchronize()

    def _load(self, piece: Batch, slot: Tensor) -> tuple[list[Tensor], Any]:
        """Begins to copy the moments of a piece into a slot.

        Returns:
            the moments there, and the end of the copies.
        """
        moments, begin = [], 0
        with self._on(self._come):
            for host in _away(piece):
                part = slot[begin : begin + host.nbytes].view(host.dtype)
                moments.append(part.copy_(host, non_blocking=True))
                begin += _padded(host)
        return moments, _mark(self._come)

    def _on(self, stream: Any) -> Any:
        return device_module(self._device).stream(stream) if stream is not None else nullcontext()


def _away(piece: Batch) -> Iterator[Tensor]:
    """Returns the tensors of a piece that are in host memory."""
    for state in piece.states:
        for name in _AWAY:
            if name in state:
                yield state[name]


def _with_moments(piece: Batch, moments: Sequence[Tensor]) -> Batch:
    """Returns a piece with the tensors of :func:`_away` replaced."""
    given = iter(moments)
    states = [
        {**state, **{name: next(given) for name in _AWAY if name in state}}
        for state in piece.states
    ]
    return Batch(
        piece.group, piece.device, piece.params, piece.grads,
        [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states],
        piece.steps, states, piece.copies, piece.positions, piece.begins,
    )  # fmt: skip


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _mark(stream: Any) -> Any:
    """Returns an event at the end of a stream's work so far; None without a stream."""
    return stream.record_event() if stream is not None else None


def _wait(stream: Any, mark: Any) -> None:
    """Lets later work of a stream wait for an event."""
    if stream is not None:
        stream.wait_event(mark)
