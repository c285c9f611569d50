"""Counts where the host reads a number of a tensor, for which it would wait on an accelerator."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result the host needs, or whose shape depends on values.
_READING_OPS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
}
# Ways out of a tensor that no operator tells of where it is on the CPU already.
_READING_METHODS = ("cpu", "numpy", "tolist", "__array__")


class _Watch(TorchDispatchMode):
    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in _READING_OPS:
            self._reads[name] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def count_host_reads() -> Iterator[Counter[str]]:
    """Counts by name what happens inside, in this thread; methods of tensors in all threads."""
    reads: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            reads[name] += 1
            return method(self, *args, **kwargs)

        return read

    with contextlib.ExitStack() as stack:
        for name in _READING_METHODS:
            method = getattr(Tensor, name)
            stack.enter_context(mock.patch.object(Tensor, name, counted(name, method)))
        stack.enter_context(_Watch(reads))
        yield reads
