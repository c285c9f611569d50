"""Chooses the linear layers of a model that multiply with 8-bit operands, and converts them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

import smp._C as _C
from smp._device import fp8_problem
from smp.config.schema import Config
from smp.modules import packed
from smp.nn.conv1d import conv1d_class
from smp.nn.fp8 import Fp8Linear
from smp.nn.linear import ColumnLinear, DistributedLinear, RowLinear
from smp.nn.planned.linear import PlannedHeads, PlannedLatent, PlannedPart
from smp.replacement.plan_cuts import is_model, output_head
from smp.tensor_parallel import sharding
from smp.tensor_parallel.products import use_fp8
from smp.world.log import first_rank_log

_UNIT = 16  # kernels multiply blocks of so many numbers
_SHOWN = 4
_WORDS = {"head", "first", "last", "none"}  # of `fp8_skip`; others are patterns


@dataclass
class Choice:
    """The linear layers of a model, by what becomes of them.

    Attributes:
        converted: layers with 8-bit operands, by name.
        left: names of other layers, by reason.
        unknown: patterns that no layer is named by.
    """

    converted: dict[str, nn.Module] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def convert_to_fp8(root: nn.Module, config: Config, device: torch.device) -> None:
    """Makes linear layers multiply with 8-bit operands, if the configuration says so.

    Args:
        root: model, after parts of it were replaced; the same on all ranks.
        config: configuration of the run.
        device: device of this rank.

    Raises:
        ValueError: the device or the dtype of a layer has no such products.
    """
    if config.fp8 == "none":
        return
    problem = fp8_problem(device)
    if problem is not None:
        raise ValueError(
            f"{_C.rank_prefix()}smp config: fp8={config.fp8!r}: {problem}; leave fp8 at 'none'"
        )
    choice = choose_layers(root, config.fp8_skip)
    for name, layer in choice.converted.items():
        _check_dtype(name, layer, config, device)
        if type(layer) is nn.Linear:
            layer.__class__ = Fp8Linear
        use_fp8(layer, config.fp8)
    _log(root, choice, config)


def choose_layers(root: nn.Module, skip: str) -> Choice:
    """Decides which layers of a model have 8-bit operands. All ranks decide alike.

    Args:
        root: model.
        skip: value of the key `fp8_skip`.
    """
    words = {word.strip() for word in skip.split(",")} - {""}
    layers = {name: module for name, module in root.named_modules() if _is_linear(module)}
    ends = _ends_of_blocks(root, layers)
    heads = _heads(root, layers)
    patterns = sorted(words - _WORDS)
    choice = Choice(unknown=[p for p in patterns if not fnmatch.filter(layers, p)])
    for name, layer in layers.items():
        pattern = next((p for p in patterns if fnmatch.fnmatchcase(name, p)), None)
        if "head" in words and name in heads:
            reason: str | None = "heads"
        elif ends.get(name) in words:
            reason = f"in {ends[name]} blocks"
        elif pattern is not None:
            reason = f"named by {pattern!r} in fp8_skip"
        else:
            reason = _problem_of(layer)
        if reason is None:
            choice.converted[name] = layer
        else:
            choice.left.setdefault(reason, []).append(name)
    return choice


def _is_linear(module: nn.Module) -> bool:
    kinds = (nn.Linear, ColumnLinear, RowLinear, DistributedLinear, conv1d_class() or nn.Linear)
    return isinstance(module, kinds)


def _problem_of(layer: nn.Module) -> str | None:
    """Returns why a layer cannot have 8-bit operands, or None."""
    weight = _weight(layer)
    if weight is not None and packed.is_packed(weight):
        return "with quantized weights"
    extents = _extents(layer)
    if extents is None:
        return "of classes of their own"
    if "forward" in layer.__dict__:
        return "with forwards of their own"
    if "_smp_recomputes" in layer.__dict__:
        return "whose losses need no logits"
    return f"with sizes that {_UNIT} does not divide" if any(n % _UNIT for n in extents) else None


def _extents(layer: nn.Module) -> list[int] | None:
    """Returns sizes of a layer on all ranks, or None if its class has no products of 8 bits."""
    parts: Sequence[int] = ()
    if isinstance(layer, ColumnLinear | RowLinear):
        parts = layer.sizes
    elif isinstance(layer, DistributedLinear):
        parts = layer._sizes
    elif isinstance(layer, PlannedHeads):
        parts = [layer._smp_unit]
    elif isinstance(layer, PlannedPart):
        parts = () if isinstance(layer, PlannedLatent) else layer._smp_sizes
    elif type(layer) is not nn.Linear:
        return None
    # Ranks with unequal parts have to decide alike, so this rank's own sizes do not count.
    weight = _weight(layer)
    assert weight is not None
    return [*parts, *sharding.whole_shape(weight)]


def _weight(layer: nn.Module) -> nn.Parameter | None:
    """Returns this rank's part of the weight, which reading the attribute may gather."""
    return layer._parameters.get("weight")


def _ends_of_blocks(root: nn.Module, layers: dict[str, nn.Module]) -> dict[str, str]:
    """Returns "first", "last" or "inner" for layers in blocks, by name.

    Blocks are the members of one class, two or more, of an outermost list with linear layers.
    """
    places: dict[str, str] = {}
    for blocks in _lists_of_blocks(root, "", layers):
        for number, block in enumerate(blocks):
            end = {0: "first", len(blocks) - 1: "last"}.get(number, "inner")
            places.update(dict.fromkeys(_inside(block, layers), end))
    return places


def _lists_of_blocks(
    module: nn.Module, name: str, layers: dict[str, nn.Module]
) -> Iterator[list[str]]:
    children = {_joined(name, key): child for key, child in module.named_children()}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        by_class: dict[type[nn.Module], list[str]] = {}
        for path, child in children.items():
            if any(_inside(path, layers)):
                by_class.setdefault(type(child), []).append(path)
        blocks = max(by_class.values(), key=len, default=[])
        if len(blocks) > 1:
            yield blocks
            return
    for path, child in children.items():
        yield from _lists_of_blocks(child, path, layers)


def _heads(root: nn.Module, layers: dict[str, nn.Module]) -> set[str]:
    """Returns names of heads: those that a model of transformers names, layers with the table of an
    embedding, and in other models the layers behind all blocks, or the last layer.
    """
    models = [module for module in root.modules() if is_model(module)]
    named = {id(output_head(model)) for model in models}
    tables = {id(_weight(m)) for m in root.modules() if isinstance(m, nn.Embedding)} - {id(None)}
    heads = {n for n, m in layers.items() if id(m) in named or id(_weight(m)) in tables}
    if models or not layers:
        return heads
    names = list(layers)
    blocks = [number for number, name in enumerate(names) if name in _ends_of_blocks(root, layers)]
    return heads | set(names[max(blocks) + 1 :] if blocks else names[-1:])


def _inside(path: str, layers: dict[str, nn.Module]) -> list[str]:
    return [name for name in layers if name == path or name.startswith(f"{path}.")]


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _check_dtype(name: str, layer: nn.Module, config: Config, device: torch.device) -> None:
    weight = _weight(layer)
    assert weight is not None
    if config.half_dtype is None and weight.dtype == torch.float64 and device.type != "cpu":
        raise ValueError(
            f"{_C.rank_prefix()}smp config: fp8={config.fp8!r}: the layer '{name}' is float64, "
            f"which has no products of 8 bits on {device.type}; set bf16=True, or name it in "
            "fp8_skip"
        )


def _log(root: nn.Module, choice: Choice, config: Config) -> None:
    num_left = sum(map(len, choice.left.values()))
    log = first_rank_log.info if choice.converted else first_rank_log.warning
    log(
        "smp: fp8 (%s): %d of %d linear layers of %s multiply with 8 bits%s",
        config.fp8,
        len(choice.converted),
        len(choice.converted) + num_left,
        type(root).__name__,
        "".join(f"; {len(n)} {reason}: {_shown(n)}" for reason, n in choice.left.items()),
    )
    if choice.unknown:  # a script with several models has one key for all of them
        first_rank_log.warning(
            "smp: fp8_skip: no linear layer of %s has a name like %s; its words are head, first "
            "and last, and its patterns fit whole names, as in '*.gate'",
            type(root).__name__,
            ", ".join(map(repr, choice.unknown)),
        )
    wide = {str(_weight(layer).dtype) for layer in choice.converted.values()}  # type: ignore[union-attr]
    wide &= {"torch.float32", "torch.float64"}
    if config.half_dtype is None and wide:
        first_rank_log.warning(
            "smp: fp8 beside %s: all but the products computes with as many bits as before; "
            "bf16=True or torch.autocast is meant to go with it",
            " and ".join(sorted(wide)),
        )


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
