"""A machine with less memory, for tests of what happens when it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def host_memory(limit_mb: int) -> Iterator[None]:
    """Lets CPU tensors of 2 MiB and more find no memory beyond a limit in this process.

    Args:
        limit_mb: MiB of all such tensors.
    """
    import smp_testing

    smp_testing.limit_host_memory(limit_mb << 20)
    try:
        yield
    finally:
        smp_testing.limit_host_memory(0)
