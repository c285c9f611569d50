"""Translators between state dicts of Hugging Face models and those of the distributed modules.

Translators see nothing but a dict; the names of parameters in layers show which families it holds,
and where. Entries outside a family's layers, tables, final norm and head stay as they are, and so
does a dict that has the wanted form already. Results are views of the given tensors wherever a view
can express them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from smp.nn.huggingface import buffers, installed

StateDict = dict[str, Any]
Translator = Callable[..., StateDict]
Prefer = Literal["head", "base"]

# Names of heads on a base model that is distributed by itself.
_OTHER_HEADS = ("score.", "classifier.", "qa_outputs.", "multiple_choice_head.")
_PARTIAL = "_smp_is_partial"


@dataclass(frozen=True)
class Names:
    """The names of one family, from those of Hugging Face to ours.

    Attributes:
        family: name of the family, as in ``config.model_type``.
        base: prefix of the base model in a model with a head; "" if only its stack of layers is
            distributed.
        layers: attribute of the list of layers.
        outer: modules beside the layers.
        inner: modules in a layer; several of ours are blocks of one of theirs.
        anchor: parameters that every layer of theirs has, and layers of other families lack.
        ours_has: parameters that every layer of ours has.
        ours_lacks: parameters that no layer of ours has, and layers of other families have.
        transposed: modules whose weights are stored as [in, out].
        tied: parameters of a head that is not distributed which may be missing because they are
            others, with the names of these; "{model}" is the prefix of the model.
        ignored: buffers of theirs in a layer, which ours do not have.
        has_tied_head: heads are tied unless the configuration says otherwise.
    """

    family: str
    base: str
    layers: str
    outer: Mapping[str, str]
    inner: Mapping[str, str | tuple[str, ...]]
    anchor: tuple[str, ...]
    ours_has: tuple[str, ...]
    ours_lacks: tuple[str, ...] = ()
    transposed: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    has_tied_head: bool = False

    @property
    def stack(self) -> str:
        """Name of the list of our layers, relative to the distributed module."""
        return "transformer.seq_layers" if self.base else "seq_layers"


@dataclass(frozen=True)
class _Root:
    """A model of a family in a dict: prefixes of its base model and of its head, or None."""

    theirs: str
    ours: str
    head: str | None


def translators(names: Names, prefer: Prefer = "head") -> tuple[Translator, Translator]:
    """Returns a family's translators: distributed to Hugging Face, Hugging Face to distributed.

    Args:
        names: names of the family.
        prefer: kind of a model whose dict fits one with a language-modelling head as well as a
            base model alone.
    """

    def smp_to_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> StateDict:
        kept = {key: value for key, value in state_dict.items() if key != _PARTIAL}
        result = _to_theirs(names, _our_roots(names, prefer, kept), kept, max_seq_len)
        # Other prefixes with names of our layers: only those in lists named as theirs are layers.
        prefixes = _prefixes(kept, names.ours_has, names.ours_lacks)
        lists = _layers(names.layers, prefixes).items()
        alone = [f"{root}{names.layers}.{number}." for root, numbers in lists for number in numbers]
        _single_layers_to_theirs(names, kept, alone, result, max_seq_len)
        return result

    def hf_to_smp(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> StateDict:
        return _to_ours(names, _their_roots(names, prefer, state_dict), state_dict)

    return smp_to_hf, hf_to_smp


def layer_translators(names: Names) -> tuple[Translator, Translator]:
    """Returns the pair of translators for single layers; prefixes of layers stay."""

    def smp_to_hf(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> StateDict:
        kept = {key: value for key, value in state_dict.items() if key != _PARTIAL}
        result: StateDict = dict(kept)
        prefixes = _prefixes(kept, names.ours_has, names.ours_lacks)
        _single_layers_to_theirs(names, kept, prefixes, result, max_seq_len)
        return result

    def hf_to_smp(state_dict: Mapping[str, Any], max_seq_len: int | None = None) -> StateDict:
        result: StateDict = dict(state_dict)
        for prefix in _prefixes(state_dict, names.anchor):
            _layer_to_ours(names, state_dict, prefix, prefix, result)
        return result

    return smp_to_hf, hf_to_smp


# ---- which models are in a dict ------------------------------------------------


def _prefixes(known: Mapping[str, Any], has: Sequence[str], lacks: Sequence[str] = ()) -> list[str]:
    """Returns the prefixes of layers that have some parameters and lack others."""
    first = has[0]
    ends = [key for key in known if key == first or key.endswith("." + first)]
    prefixes = [key.removesuffix(first) for key in ends]
    return [
        prefix
        for prefix in prefixes
        if all(prefix + name in known for name in has)
        and not any(prefix + name in known for name in lacks)
    ]


def _layers(attribute: str, prefixes: Sequence[str]) -> dict[str, list[int]]:
    """Returns the numbers of layers by the prefix of their list."""
    pattern = re.compile(rf"(|.*\.){re.escape(attribute)}\.(\d+)\.")
    found: dict[str, list[int]] = {}
    for prefix in prefixes:
        if match := pattern.fullmatch(prefix):
            found.setdefault(match[1], []).append(int(match[2]))
    return {root: sorted(numbers) for root, numbers in sorted(found.items())}


def _their_roots(
    names: Names, prefer: Prefer, state_dict: Mapping[str, Any]
) -> dict[_Root, list[int]]:
    """Returns the models of theirs in a dict, with the numbers of their layers."""
    roots = {}
    prefixes = _prefixes(state_dict, names.anchor)
    for theirs, numbers in _layers(names.layers, prefixes).items():
        roots[_their_root(names, prefer, state_dict, theirs)] = numbers
    return roots


def _their_root(names: Names, prefer: Prefer, keys: Mapping[str, Any], theirs: str) -> _Root:
    in_place = _Root(theirs, theirs, None)
    if names.has_tied_head and theirs == "" and prefer == "head":
        return _Root("", "", "")
    if not _ends_with_base(names, theirs):
        return in_place
    outside = theirs.removesuffix(names.base)
    if any(key.startswith(outside + head) for key in keys for head in _OTHER_HEADS):
        return in_place
    has_head = any(outside + head + ".weight" in keys for head in installed.HEADS)
    return _Root(theirs, outside, outside) if has_head or prefer == "head" else in_place


def _our_roots(
    names: Names, prefer: Prefer, state_dict: Mapping[str, Any]
) -> dict[_Root, list[int]]:
    """Returns the models of ours in a dict, with the numbers of their layers."""
    roots = {}
    prefixes = _prefixes(state_dict, names.ours_has, names.ours_lacks)
    for ours, numbers in _layers(names.stack, prefixes).items():
        has_head = ours + "lm_head.weight" in state_dict
        if names.base and (has_head or (prefer == "head" and ours == "")):
            roots[_Root(ours + names.base, ours, ours)] = numbers
        else:
            roots[_Root(ours, ours, None)] = numbers
    return roots


def _ends_with_base(names: Names, prefix: str) -> bool:
    return names.base != "" and f".{prefix}".endswith(f".{names.base}")


# ---- theirs to ours --------------------------------------------------------------


def _to_ours(
    names: Names, roots: Mapping[_Root, list[int]], state_dict: Mapping[str, Any]
) -> StateDict:
    result: StateDict = dict(state_dict)
    for root, numbers in roots.items():
        for number in numbers:
            theirs = f"{root.theirs}{names.layers}.{number}."
            ours = f"{root.ours}{names.stack}.{number}."
            _layer_to_ours(names, state_dict, theirs, ours, result)
        for old, new in names.outer.items():
            _rename(result, f"{root.theirs}{old}.", f"{root.ours}{new}.")
        result.pop(root.theirs + "rotary_emb.inv_freq", None)
        if root.head is not None:
            _head_to_ours(root, result)
        _fill_tied(names, root, result)
        if not names.base:
            buffers.add_positions(names.family, root.theirs, result, None)
    return result


def _layer_to_ours(
    names: Names, source: Mapping[str, Any], theirs: str, ours: str, result: StateDict
) -> None:
    for name, target in names.inner.items():
        for kind in ("weight", "bias"):
            key = f"{theirs}{name}.{kind}"
            if key not in source:
                continue
            value = result.pop(key)
            if kind == "weight" and name in names.transposed:
                value = value.t()
            blocks = _blocks(target)
            parts = [value] if len(blocks) == 1 else value.chunk(len(blocks))
            for block, part in zip(blocks, parts, strict=True):
                result[f"{ours}{block}.{kind}"] = part
    for name in names.ignored:
        result.pop(theirs + name, None)


def _head_to_ours(root: _Root, result: StateDict) -> None:
    """Renames the head, or makes a missing one the word embedding."""
    for old in installed.HEADS:
        _rename(result, f"{root.head}{old}.", f"{root.head}lm_head.")
    _share_table(root, result, f"{root.ours}word_embedding.weight")


# ---- ours to theirs --------------------------------------------------------------


def _to_theirs(
    names: Names,
    roots: Mapping[_Root, list[int]],
    state_dict: Mapping[str, Any],
    max_seq_len: int | None,
) -> StateDict:
    result: StateDict = dict(state_dict)
    for root, numbers in roots.items():
        if root.head is not None:
            _share_table(root, result, f"{root.ours}word_embedding.weight")
            head = installed.head_of(names.family)
            _rename(result, f"{root.head}lm_head.", f"{root.head}{head}.")
        for number in numbers:
            theirs = f"{root.theirs}{names.layers}.{number}."
            ours = f"{root.ours}{names.stack}.{number}."
            _layer_to_theirs(names, state_dict, ours, theirs, result)
        for old, new in names.outer.items():
            _rename(result, f"{root.ours}{new}.", f"{root.theirs}{old}.")
        _fill_tied(names, root, result)
        if names.base:
            prefix = f"{root.theirs}{names.layers}."
            buffers.add_to_layers(names.family, prefix, numbers, result, max_seq_len)
        else:
            buffers.add_positions(names.family, root.theirs, result, max_seq_len)
    return result


def _single_layers_to_theirs(
    names: Names,
    source: Mapping[str, Any],
    prefixes: Sequence[str],
    result: StateDict,
    max_seq_len: int | None,
) -> None:
    """Renames parameters of layers that were replaced one by one, which keep their prefixes."""
    for prefix in prefixes:
        _layer_to_theirs(names, source, prefix, prefix, result)
    for root, numbers in _layers(names.layers, prefixes).items():
        layers = f"{root}{names.layers}."
        buffers.add_to_layers(names.family, layers, numbers, result, max_seq_len)


def _layer_to_theirs(
    names: Names, source: Mapping[str, Any], ours: str, theirs: str, result: StateDict
) -> None:
    for name, target in names.inner.items():
        blocks = _blocks(target)
        for kind in ("weight", "bias"):
            keys = [f"{ours}{block}.{kind}" for block in blocks]
            if not all(key in source for key in keys):
                continue
            parts = [result.pop(key) for key in keys]
            value = parts[0] if len(parts) == 1 else join(parts)
            if kind == "weight" and name in names.transposed:
                value = value.t()
            result[f"{theirs}{name}.{kind}"] = value


# ---- both ways -------------------------------------------------------------------


def _blocks(target: str | tuple[str, ...]) -> tuple[str, ...]:
    return (target,) if isinstance(target, str) else target


def _rename(result: StateDict, old: str, new: str) -> None:
    """Renames the parameters of one module."""
    if old == new:
        return
    for kind in ("weight", "bias"):
        if old + kind in result:
            result[new + kind] = result.pop(old + kind)


def _fill_tied(names: Names, root: _Root, result: StateDict) -> None:
    """Adds parameters of a head that are other parameters and were left out under their name."""
    model = root.theirs.removesuffix("encoder.")
    outside = model.removesuffix(f"{names.family}.")
    if outside == model:
        return
    for missing, present in names.tied.items():
        bias = missing.split("decoder.")[0] + "bias"  # every such head has it
        source = outside + present.format(model=model.removeprefix(outside))
        if outside + bias in result and source in result:
            result.setdefault(outside + missing, result[source])


def _share_table(root: _Root, result: StateDict, word_embedding: str) -> None:
    """Makes a head that is missing, or equal to the word embedding, the same tensor."""
    table, head = result.get(word_embedding), result.get(f"{root.head}lm_head.weight")
    if table is not None and (head is None or _are_equal(table, head)):
        result[f"{root.head}lm_head.weight"] = table


def _are_equal(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.is_meta or b.is_meta:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() or torch.equal(a, b)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Concatenates along the first dim; adjacent views of one tensor give a view of it."""
    first = parts[0]
    offset = first.storage_offset()
    for part in parts:
        same = (
            part.device == first.device
            and not part.is_meta
            and part.dtype == first.dtype
            and part.stride() == first.stride()
            and part.shape[1:] == first.shape[1:]
            and part.storage_offset() == offset
            and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        )
        if not same:
            return torch.cat(list(parts))
        offset += part.shape[0] * part.stride(0)
    size = (sum(part.shape[0] for part in parts), *first.shape[1:])
    return first.as_strided(size, first.stride(), first.storage_offset())
