"""Tries out the first call of a compiled graph on copies: forward and backward.

A graph that was compiled may still fail when it runs. A device may refuse a kernel at its launch,
an operator may return another dtype than the compiler expects (attention of the CPU in float64),
and some releases compile backward when it first runs. By then the forward of the module is over and
cannot be run in another way. So all of this is tried before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

#: Prefixes of names of operators that communicate with other ranks.
_OTHER_RANKS = ("torch.distributed", "c10d", "_c10d", "symm_mem", "smp::")


def try_out(compiled: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Calls a compiled graph with copies of its inputs, and its backward.

    Neither the inputs nor the states of random generators change. The backward may be called from
    then on while its graph is kept, if `donated_buffer` of PyTorch was off when it was compiled.

    Args:
        compiled: function that a backend made from a graph.
        inputs: inputs of its first call.

    Returns:
        whether there was memory enough; a lack of memory is not a fault of the code.

    Raises:
        Exception: what the call or its backward raises.
    """
    with contextlib.suppress(torch.OutOfMemoryError), _random_states_kept():
        copies, leaves = _copied(inputs)
        outputs = compiled(*copies)
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        roots = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
        _say_that_nothing_is_donated(roots)
        if roots and leaves:
            # A backward runs outside autocast; a schedule may run it in two parts.
            with torch._C._DisableAutocast(), torch.enable_grad():
                grads = [torch.ones_like(root) for root in roots]
            with torch._C._DisableAutocast():
                torch.autograd.grad(roots, leaves, grads, retain_graph=True, allow_unused=True)
        return True
    return False


def is_local(graph: torch.fx.GraphModule) -> bool:
    """Returns whether a graph does not communicate, so that an extra call affects no other rank."""
    return not any(
        _name_of(node.target).startswith(_OTHER_RANKS)
        for part in graph.modules()
        if isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
        if node.op == "call_function"
    )


def _say_that_nothing_is_donated(roots: Sequence[Tensor]) -> None:
    """Marks compiled code as code without donated buffers, as it was compiled.

    PyTorch checks, when a backward keeps its graph, the present setting of `donated_buffer` and the
    donated buffers noted for the code. A missing note counts as a refusal, an empty list does not.
    """
    nodes = [root.grad_fn for root in roots]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        metadata: Any = getattr(getattr(node, "_forward_cls", None), "metadata", None)
        if getattr(metadata, "bw_donated_idxs", ()) is None:
            metadata.bw_donated_idxs = []
        nodes += [before for before, _ in node.next_functions]


def _name_of(target: Any) -> str:
    packet = getattr(target, "overloadpacket", target)
    operator = getattr(packet, "_qualified_op_name", None)  # with its namespace
    return operator or f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', '')}"


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        yield


def _copied(inputs: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """Returns copies of inputs, and the leaves that get their gradients.

    Copies have the strides of their originals, share memory where these do, and are no leaves, so
    that a graph may write to them.
    """
    regions: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for x in inputs:
        if isinstance(x, Tensor):
            regions.setdefault(_region_of(x), []).append(x)
    flats, leaves = {}, []
    for key, sharing in regions.items():
        begin = min(x.storage_offset() for x in sharing)
        end = max(map(_end_of, sharing))
        flat = sharing[0].detach().as_strided((end - begin,), (1,), begin).clone()
        if any(x.requires_grad for x in sharing):
            leaves.append(flat.requires_grad_())
            with torch.enable_grad():
                flat = flat.clone()
        flats[key] = (flat, begin)
    copies = []
    for x in inputs:
        if isinstance(x, Tensor):
            flat, begin = flats[_region_of(x)]
            source = flat if x.requires_grad else flat.detach()
            with torch.enable_grad():
                x = source.as_strided(x.size(), x.stride(), x.storage_offset() - begin)
        copies.append(x)
    return copies, leaves


def _region_of(x: Tensor) -> tuple[int, torch.dtype]:
    return x.untyped_storage().data_ptr(), x.dtype


def _end_of(x: Tensor) -> int:
    """Returns the index in its storage behind the last element of a tensor."""
    if x.numel() == 0:
        return int(x.storage_offset())
    reach = sum((n - 1) * step for n, step in zip(x.size(), x.stride(), strict=True))
    return int(x.storage_offset() + reach + 1)
