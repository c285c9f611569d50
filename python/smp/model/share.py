"""The part of the batch that the running microbatch is."""

from __future__ import annotations

import contextvars

from smp.data_parallel import BatchWeights


class Share:
    """The part of the batch that one microbatch is.

    Args:
        weights: of the microbatches of this rank; None: the first pipeline rank has them.
        mb: number of the microbatch.
    """

    def __init__(self, weights: BatchWeights | None, mb: int) -> None:
        self._weights = weights
        self._mb = mb
        self._told: float | None = None

    @property
    def of_loss(self) -> float:
        """Factor of the microbatch's loss in the loss of the global batch."""
        return 1.0 if self._weights is None else self._weights.share(self._mb)

    @property
    def weight(self) -> float:
        """Weight of the microbatch's outputs in their mean, 1 where all count alike."""
        if self._weights is not None:
            return self._weights.output_weight(self._mb)
        return 1.0 if self._told is None else self._told

    @weight.setter
    def weight(self, value: float) -> None:
        self._told = value


_share: contextvars.ContextVar[Share | None] = contextvars.ContextVar(
    "smp_microbatch_share", default=None
)


def set_share(share: Share) -> None:
    """Says which microbatch this context runs."""
    _share.set(share)


def current_share() -> Share | None:
    """Returns the share of the running microbatch, or None outside of step functions."""
    return _share.get()
