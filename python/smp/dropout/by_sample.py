"""Draws random numbers that belong to samples: a batch and its pieces draw the same ones.

A batch cut into pieces draws other numbers than the whole batch, so their losses differ without any
fault. In this mode of PyTorch's dispatcher dropout drops nothing. Any other operator draws sample
by sample, from a seed that depends on the sample and on the number of draws before. Draws without
samples (a number for each token that an expert gets) are one number.
"""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import smp._C as _C

_aten = torch.ops.aten
_NUM_ROUNDINGS = 65537  # a prime, so that rows do not begin at the same one
_ALL_SAMPLES = -1  # in the place of a sample, for draws without samples


class _Kind(NamedTuple):
    """The way in which an operator draws random numbers.

    Attributes:
        draws: whether it draws at all.
        chance: name of the argument that is the probability of dropout, or None.
        names: names of its arguments.
        has_values: whether the draw depends on values (probabilities, the permuted tensor).
    """

    draws: bool
    chance: str | None
    names: tuple[str, ...]
    has_values: bool


@functools.cache
def _kind_of(func: OpOverload) -> _Kind:
    arguments = func._schema.arguments
    names = tuple(argument.name for argument in arguments)
    draws = torch.Tag.nondeterministic_seeded in func.tags
    # Operators that are written by others do not say that they draw.
    chance = "dropout_p" if "dropout_p" in names else "p" if {"p", "seed"} <= {*names} else None
    if draws and "dropout" in names:
        chance = "dropout"
    tensors = [a.name for a in arguments if "Tensor" in str(a.type)]
    has_shape = func._opname.endswith(("_", "_like")) or func is _aten.bernoulli.p
    has_values = tensors != (["self"] if has_shape else []) or "n" in names
    return _Kind(draws or chance is not None, chance, names, has_values)


@dataclass
class Drawn:
    """The draws of one pass on one rank.

    Attributes:
        shapes: operators with the shapes of one sample, or whole shapes where there are no samples.
        permutes: whether the samples of the batch were permuted.
        others: states of the generators of Python and NumPy behind each piece of code that used
            them.
    """

    shapes: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    permutes: bool = False
    others: set[int] = field(default_factory=set)

    def is_like(self, whole: Drawn, number: int) -> bool:
        """Returns whether the draws of ``number`` pieces are those of the whole."""
        shapes = {shape: count * number for shape, count in whole.shapes.items()}
        return self.shapes == shapes and self.others == whole.others


class DrawsBySample(TorchDispatchMode):
    """Replaces the draws of operators in one thread, while it is entered.

    Args:
        samples: numbers of the samples that the running code has.
        drawn: record of the draws.
        device: device of this process.
        rounds: seed of random rounding errors in results of operators that add up; None: no errors.
        alike: whether one number is used for all that an operator draws.
        on_call: function that is called with each operator and its arguments before it runs.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        samples: range,
        drawn: Drawn,
        device: torch.device,
        rounds: int | None = None,
        *,
        alike: bool = False,
        on_call: Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples, self._drawn, self._device = samples, drawn, str(device)
        self._rounds, self._alike, self._on_call = rounds, alike, on_call
        self._num_drawn = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if self._on_call is not None:
            self._on_call(func, tuple(args), kwargs)
        kind = _kind_of(func)
        if kind.draws:
            return self._draw(func, kind, dict(zip(kind.names, args, strict=False)) | kwargs)
        result = func(*args, **kwargs)
        return result if self._rounds is None else self._rounded(func, result, args, kwargs)

    # ---- draws

    def _draw(self, func: OpOverload, kind: _Kind, known: dict[str, Any]) -> Any:
        if func is _aten.bernoulli_.float:
            # The mask of dropout is divided by this probability, and becomes 1.
            return known["self"].fill_(known.get("p", 0.5))
        if func is _aten.native_dropout.default:
            x = known["input"]
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        if kind.chance is not None:
            return _call(func, known | {kind.chance: 0.0})
        if "generator" in known:
            known["generator"] = None
        if func is _aten.randperm.default and known["n"] == len(self._samples) > 1:
            self._drawn.permutes = True
            options = {k: v for k, v in known.items() if k in ("dtype", "device")}
            options["dtype"] = options.get("dtype") or torch.int64
            return torch.arange(known["n"], **options).flip(0)
        number = self._num_drawn
        self._num_drawn += 1
        if self._alike and not kind.has_values:
            return self._one_for_all(func, known)
        by_sample = {name for name, value in known.items() if self._has_samples(name, value)}
        by_sample = set() if "out" in known else by_sample
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

    def _one_for_all(self, func: OpOverload, known: dict[str, Any]) -> Any:
        shape = known["self"].shape if "self" in known else known["size"]
        small = {"self": known["self"].new_empty(())} if "self" in known else {"size": []}
        drawn = self._seeded((0, _ALL_SAMPLES), lambda: _call(func, known | small))
        if func._schema.is_mutable:
            return known["self"].copy_(drawn)
        return drawn.expand(shape).contiguous()

    def _has_samples(self, name: str, value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.dim() > 0 and value.shape[0] == len(self._samples)
        return name == "size" and len(value) > 0 and value[0] == len(self._samples)

    def _note(self, func: OpOverload, known: dict[str, Any], by_sample: set[str]) -> None:
        shapes: list[Any] = [func._schema.name]
        for name, value in known.items():
            shape = value.shape if isinstance(value, Tensor) else value
            if name == "n":
                shapes.append(value)
            elif isinstance(value, Tensor) or name == "size":
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

    def _rounded(self, func: OpOverload, result: Any, args: Any, kwargs: Any) -> Any:
        """Adds a rounding error where another batch size may change the order of additions."""
        schema = func._schema
        is_view = any(value.alias_info is not None for value in schema.returns)
        if is_view or schema.is_mutable or torch.Tag.pointwise in func.tags:
            return result
        # Results that are made of no tensor, or not written yet, are no sums.
        given = pytree.tree_leaves((args, kwargs))
        own = {_storage(leaf) for leaf in given if isinstance(leaf, Tensor)}
        if not own or "empty" in func._opname:
            return result
        return pytree.tree_map_only(
            Tensor, lambda x: x if _storage(x) in own else self._moved(x, func), result
        )

    def _moved(self, x: Tensor, func: OpOverload) -> Tensor:
        # A tensor without values represents one of another rank.
        if not _has_values(x) or not x.is_floating_point():
            return x
        # By operator and shape, not by count: ranks with other experts run other operators, and
        # what all ranks compute alike, as routers do, has to stay alike.
        place = zlib.crc32(f"{func._opname} {tuple(x.shape)}".encode())
        first = _C.mix_seed(self._rounds or 0, place) % _NUM_ROUNDINGS
        known = _roundings(x.dtype, x.device)
        times = (first + x.numel()) // _NUM_ROUNDINGS + 1
        moved = x * known.repeat(times)[first : first + x.numel()].view(x.shape)
        return moved.where(moved.isfinite(), x)


@functools.lru_cache(maxsize=8)
def _roundings(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns random factors around 1 whose distances from it are roundings of a dtype."""
    is_coarse = device.type == "cuda" and dtype == torch.float32
    is_coarse &= torch.backends.cuda.matmul.allow_tf32
    eps = 2.0**-11 if is_coarse else torch.finfo(dtype).eps
    # A generator of its own: the others belong to the script.
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(_NUM_ROUNDINGS, generator=generator, dtype=torch.float64)
    return (1 + eps * (2 * noise - 1)).to(dtype).to(device)


def _storage(x: Tensor) -> int:
    """Returns where the bytes of a tensor are; its own number where it has none."""
    return x.untyped_storage().data_ptr() if _has_values(x) else id(x)


def _has_values(x: Tensor) -> bool:
    return type(x) is Tensor and x.layout == torch.strided and not x.is_meta


def _row(value: Any, row: int) -> Any:
    return value[row : row + 1] if isinstance(value, Tensor) else [1, *value[1:]]


def _call(func: OpOverload, known: dict[str, Any]) -> Any:
    given = [a for a in func._schema.arguments if a.name in known]
    args = [known[a.name] for a in given if not a.kwarg_only]
    return func(*args, **{a.name: known[a.name] for a in given if a.kwarg_only})
