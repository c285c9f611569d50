"""Forms of a trainer's batch that `smp.step` cuts by samples.

Most batches have a row for each sample and stay as they are. Two of them do not:

* Preference pairs: all chosen sequences, and then all rejected ones. They become rows of pairs.
* Sequences without padding: one row, in which the positions begin again with each sequence. It
  becomes a list of pieces with about as many tokens each, cut between two sequences.

All functions here are pure. `to_cut` changes the form, and `restored` changes it back for a
microbatch.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import smp._C as _C

#: names under which the changed forms are in a batch
PAIRS, PIECES = "smp_pairs", "smp_pieces"

_POSITIONS = "position_ids"
# Entries that a collator derives from the positions; they are derived again for each piece.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
_LENGTHS = ("max_length_q", "max_length_k")
_NUMBERS = "seq_idx"


def to_cut(
    inputs: Mapping[str, Any], microbatches: int, *, has_pairs: bool, image_token: int | None = None
) -> dict[str, Any]:
    """Returns the form of a batch that is cut by samples.

    Args:
        inputs: batch of a collator.
        microbatches: number of microbatches.
        has_pairs: whether rows are chosen and then rejected sequences.
        image_token: number of the token in whose place the model puts images; None: it has none.

    Raises:
        ValueError: a row without padding has an entry that cannot be cut, or samples have images in
            different numbers.
    """
    if has_pairs:
        return {PAIRS: _paired(inputs)}
    if is_flat(inputs):
        return {PIECES: _pieces(inputs, microbatches)}
    if image_token is not None and microbatches > 1:
        _check_images(inputs, microbatches, image_token)
    return dict(inputs)


def _check_images(inputs: Mapping[str, Any], microbatches: int, image_token: int) -> None:
    ids = inputs.get("input_ids")
    if inputs.get("pixel_values") is None or not isinstance(ids, Tensor):
        return
    counts = (ids == image_token).sum(1).tolist()
    if len(set(counts)) > 1:
        raise ValueError(
            f"{_C.rank_prefix()}pixel_values cannot be cut into {microbatches} microbatches: the "
            f"samples of the batch have {counts} image tokens; expected as many in each. Set "
            "microbatches to 1 in smp.init, or make batches of samples with as many images"
        )


def restored(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the batch of a microbatch in the form of the collator."""
    if PAIRS in inputs:
        pairs: dict[str, Any] = inputs[PAIRS]
        return {
            name: torch.cat([value[:, 0], value[:, 1]]) if name not in _PER_PAIR else value
            for name, value in pairs.items()
        }
    if PIECES in inputs:
        return _joined(inputs[PIECES])
    return dict(inputs)


def joined_outputs(outputs: Sequence[Tensor], cut: Mapping[str, Any]) -> Tensor:
    """Returns outputs of a batch from those of its microbatches.

    Args:
        outputs: outputs of the microbatches.
        cut: batch in the form that is cut.
    """
    if PAIRS in cut:
        halves = [output.chunk(2) for output in outputs]
        return torch.cat([half[side] for side in (0, 1) for half in halves])
    if outputs[0].dim() == 0:
        return torch.stack(list(outputs))
    return torch.cat(list(outputs), dim=1 if PIECES in cut else 0)


def num_samples(inputs: Mapping[str, Any]) -> int:
    """Returns the number of samples of a batch or microbatch in either form.

    Pieces without padding count their tokens.
    """
    if PIECES in inputs:
        return sum(piece[_POSITIONS].shape[1] for piece in inputs[PIECES])
    if is_flat(inputs):
        return int(inputs[_POSITIONS].shape[1])
    leaves = (leaf for value in inputs.values() for leaf in pytree.tree_leaves(value))
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)


def is_flat(inputs: Mapping[str, Any]) -> bool:
    """Returns whether a batch is one row of several sequences without padding."""
    positions = inputs.get(_POSITIONS)
    return (
        isinstance(positions, Tensor)
        and positions.dim() == 2
        and positions.shape[0] == 1
        and inputs.get("attention_mask") is None
    )


# ---- pairs

#: entries with a number for each pair
_PER_PAIR = frozenset({"ref_chosen_logps", "ref_rejected_logps"})


def _paired(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: torch.stack(value.chunk(2), dim=1) if name not in _PER_PAIR else value
        for name, value in inputs.items()
    }


# ---- one row of sequences


def cuts_of(starts: Sequence[int], num_tokens: int, count: int) -> list[int]:
    """Returns where a row of sequences is cut so that its pieces have about as many tokens.

    Args:
        starts: first token of each sequence, in ascending order; the first one is 0.
        num_tokens: number of tokens of the row.
        count: number of pieces that are wanted.

    Returns:
        first token of each piece, and ``num_tokens``. There are as many pieces as are wanted, or
        one for each sequence if there are fewer sequences.
    """
    count = min(count, len(starts))
    chosen = [0]
    for piece in range(1, count):
        wanted = num_tokens * piece / count
        found = bisect.bisect_left(starts, wanted)
        if found == len(starts) or (
            found > 0 and wanted - starts[found - 1] <= starts[found] - wanted
        ):
            found -= 1
        # Each piece has a sequence, and so have those that follow.
        chosen.append(min(max(found, chosen[-1] + 1), len(starts) - (count - piece)))
    return [starts[number] for number in chosen] + [num_tokens]


def _pieces(inputs: Mapping[str, Any], microbatches: int) -> list[dict[str, Any]]:
    positions = inputs[_POSITIONS]
    num_tokens = int(positions.shape[1])
    derived = {*_BOUNDARIES, *_LENGTHS, _NUMBERS}
    rows = {name: value for name, value in inputs.items() if name not in derived}
    for name, value in rows.items():
        if not (isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens)):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{_C.rank_prefix()}a batch without padding is one row of {num_tokens} tokens, "
                f"but its '{name}' is {shape}; microbatches cannot have parts of it. Use "
                "padding_free=False, or leave the entry out in the collator"
            )
    starts = (positions[0] == 0).nonzero().flatten().tolist()
    if not starts or starts[0] != 0:
        raise ValueError(
            f"{_C.rank_prefix()}the positions of a batch without padding begin with 0 in each "
            f"sequence, got {positions[0, :8].tolist()}..."
        )
    edges = cuts_of(starts, num_tokens, microbatches)
    asked = {name: None for name in inputs if name in derived}
    return [
        {name: value[:, begin:end] for name, value in rows.items()} | asked
        for begin, end in zip(edges, edges[1:], strict=False)
    ]


def _joined(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joins pieces to a row, and derives again what a collator derives from the positions."""
    row = {
        name: torch.cat([piece[name] for piece in pieces], dim=1)
        for name, value in pieces[0].items()
        if value is not None
    }
    positions = row[_POSITIONS]
    begins = positions[0] == 0
    edges = torch.cat([begins.nonzero().flatten(), begins.new_full((1,), 0).long()])
    edges[-1] = positions.shape[1]
    derived: dict[str, Any] = {_NUMBERS: (begins.cumsum(0) - 1).to(torch.int32)[None]}
    derived |= dict.fromkeys(_BOUNDARIES, edges.to(torch.int32))
    if any(name in pieces[0] for name in _LENGTHS):
        derived |= dict.fromkeys(_LENGTHS, int(edges.diff().max()))
    return row | {name: value for name, value in derived.items() if name in pieces[0]}
