"""Measures what the own code of modules needs in a real forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Forward = Callable[..., Any]


class OwnMeter:
    """A meter for the growth of a number, such as a time, in the own code of every module.

    Args:
        num_modules: number of modules.
        now: function that returns the number.
    """

    def __init__(self, num_modules: int, now: Callable[[], float]) -> None:
        self.own = [0.0] * num_modules
        self._now = now
        self._below: list[float] = []

    def wrap(self, idx: int, forward: Forward) -> Forward:
        """Returns ``forward`` of module ``idx`` with its calls measured."""

        @functools.wraps(forward)
        def measured(*args: Any, **kwargs: Any) -> Any:
            before = self._now()
            self._below.append(0.0)
            try:
                return forward(*args, **kwargs)
            finally:
                total = self._now() - before
                self.own[idx] += max(0.0, total - self._below.pop())
                if self._below:
                    self._below[-1] += total

        return measured
