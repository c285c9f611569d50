"""Features that PyTorch has in some releases from 2.6 on and not in others.

No other module of the package asks which release is installed (``tests/lint`` checks it). Features
are found by name where possible, because numbers of later releases are not known. The C++ core has
``csrc/common/torch_releases.h``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, Store, TCPStore


def minor(version: str = torch.__version__) -> str:
    """``"2.11.0+cu130"`` -> ``"2.11"``: releases with one of these have one binary interface."""
    return ".".join(version.split("+")[0].split(".")[:2])


def operators(*names: str) -> list[Any]:
    """Packets of ``torch.ops.aten`` by name, without those that this release does not have.

    ``_grouped_mm`` is there from 2.7 on.
    """
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


def getters(*names: str) -> set[Any]:
    """Getters of properties of tensors, without those that this release does not have.

    ``Tensor.names`` is there in 2.11 and gone in 2.15.
    """
    found = (getattr(torch.Tensor, name, None) for name in names)
    return {getter.__get__ for getter in found if getter is not None}


def tcp_store(host: str, port: int, world_size: int, is_master: bool, **options: Any) -> TCPStore:
    """``torch.distributed.TCPStore``, also of a PyTorch that is built without libuv (Debian's)."""
    try:
        return TCPStore(host, port, world_size, is_master, **options)
    except RuntimeError as error:
        if "libuv" not in str(error):
            raise
    return TCPStore(host, port, world_size, is_master, use_libuv=False, **options)


def has_store_clones() -> bool:
    """Returns whether a store can be opened a second time, for another thread."""
    return hasattr(Store, "clone")


def known(settings: Mapping[str, Any], module: Any) -> dict[str, Any]:
    """Returns the settings that a configuration module has, such as ``torch._functorch.config``."""
    return {name: value for name, value in settings.items() if hasattr(module, name)}


def is_recompile_limit(error: BaseException) -> bool:
    """Returns whether PyTorch refused to compile a function for further kinds of arguments."""
    names = ("FailOnRecompileLimitHit", "RecompileLimitExceeded")  # by release
    return isinstance(error, tuple(getattr(torch._dynamo.exc, name, ()) for name in names))


def keep_device_guard() -> None:
    """Creates, in the caller's thread, the guard that the first meta tensor would create.

    It does nothing with a CUDA device, or in a release without such a guard.
    """
    if hasattr(torch._C, "_ensureCUDADeviceGuardSet") and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


def limit_ctas(options: Any, max_ctas: int) -> None:
    """Sets how many blocks a kernel of NCCL has, where options of a group can say it."""
    if hasattr(options, "config"):
        options.config.max_ctas = max_ctas


def abort_of(backend: Any, base: type = Backend) -> Callable[[], None] | None:
    """Returns a function that ends the kernels of a backend, or None if C++ can call the base's.

    Args:
        backend: NCCL's backend; its class had the method before the base class (2.7).
        base: base class of backends.
    """
    if hasattr(base, "abort"):
        return None
    abort: Callable[[], None] = backend.abort
    return abort


def optimize_together(kind: type[torch.Tensor]) -> None:
    """Lets optimizers of PyTorch update parameters of a class in one call, as plain ones."""
    module = sys.modules[torch.optim.Optimizer.__module__]  # hidden by a name of torch.optim
    kinds = getattr(module, "_foreach_supported_types", None)
    if kinds is not None and kind not in kinds:
        kinds.append(kind)
