"""Judges the losses of a batch and of its pieces, and the state that they leave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Losses are sums in different orders: a difference of up to this many last places is rounding.
_LAST_PLACES = 64
_MARGIN = 10.0
_LEAST_SHARE = 1e-3  # of a change of state that is a difference

RUN_FAILED = "a run besides the step failed"
_WRITE_BETWEEN_STEPS = (
    "Averages of weights and counts belong into the script, between steps, and statistics into "
    "evaluation mode; or train with microbatches 1"
)


@dataclass
class Found:
    """Results of the passes on one rank.

    Attributes:
        place: rank in words.
        failure: reason in words why the pass has no result; None: all ran.
        is_driver: whether losses are noted on this rank.
        num_samples: number of samples of the batch that was looked at.
        weights: weights of its pieces, 1 on average.
        whole_weights: weight of the batch as one microbatch.
        whole: values at which backward would begin, for the batch.
        pieces: values at which backward would begin, for each piece.
        slopes: whether each of these is followed by the slope of the loss in outputs of models.
        rounded: values of each piece with rounding errors in operators; None before that pass.
        eps: machine epsilon of the coarsest dtype of these values.
        draws: whether the batch and its pieces drew the same random numbers, or permuted samples.
        is_shaken_alike: whether outputs of models were moved alike.
        reasons: observations on this rank that may explain a difference.
        unseen: effects of how the batch is cut that show in no loss, in words.
        averages: whether gradients of microbatches are averaged.
    """

    place: str
    failure: str | None = None
    is_driver: bool = False
    num_samples: int = 0
    weights: list[float] = field(default_factory=lambda: [1.0, 1.0])
    whole_weights: list[float] = field(default_factory=lambda: [1.0])
    whole: Sequence[float] = ()
    pieces: Sequence[Sequence[float]] = ()
    rounded: Sequence[Sequence[float]] | None = None
    slopes: bool = False
    eps: float = 0.0
    draws: bool = True
    is_shaken_alike: bool = True
    reasons: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    averages: bool = True


class Left(NamedTuple):
    """Values of a buffer or parameter that forwards have written: before, and after the pass."""

    before: Tensor
    after: Tensor


@dataclass(frozen=True)
class Difference:
    """Loss of a batch that is not the weighted mean over its pieces.

    Attributes:
        whole, mean: loss of the batch, and weighted mean over its pieces.
        is_sum: the whole is the sum over the pieces, of which several have a loss.
        share: distance of `whole` and `mean`, relative to the largest loss.
        rounding: distance that rounding explains, relative to the same.
        is_slope: whether both are slopes of the loss.
    """

    whole: float
    mean: float
    is_sum: bool
    share: float
    rounding: float
    is_slope: bool = False


def unlike(whole: Mapping[str, Left], pieces: Mapping[str, Left]) -> list[str]:
    """Returns the names of what pieces leave with other values than the batch as one.

    Writes that a repetition does not change (``clamp_``, ``max_norm``) leave the same.
    """
    names = []
    for name in sorted(whole.keys() | pieces.keys()):
        some = whole.get(name) or pieces[name]
        one, other = (p[name].after if name in p else some.before for p in (whole, pieces))
        if some.before.shape != one.shape or one.shape != other.shape:
            names.append(name)
            continue
        distance, change = (
            float((own - one).double().abs().nan_to_num().max()) if one.numel() else 0.0
            for own in (other, some.before)
        )
        scale = float(one.double().abs().nan_to_num().max()) if one.numel() else 0.0
        rounding = _LAST_PLACES * torch.finfo(one.dtype).eps * scale
        if distance > max(rounding, _LEAST_SHARE * change):
            names.append(name)
    return names


def reason_to_run_again(found: Sequence[Found]) -> bool:
    """Returns whether the passes have no clear result, or code does not bear moved outputs."""
    is_unsound = any(one.failure or not one.is_shaken_alike or _is_odd(one) for one in found)
    return is_unsound or _are_all_zero(found)


def _are_all_zero(found: Sequence[Found]) -> bool:
    """Returns whether there are losses and all are zero, as those of pairs within one sample."""
    losses = [
        loss for one in found for own in (one.whole, *one.pieces) for loss in _values(own, one)
    ]
    return bool(losses) and not any(losses)


def difference_of(one: Found) -> Difference | None:
    """Returns the largest difference on a driver; None: rounding explains all."""
    if not one.is_driver or one.failure is not None:
        return None
    differences = [
        _compare(one, number)
        for number in range(min(map(len, (one.whole, *one.pieces)), default=0))
    ]
    known = [d for d in differences if d is not None]
    return max(known, key=lambda d: (not d.is_slope, d.share), default=None)


def _compare(one: Found, number: int) -> Difference | None:
    # A piece of weight 0 has no backward, and its mean over nothing is NaN.
    pieces = [p[number] if w else 0.0 for w, p in zip(one.weights, one.pieces, strict=True)]
    whole = one.whole[number] * one.whole_weights[0]
    total = sum(pieces)
    is_slope = one.slopes and number % 2 == 1
    if is_slope and not math.isfinite(whole + total):
        return None  # roots and norms have such slopes at zero
    if math.isfinite(whole) and not math.isfinite(total):
        # A mean over nothing: some pieces lack what the loss divides by.
        return Difference(whole, total, False, math.inf, 0.0)
    mean = sum(w * loss for w, loss in zip(one.weights, pieces, strict=True)) / len(pieces)
    scale = max(map(abs, (whole, *pieces)))
    rounding = _LAST_PLACES * one.eps * scale
    if one.rounded is not None:
        pairs = zip(one.weights, one.rounded, pieces, strict=True)
        moved = [w * abs(r[number] - loss) for w, r, loss in pairs if w]
        # Rounding errors of pieces are independent: their mean moves by less than the largest.
        rounding = max(rounding, _MARGIN * math.hypot(*moved) * 2 / len(pieces))
    is_equal = abs(whole - mean) <= rounding
    # Without averaging, the script has divided by a number, or sums in one process as well.
    is_equal |= not one.averages and abs(whole - total) <= rounding
    if is_equal or scale == 0.0:
        return None
    is_sum = abs(whole - total) <= max(1e-3 * scale, rounding)
    is_sum &= sum(loss != 0.0 for loss in pieces) > 1
    share = abs(whole - mean) / scale
    return Difference(whole, mean, is_sum, share, rounding / scale, is_slope)


def why_unknown(found: Sequence[Found]) -> str | None:
    """Returns a reason in words why there is no result; None: there is one."""
    for one in found:
        if one.failure is not None:
            return f"{RUN_FAILED} on {one.place}: {one.failure}"
    for one in found:
        if _is_odd(one):
            return "a loss is not finite"
        if len({len(losses) for losses in (one.whole, *one.pieces)}) > 1:
            return "backward begins more often for a batch than for its pieces, or less often"
    if all(not one.whole for one in found):
        return "no backward begins"
    if _are_all_zero(found):
        return "all losses are zero"
    if draws_differ(found):
        place = next(one.place for one in found if not one.draws)
        return f"random numbers on {place} are not those of samples"
    return None


def draws_differ(found: Sequence[Found]) -> bool:
    """Returns whether a difference may come from random numbers."""
    differences = [d for one in found if (d := difference_of(one)) is not None]
    # Random numbers cannot make an infinite difference.
    is_open = bool(differences) and not any(math.isinf(d.share) for d in differences)
    return is_open and not all(one.draws for one in found)


def _is_odd(one: Found) -> bool:
    """Returns whether the batch's loss is not finite, or a piece's only because of rounding."""
    is_odd = not _are_finite(one.whole, one)
    for piece, rounded in zip(one.pieces, one.rounded or (), strict=False):
        is_odd |= _are_finite(piece, one) and not _are_finite(rounded, one)
    return is_odd


def _are_finite(losses: Sequence[float], one: Found) -> bool:
    return all(map(math.isfinite, _values(losses, one)))


def _values(losses: Sequence[float], one: Found) -> Sequence[float]:
    """Returns losses without their slopes."""
    return losses[:: 1 + one.slopes]


def in_words(step: str, found: Sequence[Found], worst: Found, difference: Difference) -> str:
    """Returns the message of a difference."""
    mean = "weighted mean" if len(set(worst.weights)) > 1 else "mean"
    parts = (
        f"and {difference.mean:.6g} as the {mean} over {len(worst.pieces)} pieces "
        f"({100 * difference.share:.2g} % apart, of which rounding explains "
        f"{100 * difference.rounding:.1g} %; without dropout). "
    )
    if not math.isfinite(difference.mean):
        parts = f"and {difference.mean} in one of {len(worst.pieces)} pieces. "
    text = (
        f"the loss of step '{step}' is no mean over samples, and its batch is cut: for "
        f"{worst.num_samples} samples on {worst.place} it is {difference.whole:.6g} as one batch, "
        + parts
        + "Gradients are averaged over microbatches and replicas, so they differ from those of one "
        "process on the whole batch, often by more than the loss. "
    )
    reasons = list(dict.fromkeys(reason for one in found for reason in one.reasons))
    if difference.is_slope:
        text = (
            f"gradients of step '{step}' are no mean over samples, although its loss is, and its "
            f"batch is cut: for {worst.num_samples} samples on {worst.place} the slope of the loss "
            f"along some direction of a model's output is {difference.whole:.6g} as one batch, "
            + parts
        )
        reasons.insert(
            0,
            "a value of the batch counts as a constant (`loss / loss.detach()`, `.item()`), and "
            "pieces have other values; compute it between steps, from the batch before, or train "
            "with microbatches 1",
        )
    if difference.is_sum:
        reasons.insert(
            0,
            "the loss is a sum over samples, so that gradients are as many times too small as "
            "there are microbatches and replicas; divide it by a number that does not depend on "
            "the batch, or take the mean",
        )
    if not reasons:
        reasons = [
            "the loss divides by something that it counts in the batch (tokens, class weights, "
            "positives; give that count as a weight: @smp.step(weight=...)), or compares samples "
            "of the batch with each other (train with microbatches 1, and gather what is compared "
            "over replicas)"
        ]
    return (
        text
        + "Likely reasons: "
        + "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, start=1))
    )


def unseen_in_words(step: str, found: Sequence[Found]) -> str | None:
    """Returns the message of differences that show in no loss; None: there are none."""
    unseen = list(dict.fromkeys(text for one in found for text in one.unseen))
    if not unseen:
        return None
    return (
        f"the batch of step '{step}' is cut, and one process trains otherwise on the whole batch, "
        f"although the loss is the same: {'; '.join(unseen)}"
    )


def unlike_in_words(names: Sequence[str], num_microbatches: int) -> str:
    """Returns the words for state that has other values behind pieces than behind the batch."""
    return (
        f"forwards write {_listed(names)}, once in each of the {num_microbatches} microbatches, "
        "and leave other values than one forward of the batch. " + _WRITE_BETWEEN_STEPS
    )


def counting_in_words(names: Sequence[str]) -> str:
    """Returns the words for embeddings that divide gradients by frequencies."""
    return (
        f"{_listed(names)} divides gradients by how often an index occurs "
        "(scale_grad_by_freq=True), which is counted in each microbatch and replica by itself"
    )


# ---- reasons that a rank sees ----------------------------------------------------------


def reason_of_labels(names: Sequence[str]) -> str:
    """Returns the reason for integer arguments with negative entries."""
    return (
        f"argument {_listed(names)} has negative entries, as labels have at positions that the "
        "loss ignores, and pieces have other numbers of these; count the others: "
        "@smp.step(weight=lambda ...: (labels != -100).sum())"
    )


def reason_of_writes(names: Sequence[str]) -> str:
    """Returns the reason for forwards that write buffers or parameters."""
    return (
        f"forwards write {_listed(names)}, as statistics over the batch are (BatchNorm, "
        "codebooks, running quantiles) or averages of weights, once for each piece: use a norm "
        "over each sample (GroupNorm, LayerNorm), put these modules into evaluation mode, average "
        "weights between steps, or train with microbatches 1"
    )


REASON_OF_PERMUTATION = (
    "the step permutes the samples of its batch (torch.randperm, as mixup does), and pairs come "
    "from one piece then: make the pairs in front of the step function"
)


def reason_of_dims(module: str, shapes: dict[str, Any]) -> str:
    """Returns the reason for modules that take samples along dim 1."""
    listed = ", ".join(f"'{name}' {list(shape)}" for name, shape in shapes.items())
    return (
        f"module '{module}' has batch_first=False, and the step cuts dim 0 of {listed}; where dim "
        "0 has no samples, name the dim that has them in @smp.step(input_split_axes={...})"
    )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
