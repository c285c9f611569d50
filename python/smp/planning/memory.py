"""Computes bytes of a rank by kind from the parts of a model that it holds.

The formulas are those of docs/memory.md and docs/design/memory.md. The peak is reached when a
forward ends, with all activations, when the backward ends, with all gradients, or in the update,
if moments come from host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from smp.modules import state_bytes
from smp.modules.state_bytes import MASTER_BYTES, moment_bytes
from smp.planning.layout import Layout
from smp.planning.stages import Content

_MOST_LEAVING = 2  # copies to the host under way, see docs/design/memory.md
_GROUP_BYTES = 64 << 20  # saved tensors that leave together


@dataclass(frozen=True)
class RankBytes:
    """Bytes of a rank where it holds most, by kind."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    buckets: float
    temporary: float
    host: float = 0

    @property
    def peak(self) -> float:
        """Returns the bytes on the device."""
        state = self.parameters + self.gradients + self.optimizer
        return state + self.activations + self.gathered + self.buckets + self.temporary


@dataclass(frozen=True)
class Weights:
    """Parameters that a rank computes with, in elements of whole tensors.

    Attributes:
        elements: all elements.
        trained: elements with gradients.
        wide: elements of 32 bits, which are their own masters.
        small: elements in tensors below `Layout.persistent`.
        near: trained elements whose moments are on the device in any layout.
        largest: elements of the largest tensor.
        units: elements of the two largest layers, without those in small tensors.
        packed_bytes: bytes of quantized weights, which have no elements here.
    """

    elements: float
    trained: float
    wide: float = 0.0
    small: float = 0.0
    near: float = 0.0
    largest: float = 0.0
    units: float = 0.0
    packed_bytes: float = 0.0


@dataclass(frozen=True)
class Activations:
    """Bytes of activations, and of what is held for the time of a few operators.

    Attributes:
        kept: bytes that the microbatches in flight keep on the device, together.
        temporary: additional bytes where a forward ends, in the backward of the loss or of one
            recomputed layer.
        late: additional bytes where a backward ends: a gradient, and a recomputed layer.
        host: bytes in host memory.
    """

    kept: float
    temporary: float = 0.0
    late: float = 0.0
    host: float = 0.0


def held_by_rank(contents: Sequence[Content], layout: Layout) -> list[RankBytes]:
    """Returns the bytes of each pipeline rank at its peak."""
    content_of = {rank: content for content in contents for rank in content.ranks}
    return [_held(content_of[rank], layout, layout.kept[rank]) for rank in range(layout.pp)]


def peak_bytes(contents: Sequence[Content], layout: Layout) -> float:
    """Returns the peak of the fullest rank."""
    return max(
        _held(content, layout, max(layout.kept[rank] for rank in content.ranks)).peak
        for content in contents
    )


def _held(content: Content, layout: Layout, kept: int) -> RankBytes:
    weights = weights_of(content, layout)
    return rank_bytes(weights, activations_of(content, weights, layout, kept), layout)


def weights_of(content: Content, layout: Layout) -> Weights:
    """Returns the parameters that a rank computes with."""
    elements = trained = wide = small = near = largest = packed_bytes = 0.0
    units: list[float] = []
    for part, count in (*content.kinds, *((part, 1) for part in content.tail)):
        unit = 0.0
        for weight in part.weights:
            own = weight.on(layout.shares)
            elements += count * own
            packed_bytes += count * weight.packed_bytes
            trained += count * own * weight.is_trained
            wide += count * own * weight.is_wide
            if own / layout.shard < state_bytes.LEAST_AWAY_ELEMENTS:
                near += count * own * weight.is_trained
            largest = max(largest, own)
            if own < layout.persistent:
                small += count * own
            else:
                unit += own
        units += [unit] * min(count, 2)
    most = sum(sorted(units, reverse=True)[:2])
    return Weights(elements, trained, wide, small, near, largest, most, packed_bytes)


def activations_of(content: Content, weights: Weights, layout: Layout, kept: int) -> Activations:
    """Returns the activations of a rank that keeps those of `kept` microbatches."""
    shares, samples, width = layout.shares, layout.computed_samples, layout.width
    bytes_kept = again = tensor = inputs = largest_input = tied = 0.0
    parts = [(part, count, kept) for part, count in content.kinds]
    # The activations of a tail are freed at once, as on the last rank.
    parts += [(part, 1, layout.kept[-1]) for part in content.tail]
    for part, count, times in parts:
        own = part.kept.on(shares)
        if layout.spreads_experts:
            own -= part.routed_kept * (shares.whole - shares.split)
        if layout.repeats(part):
            again = max(again, samples * own)
            own = min(own, part.input_bytes * shares.whole)
            largest_input = max(largest_input, samples * own)
            inputs += count
        bytes_kept += times * count * samples * own
        tensor = max(tensor, samples * part.largest_bytes * shares.split)
        tied += width * part.tied_elements * shares.split_state
    gradient = width * weights.largest
    # A tied parameter's first gradient in a backward is kept until its last one is there.
    forward_ends = max(tensor + max(tensor, gradient), again) + (kept - 1) * tied
    found = Activations(bytes_kept, forward_ends, max(gradient, again) + tied)
    if not layout.offload:
        return found
    if layout.offload == "all":
        groups = 1 + _MOST_LEAVING + layout.horizon
        near = min(bytes_kept, groups * max(_GROUP_BYTES, tensor))
        return replace(found, kept=near, host=bytes_kept - near)
    inputs *= kept * largest_input
    near = min(inputs, (_MOST_LEAVING + layout.horizon) * largest_input)
    return replace(found, kept=max(near, bytes_kept - (inputs - near)), host=inputs - near)


def rank_bytes(weights: Weights, activations: Activations, layout: Layout) -> RankBytes:
    """Returns the bytes that a rank holds at its peak."""
    size, cuts, width = layout.shard, layout.cuts_parameters, layout.width
    wide = weights.wide if width < 4 else 0.0
    masters = max(0.0, weights.trained - wide) if width < 4 else 0.0
    moments, digits = moment_bytes(layout.state_dtype), MASTER_BYTES[layout.masters]
    away = (weights.trained - weights.near) / size if layout.offloads_state else 0.0
    computed = (width * weights.elements + (4 - width) * wide) / (size if cuts else 1)
    # FP32 values of the tensors that a rank owns, and their gradients in an update.
    owned = 4 * weights.trained / size if layout.has_owners and size * layout.tp > 1 else 0.0
    gradients = 0.0 if layout.drops_gradients else 4 * weights.trained / size
    buckets = 0.0
    if size > 1 or layout.drops_gradients:
        cap = layout.bucket_bytes / (2 if layout.shards_parameters else 1)
        times = (
            1 if layout.replicas * layout.tp == 1 else 2
        )  # one is filled while another is summed
        buckets = min(times * max(cap, 4 * weights.largest), 4 * weights.trained)
    backward_ends = RankBytes(
        parameters=computed + weights.packed_bytes,
        gradients=gradients,
        optimizer=(moments * weights.trained + digits * masters) / size - moments * away + owned,
        activations=0.0,
        gathered=width * (weights.units + weights.small * (1 - 1 / size)) if cuts else 0.0,
        buckets=buckets,
        temporary=activations.late,
        host=moments * away,
    )
    forward_ends = replace(
        backward_ends,
        # The first sum of gradients allocates their shards; whole buckets stay from step to step.
        gradients=gradients if size == 1 or layout.microbatches > 1 else 0.0,
        activations=activations.kept,
        buckets=0.0 if layout.drops_gradients else buckets,
        temporary=activations.temporary,
        host=moments * away + activations.host,
    )
    pieces = min(state_bytes.SLOTS * state_bytes.PIECE_ELEMENTS, away)
    updating = replace(backward_ends, gathered=0.0, temporary=moments * pieces + owned)
    return max(forward_ends, backward_ends, updating, key=lambda found: found.peak)
