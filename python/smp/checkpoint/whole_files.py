"""Fills a partitioned model from files of a whole one; each rank reads its own parts."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp.checkpoint import huggingface
from smp.checkpoint import user_content as user_contents
from smp.checkpoint.entries import model_state
from smp.checkpoint.file_generation import content_of
from smp.checkpoint.filling import FitTexts, match
from smp.checkpoint.lazy_tensor import LazyTensor
from smp.model import DistributedModel, engine_of
from smp.model.parts import is_extra_state, set_extra_states
from smp.tensor_parallel import sharding
from smp.tensor_parallel.partial import PARTIAL_MARK
from smp.world.rank import Rank

_log = logging.getLogger("smp")
_TEXTS = FitTexts(
    "file",
    "missing keys: {}",
    "unexpected keys: {}",
    str,
    "Pass translate_function= for names of another model",
    ", or strict=False to load what fits",
)


@dataclass(frozen=True)
class Renaming:
    """Translates names of a state dict; tensors stay as they are in the files.

    Attributes:
        names: new names by stored name; tensors without one are left out.
    """

    names: Mapping[str, str]

    def __call__(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {self.names[key]: value for key, value in state.items() if key in self.names}


@dataclass
class WholeModel:
    """A state dict in files, until the model that takes it is partitioned.

    Attributes:
        strict: whether names that are missing or left over are errors.
        translate: translates to the model's names; None: the model's translators do.
        rank: rank of this process.
    """

    strict: bool
    translate: Callable[[dict[str, Any]], Mapping[str, Any]] | None
    rank: Rank

    @property
    def keeps_values(self) -> bool:
        """Returns whether tensors stay as they are in the files."""
        return self.translate is None or isinstance(self.translate, Renaming)

    def open(self, path: Path, tag: str | None, unsafe: bool) -> Any:
        """Maps the files, and returns the content saved with them; ``{}`` if none was.

        Not collective.

        Raises:
            FileNotFoundError: see `huggingface`.
            ValueError: the files are malformed; the content has objects that are not data, unless
                ``unsafe``.
        """
        self._file = huggingface.find_weights(path, tag)
        self._state = huggingface.open_weights(self._file)
        name = self._file.name.removesuffix(huggingface.INDEX)
        content = content_of(self._file.with_name(name))
        return {} if content is None else user_contents.read(content, unsafe)

    def fill(self, model: DistributedModel) -> None:
        """Gives a partitioned model its values. Not collective.

        Raises:
            RuntimeError: names are missing or left over, if strict; shapes differ.
        """
        given = self._translated(model)
        state = model_state(model, self.rank)
        shapes = {
            key: tuple(getattr(value, "shape", ()))
            for key, value in given.items()
            if not is_extra_state(key)
        }
        found = match(model, state, shapes, {}, self.strict, _TEXTS)
        with torch.no_grad():
            for name, held in state.held.items():
                if name in found:
                    value = sharding.slice_of(given[found[name]], held.slice_)
                    made = value.make() if isinstance(value, LazyTensor) else value
                    state.storage.write(held.tensor, made)
                    if self.keeps_values:  # otherwise changes in place may be there
                        self._state.drop_pages()
        set_extra_states(model.get_module(), given)
        state.storage.after_load()

    def _translated(self, model: DistributedModel) -> Mapping[str, Any]:
        state = dict(self._state)
        is_foreign = PARTIAL_MARK not in state
        state.pop(PARTIAL_MARK, None)
        if isinstance(self.translate, Renaming):
            state = self.translate(state)
        elif self.translate is not None:
            return self.translate(state)
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


def _same(value: Tensor) -> Tensor:
    return value
