"""A stream of the late device that a test holds back."""

from __future__ import annotations

import threading

import torch

import tests.device as late
from tests.patience import PATIENCE_S


class Held:
    """Holds a stream back until `release` is called.

    Args:
        stream: stream whose later work does not begin.
    """

    def __init__(self, stream: torch.Stream) -> None:
        self.stream = stream
        self._may_go_on = threading.Event()
        late.enqueue(stream, lambda: self._may_go_on.wait(PATIENCE_S))

    def release(self) -> None:
        """Lets the stream go on, and waits until it has done all its work."""
        self._may_go_on.set()
        self.stream.synchronize()
