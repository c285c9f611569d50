"""The loss of a chunk of tokens whose logits exist for a moment, and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smp.tensor_parallel import regions


@dataclass(frozen=True)
class Statistics:
    """Numbers per token of a chunk, of whole rows of logits.

    Attributes:
        maxima: largest logit.
        exp_sums: sum of exponentials, relative to the maximum as the following.
        target_logits: logit of the target.
        sums: sum of all logits, weighted if classes are; None where no loss needs it.
    """

    maxima: Tensor
    exp_sums: Tensor
    target_logits: Tensor
    sums: Tensor | None


@dataclass(frozen=True)
class ChunkLoss:
    """The loss of a batch's tokens, without the operands of its logits.

    Attributes:
        targets: int64 ``[tokens]``.
        counted: whether a token counts.
        ignore_index: target of tokens that do not count.
        smoothing: amount of label smoothing.
        z_loss: factor of the squared logarithm of the sum of exponentials.
        class_weights: ``[whole vocabulary]``, in the dtype of the computation.
        begin: first entry of this rank.
        vocab_size: entries of all ranks.
        is_split: ranks have parts of the vocabulary.
        chunk_tokens: most tokens of a chunk.
    """

    targets: Tensor
    counted: Tensor
    ignore_index: int
    smoothing: float
    z_loss: float
    class_weights: Tensor | None
    begin: int
    vocab_size: int
    is_split: bool
    chunk_tokens: int

    def chunks(self) -> Iterator[slice]:
        """Yields the ranges of tokens that are computed at a time."""
        num = self.targets.shape[0]
        for begin in range(0, num, self.chunk_tokens):
            yield slice(begin, min(begin + self.chunk_tokens, num))

    @property
    def num_chunks(self) -> int:
        return -(-self.targets.shape[0] // self.chunk_tokens)

    def label_weights(self, targets: Tensor) -> Tensor:
        """Returns the class weights of targets; any number where a target does not count."""
        assert self.class_weights is not None
        return self.class_weights[targets.clamp(0, self.vocab_size - 1)]

    def nan_if_nothing_counts(self) -> Tensor:
        """Returns 0, or NaN if no token counts."""
        return torch.where(self.counted.any(), 0.0, float("nan"))

    @property
    def needs_exact_logits(self) -> bool:
        """Returns whether gradients are computed without the kernel, in the compute dtype."""
        return self.class_weights is not None and (self.smoothing > 0 or self.z_loss > 0)

    @property
    def weighs_all_logits(self) -> bool:
        """Returns whether a token's loss has each of its logits with the weight of its class."""
        return self.class_weights is not None and self.smoothing > 0

    def own_weights(self, logits: Tensor) -> Tensor:
        """Returns the class weights of this rank's entries."""
        assert self.class_weights is not None
        return self.class_weights[self.begin : self.begin + logits.shape[1]]

    def statistics(self, logits: Tensor, targets: Tensor) -> Statistics:
        """Reduces a chunk's logits ``[tokens, own entries]`` to numbers per token. Collective."""
        rows = torch.ops.smp.cross_entropy_statistics.default(
            logits,
            targets,
            self.begin,
            self.vocab_size,
            self.ignore_index,
            self.smoothing > 0 and not self.weighs_all_logits,
        )
        maxima, exp_sums, target_logits = rows[:3]
        sums = rows[3] if rows.shape[0] == 4 else None
        if self.weighs_all_logits:
            weights = self.own_weights(logits)
            sums = logits.to(weights.dtype).mv(weights) - maxima * weights.sum()
        if not self.is_split:
            return Statistics(maxima, exp_sums, target_logits, sums)
        is_here = (targets >= self.begin) & (targets < self.begin + logits.shape[1])
        own = [maxima, exp_sums, target_logits, is_here.to(maxima.dtype)]
        if sums is not None:
            weight = self.own_weights(logits).sum() if self.weighs_all_logits else logits.shape[1]
            own += [sums, torch.zeros_like(sums) + weight]
        parts = regions.gather(torch.stack(own)[None], 0, grad="own").unbind(1)
        whole_maxima = parts[0].amax(0)
        shifts = parts[0] - whole_maxima
        return Statistics(
            whole_maxima,
            (parts[1] * shifts.exp()).sum(0),
            torch.where(parts[3] > 0, parts[2] + shifts, 0.0).sum(0),
            None if sums is None else (parts[4] + shifts * parts[5]).sum(0),
        )

    def losses(self, numbers: Statistics, targets: Tensor, counted: Tensor) -> Tensor:
        """Returns the loss per token, 0 where it does not count."""
        log_sums = numbers.exp_sums.log()
        if self.weighs_all_logits:
            assert self.class_weights is not None and numbers.sums is not None
            losses = (log_sums - numbers.target_logits) * self.label_weights(targets)
            spread = log_sums * self.class_weights.sum() - numbers.sums
            losses = (1 - self.smoothing) * losses + self.smoothing / self.vocab_size * spread
        else:
            losses = log_sums - (1 - self.smoothing) * numbers.target_logits
            if numbers.sums is not None:
                losses -= self.smoothing / self.vocab_size * numbers.sums
            if self.class_weights is not None:
                losses *= self.label_weights(targets)
        if self.z_loss:
            losses += self.z_loss * (numbers.maxima + log_sums).square()
        return torch.where(counted, losses, 0.0)

    def write_gradient(
        self, logits: Tensor, numbers: Statistics, targets: Tensor, d_losses: Tensor
    ) -> None:
        """Overwrites a chunk's logits by their gradient.

        Args:
            logits: ``[tokens, own entries]``.
            numbers: statistics of whole rows.
            targets: ``[tokens]``.
            d_losses: gradient of the tokens' losses, 0 where a token does not count.
        """
        if self.needs_exact_logits:
            self._write_weighted_gradient(logits, numbers, targets, d_losses)
            return
        exp_sums = numbers.exp_sums
        if self.z_loss:  # a factor of the probabilities, by which the kernel divides
            exp_sums = exp_sums / (1 + 2 * self.z_loss * (numbers.maxima + exp_sums.log()))
        if self.class_weights is not None:
            d_losses = d_losses * self.label_weights(targets)
        torch.ops.smp.cross_entropy_backward_.default(
            d_losses,
            logits,
            targets,
            numbers.maxima,
            exp_sums,
            self.begin,
            self.vocab_size,
            self.ignore_index,
            self.smoothing,
        )

    def _write_weighted_gradient(
        self, logits: Tensor, numbers: Statistics, targets: Tensor, d_losses: Tensor
    ) -> None:
        """Writes the gradient for class weights together with label smoothing or a z-loss."""
        assert self.class_weights is not None
        of_label = (1 - self.smoothing) * self.label_weights(targets)
        of_each = self.smoothing / self.vocab_size
        factors = of_label + of_each * self.class_weights.sum()
        if self.z_loss:
            factors = factors + 2 * self.z_loss * (numbers.maxima + numbers.exp_sums.log())
        exact = logits.to(numbers.maxima.dtype)
        exact.sub_(numbers.maxima[:, None]).exp_()
        exact.mul_((d_losses * factors / numbers.exp_sums)[:, None])
        if self.smoothing:
            exact.addr_(d_losses, self.own_weights(logits), alpha=-of_each)
        places = targets - self.begin
        is_here = (places >= 0) & (places < logits.shape[1])
        at_label = torch.where(is_here, -d_losses * of_label, 0.0)
        exact.scatter_add_(
            1, places.clamp(0, logits.shape[1] - 1)[:, None], at_label[:, None].to(exact.dtype)
        )
        if exact is not logits:
            logits.copy_(exact)
