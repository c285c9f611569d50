"""Which part of the batch the running microbatch is."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass


@dataclass
class Share:
    """The part of the batch that the running microbatch has.

    Attributes:
        weight: of its mean in the mean over the batch, times the number of microbatches.
    """

    weight: float = 1.0


_share: contextvars.ContextVar[Share] = contextvars.ContextVar("smp_microbatch_share")


def set_share(share: Share) -> None:
    """Says which microbatch this context runs."""
    _share.set(share)


def current_share() -> Share:
    """That of the running microbatch; one of weight 1 outside of step functions."""
    return _share.get(None) or Share()
