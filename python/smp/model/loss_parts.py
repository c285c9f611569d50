"""Refuses losses that depend on split parameters directly.

For instance a penalty of all parameters does: code that reads ``parameters()`` gets the parts of
this rank. A sum of squares or a norm is then that of the parts, and differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

import smp._C as _C
from smp.tensor_parallel.sharding import interval_of, is_joined
from smp.world import runtime

#: Operations that no split module applies to its parameters: arithmetic, reductions, joins.
_FOREIGN = frozenset(
    "Pow Mul Div Abs Sum Mean Norm LinalgVectorNorm LinalgMatrixNorm LinalgNorm Square Sqrt Exp "
    "Var Std StdMean VarMean Max Min Amax Amin Logsumexp Dot Cat Stack Clamp ForeachNorm".split()
)
_VIEWS = frozenset(
    "View UnsafeView ReshapeAlias Alias T Transpose Permute Unsqueeze Squeeze Expand Slice Select "
    "Split SplitWithSizes Unbind ToCopy Clone Detach".split()
)
_NUM_CHECKED = 4  # backward passes; later ones of a script are like the first ones

_num_checked: WeakKeyDictionary[runtime.Runtime, int] = WeakKeyDictionary()


def refuse_parts(current: runtime.Runtime, roots: Sequence[Tensor]) -> None:
    """Refuses losses whose graph has split parameters in it outside of their modules.

    Args:
        current: the runtime.
        roots: losses of one backward.

    Raises:
        RuntimeError: a loss depends on a part of a parameter.
    """
    if current.rank.sizes["tp"] == 1 or current.rank.sizes["pp"] > 1:
        return
    count = _num_checked.get(current, 0)
    if count >= _NUM_CHECKED:
        return
    _num_checked[current] = count + 1
    # Each node has the operation behind it, if only views are between: these count as the
    # parameter.
    stack: list[tuple[Any, str]] = [(root.grad_fn, "") for root in roots if root.requires_grad]
    seen = {node for node, _ in stack}
    while stack:
        node, foreign = stack.pop()
        if node is None:  # the loss is a leaf
            continue
        kind = node.name().rstrip("0123456789").removesuffix("Backward")
        if kind in _FOREIGN or kind not in _VIEWS:
            foreign = kind if kind in _FOREIGN else ""
        for inner, _ in node.next_functions:
            if inner is None:
                continue
            parameter = getattr(inner, "variable", None)
            if parameter is not None and foreign and interval_of(parameter) is not None:
                if foreign == "Cat" and is_joined(parameter):
                    continue
                raise _error(current, parameter, node.name())
            if inner not in seen:
                seen.add(inner)
                stack.append((inner, foreign))


def _error(current: runtime.Runtime, parameter: Tensor, how: str) -> RuntimeError:
    models: Sequence[Any] = current.wrapped.models
    names = (
        name
        for model in models
        for name, other in model.get_module().named_parameters()
        if other is parameter
    )
    return RuntimeError(
        f"{_C.rank_prefix()}the loss depends on the parameter '{next(names, '?')}' outside of its "
        f"module ({how}), and each tensor-parallel rank holds a part of that parameter; read it as "
        "an attribute of its module (module.weight) inside of the step function, use the weight "
        "decay of the optimizer, or leave the module whole by "
        "smp.set_tensor_parallelism(module, False)"
    )
