"""Draws random numbers that belong to samples: a batch and its pieces draw the same ones.

A batch cut into pieces draws other numbers than the whole batch, so their losses differ without any
fault. In this mode of PyTorch's dispatcher dropout drops nothing. Any other operator draws sample
by sample, from a seed that depends on the sample and on the number of draws before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import smp._C as _C

_aten = torch.ops.aten
_ALL_SAMPLES = -1  # in the place of a sample, for draws without samples


@dataclass
class Drawn:
    """The draws of one pass on one rank.

    Attributes:
        shapes: operators with the shapes of one sample, or whole shapes where there are no samples.
        permutes: whether the samples of the batch were permuted.
    """

    shapes: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    permutes: bool = False


class DrawsBySample(TorchDispatchMode):
    """Replaces the draws of operators in one thread, while it is entered.

    Args:
        samples: numbers of the samples that the running code has.
        drawn: record of the draws.
        device: device of this process.
        rounds: seed of random rounding errors in results of operators that add up; None: no errors.
    """

    supports_higher_order_operators = True

    def __init__(
        self, samples: range, drawn: Drawn, device: torch.device, rounds: int | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples, self._drawn, self._device = samples, drawn, str(device)
        self._rounds = rounds
        self._num_drawn = self._num_rounded = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        known = dict(zip(names, args, strict=False)) | kwargs
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws or ("seed" in names and ("p" in names or "dropout_p" in names)):
            return self._draw(func, known)
        result = func(*args, **kwargs)
        return result if self._rounds is None else self._rounded(func, result)

    # ---- draws

    def _draw(self, func: OpOverload, known: dict[str, Any]) -> Any:
        if func is _aten.bernoulli_.float:
            # The mask of dropout is divided by this probability, and becomes 1.
            return known["self"].fill_(known.get("p", 0.5))
        if func is _aten.native_dropout.default:
            x = known["input"]
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        if "seed" in known or "dropout_p" in known:
            name = "dropout_p" if "dropout_p" in known else "p"
            return _call(func, known | {name: 0.0})
        if "generator" in known:
            known["generator"] = None
        if func is _aten.randperm.default and known["n"] == len(self._samples) > 1:
            self._drawn.permutes = True
            options = {k: v for k, v in known.items() if k in ("dtype", "device")}
            options["dtype"] = options.get("dtype") or torch.int64
            return torch.arange(known["n"], **options).flip(0)
        number = self._num_drawn
        self._num_drawn += 1
        by_sample = {name for name, value in known.items() if self._has_samples(name, value)}
        self._note(func, known, by_sample)
        if not by_sample:
            return self._seeded((number, _ALL_SAMPLES), lambda: _call(func, known))
        rows = []
        for row, sample in enumerate(self._samples):
            own = known | {name: _row(known[name], row) for name in by_sample}
            rows.append(self._seeded((number, sample), lambda own=own: _call(func, own)))  # type: ignore[misc]
        if func._schema.is_mutable:
            return known["self"]
        return pytree.tree_map(lambda *parts: torch.cat(parts), rows[0], *rows[1:])

    def _has_samples(self, name: str, value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.dim() > 0 and value.shape[0] == len(self._samples)
        return name == "size" and len(value) > 0 and value[0] == len(self._samples)

    def _note(self, func: OpOverload, known: dict[str, Any], by_sample: set[str]) -> None:
        shapes: list[Any] = [func._schema.name]
        for name, value in known.items():
            shape = value.shape if isinstance(value, Tensor) else value
            if isinstance(value, Tensor) or name == "size":
                shapes.append((name in by_sample, tuple(shape[1:] if name in by_sample else shape)))
        self._drawn.shapes[tuple(shapes)] += 1

    def _seeded(self, key: tuple[int, int], draw: Callable[[], Any]) -> Any:
        seed = 0
        for part in key:
            seed = _C.mix_seed(seed, part & (2**64 - 1))
        before = _C.RandomState.capture(self._device)
        _C.seed_generators(seed, self._device)
        try:
            return draw()
        finally:
            before.restore()

    # ---- rounding

    def _rounded(self, func: OpOverload, result: Any) -> Any:
        """Adds a rounding error where another batch size may change the order of additions."""
        schema = func._schema
        is_view = any(value.alias_info is not None for value in schema.returns)
        if is_view or schema.is_mutable or torch.Tag.pointwise in func.tags:
            return result
        return pytree.tree_map_only(Tensor, self._moved, result)

    def _moved(self, x: Tensor) -> Tensor:
        if not x.is_floating_point() or x.layout != torch.strided or type(x) is not Tensor:
            return x
        self._num_rounded += 1
        info = torch.finfo(x.dtype)
        eps = info.eps
        if x.is_cuda and x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
            eps = 2.0**-11
        # A generator of its own: the others belong to the script.
        generator = torch.Generator(x.device)
        generator.manual_seed(_C.mix_seed(self._rounds or 0, self._num_rounded) >> 1)
        noise = torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float32)
        moved = (x.double() * (1 + eps * (2 * noise.double() - 1))).to(x.dtype)
        return torch.where(x.abs() < info.max / 4, moved, x)


def _row(value: Any, row: int) -> Any:
    return value[row : row + 1] if isinstance(value, Tensor) else [1, *value[1:]]


def _call(func: OpOverload, known: dict[str, Any]) -> Any:
    given = [a for a in func._schema.arguments if a.name in known]
    args = [known[a.name] for a in given if not a.kwarg_only]
    return func(*args, **{a.name: known[a.name] for a in given if a.kwarg_only})
