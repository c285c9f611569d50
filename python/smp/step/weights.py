"""Weights of microbatches, by the quantity over which the loss of a step function is a mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.data_parallel import BatchWeights
from smp.model import DistributedModel
from smp.model.engine import Engine
from smp.step.batches import Batch
from smp.step.labels import CountedLabels, find_labels
from smp.world import runtime

_SAMPLES, _AUTO = "samples", "auto"


class WeightRule:
    """Weighs the microbatches of a step function.

    Args:
        weight: "samples", "auto", or a function of the arguments of one microbatch.
        name: name of the step function.

    Attributes:
        has_looked: whether labels were looked for, or need not be.

    Raises:
        TypeError: the weight is none of these.
    """

    def __init__(self, weight: str | Callable[..., Any], name: str) -> None:
        if not callable(weight) and weight not in (_SAMPLES, _AUTO):
            raise TypeError(
                f"weight of step function '{name}' is '{_SAMPLES}', '{_AUTO}', or a function that "
                "gets the arguments of one microbatch and returns what its loss is a mean over "
                f"(samples, tokens, class weights), got {weight!r}"
            )
        self._weight = weight
        self._name = name
        self._labels: CountedLabels | None = None
        self.has_looked = weight != _AUTO

    def look_for_labels(
        self,
        current: runtime.Runtime,
        models: Sequence[DistributedModel],
        batch: Batch,
        run_body: Callable[[], object],
    ) -> None:
        """Finds the argument with the labels that a loss counts.

        Args:
            current: the runtime.
            models: partitioned models that take part.
            batch: batch of this rank.
            run_body: runs the step function on the first microbatch.
        """
        self.has_looked = True
        self._labels = find_labels(current, models, batch, self._name, run_body)

    def weigh(
        self, current: runtime.Runtime, engines: Sequence[Engine], batches: Sequence[Batch]
    ) -> BatchWeights:
        """Returns the weights of the microbatches of the batches that this process reads.

        Raises:
            ValueError: weights are not usable, or no weight suits models that add up gradients of
                microbatches.
        """
        for engine in engines:
            if not engine.gradients.averages and torch.is_grad_enabled():
                return self._of_sums(current, engines, engine, batches)
        if callable(self._weight):
            counted = "a number of the script's own (weight)"
            found = [w for batch in batches for w in self._given(self._weight, batch)]
            return BatchWeights(current.rank, found, counted)
        labels = self._labels
        if labels is None or not all(labels.are_in(batch.bound) for batch in batches):
            samples: list[float] = []
            for batch in batches:
                samples += batch.cutting.samples_by_microbatch(batch.count)
            return BatchWeights(current.rank, samples, "samples")
        pairs = [labels.count(batch.pieces(batch.count), batch.count) for batch in batches]
        weights = [weight for own, _ in pairs for weight in own]
        total = sum(own for _, own in pairs)
        return BatchWeights(current.rank, weights, "labels that are not ignored", total)

    def _given(self, weight: Callable[..., Any], batch: Batch) -> list[float]:
        pieces = batch.pieces(batch.count)
        with torch.no_grad():
            found = [weight(*own.args, **own.kwargs) for own in map(pieces.of, range(batch.count))]
        for value in found:
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(
                    f"{_C.rank_prefix()}weight of step '{self._name}' returned a tensor of shape "
                    f"{tuple(value.shape)}; return one number for the microbatch (.sum())"
                )
        if all(isinstance(value, Tensor) for value in found):  # the host waits once
            found = torch.stack([value.reshape(()).double() for value in found]).tolist()
        numbers = [float(value) for value in found]
        bad = next((n for n in numbers if not (math.isfinite(n) and n >= 0)), None)
        if bad is not None:
            raise ValueError(
                f"{_C.rank_prefix()}weight of step '{self._name}' returned {bad:g}; return how "
                "much the microbatch counts, a finite number that is not negative"
            )
        return numbers

    def _of_sums(
        self,
        current: runtime.Runtime,
        engines: Sequence[Engine],
        summed: Engine,
        batches: Sequence[Batch],
    ) -> BatchWeights:
        """Weighs each microbatch alike if gradients of microbatches are added up."""
        if callable(self._weight):
            raise ValueError(
                f"{_C.rank_prefix()}step '{self._name}' has a weight, which is for means, and "
                f"model {summed.label} has average_grads_across_microbatches=False, which adds up "
                "the losses of microbatches; remove one of the two"
            )
        if len({engine.gradients.averages for engine in engines}) > 1:
            samples = [batch.cutting.samples_by_microbatch(batch.count) for batch in batches]
            if any(len(set(own)) > 1 for own in samples):
                raise ValueError(
                    f"{_C.rank_prefix()}the microbatches of step '{self._name}' have different "
                    "sizes, and the models disagree on average_grads_across_microbatches, so a "
                    "backward through both has no weight that suits both; wrap them alike, or use "
                    f"batches that microbatches divide ({current.wrapped.candidates})"
                )
        alike = [1.0 / batch.count for batch in batches for _ in range(batch.count)]
        return BatchWeights(current.rank, alike, "batches")
