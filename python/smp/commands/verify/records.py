"""Joins the records of the ranks of one job."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp.optim.state import MASTER
from smp.tensor_parallel import partial
from smp.tensor_parallel.partial import FLAT_MARK, MARKS, SHARDS_MARK

#: kind of a quantity, and its name
Key = tuple[str, str]


@dataclass
class Stage:
    """Quantities of one call of a step function, or of one update, that are compared.

    Attributes:
        what: "begin", "step" or "update".
        number: number of the step or update, counted from 0.
        items: tensors in float64, by kind and name.
        slack: rounding errors of the values they were computed from, as a norm.
        settings: settings of the optimizer's groups.
    """

    what: str
    number: int
    items: dict[Key, Tensor] = field(default_factory=dict)
    slack: dict[Key, float] = field(default_factory=dict)
    settings: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Copies:
    """Two ranks whose copies of a tensor differ.

    Attributes:
        name: name of the parameter.
        places: words for the two ranks.
        share: norm of the difference over that of the first copy.
    """

    name: str
    places: tuple[str, str]
    share: float


class Records:
    """Records of one job.

    Args:
        folder: folder of the job's order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks = sorted(folder.glob("rank*"), key=lambda path: int(path.name[4:]))
        self.facts = [json.loads((path / "facts.json").read_text()) for path in self._ranks]

    # ---- facts

    @property
    def num_steps(self) -> int:
        return min((facts["num_steps"] for facts in self.facts), default=0)

    @property
    def num_updates(self) -> int:
        return min((facts["num_updates"] for facts in self.facts), default=0)

    @property
    def dtypes(self) -> set[str]:
        return {dtype for facts in self.facts for dtype in facts["dtypes"]}

    @property
    def half(self) -> str | None:
        """Returns the 16-bit type of the configuration, or of the parameters, or None."""
        found: str | None = self.facts[0]["half"]
        return found or next((d for d in sorted(self.dtypes) if "16" in d), None)

    @property
    def draws(self) -> list[str]:
        """Returns modules and step functions that draw random numbers in one process."""
        return list(dict.fromkeys(name for facts in self.facts for name in facts["draws"]))

    @property
    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for facts in self.facts for note in facts["notes"]))

    @property
    def taken(self) -> list[str]:
        """Returns places where the process was given other data than its own."""
        return [place for facts in self.facts for place in facts["taken"]]

    @functools.cached_property
    def digests(self) -> list[str]:
        """Returns digests of all inputs: arguments, and other data that enter a step."""
        return [path.read_text() for path in sorted(self.folder.glob("*-*.digest"))]

    @property
    def num_batches(self) -> int:
        """Returns the number of data-parallel ranks with inputs of their own."""
        return len(list(self.folder.glob("inputs-*-0.pickle")))

    @property
    def replicas(self) -> list[list[int]]:
        """Returns groups of ranks that hold one whole copy together."""
        groups: dict[int, list[int]] = {}
        for rank, facts in enumerate(self.facts):
            # Neighbours along rdp shard parameters together; see `smp.world.groups`.
            groups.setdefault(facts["ranks"]["rdp"] // facts["sizes"]["shard"], []).append(rank)
        return list(groups.values())

    def batch_of(self, rank: int) -> int:
        """Returns the index of the batch that a rank works on."""
        kind = "rdp" if self.num_batches == self.facts[rank]["sizes"]["rdp"] else "dp"
        idx: int = self.facts[rank]["ranks"][kind]
        return idx

    # ---- files

    @functools.lru_cache(maxsize=64)  # noqa: B019 (the records live as long as the command)
    def load(self, rank: int, name: str) -> dict[str, Any]:
        content: dict[str, Any] = torch.load(self._ranks[rank] / f"{name}.pt", weights_only=False)
        return content

    @functools.cached_property
    def _models(self) -> list[int]:
        return [i for i in range(64) if (self._ranks[0] / f"begin{i}.pt").exists()]

    # ---- putting together

    def stages(self, replica: Sequence[int]) -> Iterator[Stage]:
        """Yields the results of one replica in the order of time."""
        begin = self.begin(replica)
        yield Stage("begin", 0, {("value", n): t for n, t in _tensors(begin)})
        update = 0
        for step in range(self.num_steps):
            while update < self.num_updates and self.load(0, f"update{update}")["steps"] <= step:
                yield self._update(replica, update, begin)
                update += 1
            yield self._step(replica, step)
        for rest in range(update, self.num_updates):
            yield self._update(replica, rest, begin)

    def begin(self, replica: Sequence[int]) -> dict[str, Any]:
        """Returns the values before the first step."""
        values: dict[str, Any] = {}
        for model in self._models:
            parts = [self.load(rank, f"begin{model}")["values"] for rank in replica]
            values |= self._named(model, partial.merge(parts))
        return values

    def parameters(self) -> set[str]:
        """Returns names of parameters, except those that one process names differently."""
        return {
            self.load(0, f"begin{model}")["prefix"] + name
            for model in self._models
            for name in self.load(0, f"begin{model}")["parameters"]
        }

    def _named(self, model: int, values: Mapping[Any, Any]) -> dict[str, Any]:
        """Renames values to the names that the model had before modules were replaced."""
        facts, named = self.load(0, f"begin{model}"), dict(values)
        for translate in facts["translators"]:
            named = translate(named)
        return {facts["prefix"] + name: value for name, value in named.items()}

    def _filled(self, replica: Sequence[int], model: int, values: dict[str, Any]) -> dict[str, Any]:
        """Returns values of some parameters and zeros for the others, by the user's names."""
        if not self.load(0, f"begin{model}")["translators"]:
            return self._named(model, values)
        parts = [self.load(rank, f"begin{model}")["values"] for rank in replica]
        whole = {
            name: torch.zeros_like(value) if isinstance(value, Tensor) else value
            for name, value in partial.merge(parts).items()
        }
        return self._named(model, whole | values)

    def _step(self, replica: Sequence[int], number: int) -> Stage:
        stage = Stage("step", number)
        name = f"step{number}"
        for key, row in self._outputs(name).items():
            stage.items["output", key] = row
        if not self.load(0, name)["trains"]:
            return stage
        for model in self._models:
            parts = [self.load(rank, name)["gradients"].get(model, {}) for rank in replica]
            grads = self._filled(replica, model, partial.merge(parts))
            stage.items |= {("gradient", n): t for n, t in _tensors(grads)}
        return stage

    def _outputs(self, name: str) -> dict[str, Tensor]:
        """Returns outputs of all batches, one batch after the other as in a replay."""
        found: dict[str, Tensor] = {}
        begin = 0
        for rank, facts in sorted(enumerate(self.facts), key=lambda x: self.batch_of(x[0])):
            ranks = facts["ranks"]
            if ranks["pp"] != 0 or (ranks["tp"] != 0 and self._has_common_batches):
                continue
            content = self.load(rank, name)
            for leaf, rows in enumerate(content["outputs"]):
                for mb, row in enumerate(rows):
                    value = row[1] if isinstance(row, tuple) else row
                    if isinstance(value, Tensor | int | float):
                        key = f"output {leaf} of microbatch {begin + mb}"
                        found[key] = torch.as_tensor(value, dtype=torch.float64)
            begin += sum(content["counts"])
        return found

    @property
    def _has_common_batches(self) -> bool:
        return bool(self.num_batches == self.facts[0]["sizes"]["rdp"])

    def _update(self, replica: Sequence[int], number: int, begin: Mapping[str, Any]) -> Stage:
        name = f"update{number}"
        contents = [self.load(rank, name) for rank in replica]
        stage = Stage("update", number, settings=contents[0]["settings"])
        states = [{**c["entries"]["state"], **_marks(c["entries"])} for c in contents]
        entries = partial.merge(states)
        parameters = self.parameters()
        for model in self._models:
            values = self._named(model, partial.merge([c["values"][model] for c in contents]))
            for key, value in _tensors(values):
                kind = "buffer"
                if key in parameters or (self.load(0, f"begin{model}")["translators"]):
                    kind = "parameter"
                before = begin.get(key)
                if not isinstance(before, Tensor) or before.shape != value.shape:
                    before = torch.zeros_like(value)
                stage.items[kind, key] = value - before.double()
                stage.slack[kind, key] = _rounding(values[key])
        self._add_entries(stage, replica, contents, entries, begin)
        return stage

    def _add_entries(
        self,
        stage: Stage,
        replica: Sequence[int],
        contents: Sequence[dict[str, Any]],
        entries: Mapping[Any, Any],
        begin: Mapping[str, Any],
    ) -> None:
        """Adds the optimizer's entries to a stage, by names of parameters."""
        indices: dict[str, int] = {}
        for content in contents:
            indices = content["indices"] | indices
        by_key: dict[str, dict[str, Any]] = {}
        for name, index in indices.items():
            for key, value in entries.get(index, {}).items():
                if isinstance(value, Tensor | int | float):
                    by_key.setdefault(key, {})[name] = value
        for key, values in by_key.items():
            wide = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.dim() > 0}
            named = self._filled(replica, self._models[0], wide) if wide else {}
            single = next((v for n, v in values.items() if n not in wide), None)
            if single is not None and not wide:
                value = torch.as_tensor(single, dtype=torch.float64)
                stage.items["optimizer", f"'{key}'"] = value
            for name, value in _tensors(named):
                if key != MASTER:
                    stage.items["optimizer", f"'{key}' of '{name}'"] = value
                elif isinstance(begin.get(name), Tensor):
                    stage.items["parameter", name] = value - begin[name].double()
                    stage.slack["parameter", name] = _rounding(named[name])

    # ---- modules

    def modules(self, step: int, counts: Sequence[int]) -> dict[Any, list[tuple[str, list[Any]]]]:
        """Returns places and rows of modules, by microbatch of all batches, name and call.

        Args:
            step: number of the step.
            counts: number of microbatches of each batch.
        """
        found: dict[Any, list[tuple[str, list[Any]]]] = {}
        for rank, facts in enumerate(self.facts):
            begin = 0 if len(self.facts) == 1 else sum(counts[: self.batch_of(rank)])
            for (mb, name, call), rows in self.load(rank, f"step{step}")["modules"].items():
                found.setdefault((begin + mb, name, call), []).append((facts["place"], rows))
        return found

    # ---- copies

    def apart(self) -> Copies | None:
        """Returns two ranks whose copies differ, after the first update where that happens."""
        for number in range(self.num_updates):
            for model in self._models:
                found = self._apart_in(number, model)
                if found is not None:
                    return found
        return None

    def _apart_in(self, number: int, model: int) -> Copies | None:
        first: dict[Any, tuple[int, Tensor]] = {}
        parameters = set(self.load(0, f"begin{model}")["parameters"])
        for rank in range(len(self.facts)):
            values = self.load(rank, f"update{number}")["values"][model]
            slices, flats = values.get(SHARDS_MARK) or {}, values.get(FLAT_MARK) or {}
            for name, value in values.items():
                if name not in parameters or name in flats:
                    continue
                key = (name, slices.get(name))
                other = first.setdefault(key, (rank, value))
                share = _share(value.double(), other[1].double())
                if share > 1e-6:
                    places = (self.facts[other[0]]["place"], self.facts[rank]["place"])
                    return Copies(name, places, share)
        return None


def _marks(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in MARKS if key in state}


def _tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in values.items():
        if isinstance(value, Tensor):
            yield name, value.double()


def _rounding(value: Tensor) -> float:
    if not value.is_floating_point():
        return 0.0
    return 8 * torch.finfo(value.dtype).eps * float(value.double().norm())


def _share(real: Tensor, expected: Tensor) -> float:
    if real.shape != expected.shape:
        return float("inf")
    size = float(expected.norm())
    distance = float((real - expected).norm())
    return distance / size if size else (float("inf") if distance else 0.0)
