"""Fills a partitioned model from files of a whole one; each rank reads its own parts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import smp._C as _C
from smp.checkpoint import huggingface
from smp.checkpoint import user_content as user_contents
from smp.checkpoint.entries import ModelState, model_state, names_of_tied, storage_of
from smp.checkpoint.file_generation import content_of
from smp.checkpoint.lazy_tensor import LazyTensor
from smp.model import DistributedModel, engine_of
from smp.model.parts import is_extra_state, set_extra_states
from smp.tensor_parallel import sharding
from smp.tensor_parallel.partial import PARTIAL_MARK

_log = logging.getLogger("smp")


class WholeModel:
    """A state dict in files, until the model that takes it is partitioned.

    Args:
        strict: whether names that are missing or left over are errors.
        translate: translates to the model's names; None: the model's translators do.
        pp_rank: pipeline rank of this process.
    """

    def __init__(
        self,
        strict: bool,
        translate: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
        pp_rank: int,
    ) -> None:
        self._strict = strict
        self._pp_rank = pp_rank
        self._translate = translate

    def open(self, path: Path, tag: str | None) -> None:
        """Maps the files. Not collective.

        Raises:
            FileNotFoundError, ValueError: see `huggingface`.
        """
        self._file = huggingface.find_weights(path, tag)
        self._state = huggingface.open_weights(self._file)

    def user_content(self, unsafe: bool) -> Any:
        """Returns the content saved with the opened model; ``{}`` if none was. Not collective.

        Raises:
            ValueError: it holds objects that are not data, unless ``unsafe``.
        """
        name = self._file.name.removesuffix(huggingface.INDEX)
        file = content_of(self._file.with_name(name))
        return {} if file is None else user_contents.read(file, unsafe)

    def fill(self, model: DistributedModel) -> None:
        """Gives a partitioned model its values. Not collective.

        Raises:
            RuntimeError: names are missing or left over, if strict; shapes differ.
        """
        given = self._translated(model)
        state = model_state(model, self._pp_rank)
        found = _match(model, state, given, self._strict)
        storage = storage_of(model)
        with torch.no_grad():
            for name, held in state.held.items():
                if name in found:
                    value = sharding.slice_of(found[name], sharding.interval_of(held.tensor))
                    made = value.make() if isinstance(value, LazyTensor) else value
                    storage.write(held.tensor, made)
        set_extra_states(model.get_module(), given)
        storage.after_load()

    def _translated(self, model: DistributedModel) -> Mapping[str, Any]:
        state = dict(self._state)
        is_foreign = PARTIAL_MARK not in state
        state.pop(PARTIAL_MARK, None)
        if self._translate is not None:
            return self._translate(state)
        if not is_foreign:
            return state
        lazy = {
            key: LazyTensor.leaf(key, value.shape, value.dtype, functools.partial(_same, value))
            if isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }
        try:
            return engine_of(model).state.translated(lazy)
        except TypeError as error:
            # A translator of another author may need the values.
            _log.warning("smp: %s is translated in memory as a whole: %s", self._file, error)
            return engine_of(model).state.translated(state)


def _match(
    model: DistributedModel, state: ModelState, given: Mapping[str, Any], strict: bool
) -> dict[str, Tensor]:
    """Returns the given tensors by canonical name."""
    others = names_of_tied(state.aliases)
    found: dict[str, Tensor] = {}
    missing, wrong = [], []
    for name, shape in state.shapes.items():
        key = next((n for n in (name, *others.get(name, ())) if n in given), None)
        if key is None:
            missing.append(name)
        elif tuple(given[key].shape) != shape:
            wrong.append(f"'{name}' is {list(given[key].shape)} there and {list(shape)} here")
        else:
            found[name] = given[key]
    known = state.shapes.keys() | state.aliases
    unexpected = sorted(key for key in given if key not in known and not is_extra_state(key))
    problems = list(wrong)
    if strict and missing:
        problems.append(f"missing keys: {missing}")
    if strict and unexpected:
        problems.append(f"unexpected keys: {unexpected}")
    if problems:
        raise RuntimeError(
            f"{_C.rank_prefix()}the file does not fit {type(model.get_module()).__name__}: "
            f"{'; '.join(problems)}. Pass translate_function= for names of another model"
            + ("" if wrong else ", or strict=False to load what fits")
        )
    return found


def _same(value: Tensor) -> Tensor:
    return value
