"""Joins the records of the ranks of one job."""

from __future__ import annotations

import filecmp
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smp.observe.verification.comparison import Stage, share_of
from smp.observe.verification.recorder import Rows, Runs
from smp.tensor_parallel import partial
from smp.tensor_parallel.partial import FLAT_MARK, MASTER, SHARDS_MARK


class JobRecords:
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
    def _times(self) -> list[tuple[str, int]]:
        """Returns steps and updates that all ranks have recorded, in the order of time."""
        return [
            (what, n) for what, n in min((f["stages"] for f in self.facts), key=len, default=[])
        ]

    @property
    def num_updates(self) -> int:
        return sum(what == "update" for what, _ in self._times)

    def all(self, fact: str) -> list[str]:
        """Returns the words that all ranks have for a fact, each once.

        Args:
            fact: "dtypes" of parameters; "draws", modules and step functions that draw random
                numbers in one process; "taken", places where a process was given other data than
                its own; or "notes".
        """
        return list(dict.fromkeys(word for facts in self.facts for word in facts[fact]))

    @property
    def half(self) -> str | None:
        """Returns the 16-bit type of the configuration, or of the parameters, or None."""
        found: str | None = self.facts[0]["half"]
        return found or next((d for d in sorted(self.all("dtypes")) if "16" in d), None)

    @property
    def num_batches(self) -> int:
        """Returns the number of data-parallel ranks with inputs of their own."""
        return len(list(self.folder.glob("inputs-*-0.pickle")))

    @property
    def replicas(self) -> list[list[int]]:
        """Returns groups of ranks that hold one whole copy together."""
        groups: dict[int, list[int]] = {}
        for rank, facts in enumerate(self.facts):
            # Neighbours of an rdp_cp group shard parameters together; see `smp.world.groups`.
            copy = facts["ranks"]["rdp_cp"] // facts["sizes"]["shard"]
            groups.setdefault(copy, []).append(rank)
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

    def stages(self, replica: Sequence[int], has_outputs: bool = True) -> Iterator[Stage]:
        """Yields the results of one replica in the order of time.

        Args:
            replica: ranks of the replica.
            has_outputs: whether the outputs of all replicas are among them.
        """
        begin: dict[str, Any] = {}
        for model in self._models:
            begin |= self._merged(replica, f"begin{model}", model, "values")
        yield Stage("begin", items={("value", n): t.double() for n, t in _tensors(begin)})
        for what, number in self._times:
            if what == "step":
                yield self._step(replica, number, has_outputs)
            else:
                yield self._update(replica, number, begin)

    def _merged(self, replica: Sequence[int], name: str, model: int, what: str) -> dict[str, Any]:
        """Returns values that the ranks of a replica hold together, by the user's names."""
        parts = [self.load(rank, name)[what].get(model, {}) for rank in replica]
        return self._named(model, partial.merge(parts))

    def _named(self, model: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Renames values to the names that the model had before modules were replaced."""
        facts, named = self.load(0, f"begin{model}"), dict(values)
        for translate in facts["translators"]:
            named = translate(named)
        return {facts["prefix"] + name: value for name, value in named.items()}

    def _filled(self, replica: Sequence[int], model: int, values: dict[str, Any]) -> dict[str, Any]:
        """Returns values of some parameters and zeros for the others, by the user's names."""
        if not self.load(0, f"begin{model}")["translators"]:
            return self._named(model, values)
        parts = [self.load(rank, f"begin{model}")["values"][model] for rank in replica]
        whole = {
            name: torch.zeros_like(value) if isinstance(value, Tensor) else value
            for name, value in partial.merge(parts).items()
        }
        return self._named(model, whole | values)

    def _step(self, replica: Sequence[int], number: int, has_outputs: bool) -> Stage:
        stage, name = Stage("step", number), f"step{number}"
        if has_outputs:
            stage.items |= {("output", key): row for key, row in self._outputs(name).items()}
        for model in self._models if self.load(0, name)["trains"] else ():
            parts = [self.load(rank, name)["gradients"].get(model, {}) for rank in replica]
            grads = self._filled(replica, model, partial.merge(parts))
            stage.items |= {("gradient", n): t.double() for n, t in _tensors(grads)}
        return stage

    def _outputs(self, name: str) -> dict[str, Tensor]:
        """Returns outputs of all batches, one batch after the other as in a replay."""
        found: dict[str, Tensor] = {}
        begin = 0
        for rank in sorted(self._with_batches, key=self.batch_of):
            content = self.load(rank, name)
            for leaf, rows in enumerate(content["outputs"]):
                for mb, value in enumerate(rows):
                    if isinstance(value, Tensor | int | float):
                        key = f"output {leaf} of microbatch {begin + mb}"
                        found[key] = torch.as_tensor(value, dtype=torch.float64)
            begin += sum(content["counts"])
        return found

    @property
    def _with_batches(self) -> list[int]:
        """Returns one rank for each batch."""
        is_common = self.num_batches == self.facts[0]["sizes"]["rdp"]
        return [
            rank
            for rank, facts in enumerate(self.facts)
            if facts["ranks"]["pp"] == facts["ranks"]["cp"] == 0
            and (facts["ranks"]["tp"] == 0 or not is_common)
        ]

    def _update(self, replica: Sequence[int], number: int, begin: Mapping[str, Any]) -> Stage:
        name = f"update{number}"
        stage = Stage("update", number)
        for group, settings in enumerate(self.load(replica[0], name)["settings"]):
            for key, value in settings.items():
                stage.facts["setting", f"'{key}' of group {group}"] = repr(value)
        for model in self._models:
            facts = self.load(0, f"begin{model}")
            known = {facts["prefix"] + parameter for parameter in facts["parameters"]}
            for key, value in _tensors(self._merged(replica, name, model, "values")):
                kind = "parameter" if key in known or facts["translators"] else "buffer"
                _add_change(stage, kind, key, value, begin.get(key))
        for key, value in self._entries(replica, name).items():
            self._add_entry(stage, replica, key, value, begin)
        return stage

    def _entries(self, replica: Sequence[int], name: str) -> dict[str, dict[str, Any]]:
        """Returns the entries of an optimizer's state by their key and the parameter's name."""
        contents = [self.load(rank, name) for rank in replica]
        entries = partial.merge([content["entries"] for content in contents])
        names: dict[str, int] = {}
        for content in contents:
            names = content["indices"] | names
        found: dict[str, dict[str, Any]] = {}
        for parameter, index in names.items():
            for key, value in entries.get(index, {}).items():
                if isinstance(value, Tensor | int | float):
                    found.setdefault(key, {})[parameter] = value
        return found

    def _add_entry(
        self,
        stage: Stage,
        replica: Sequence[int],
        key: str,
        values: dict[str, Any],
        begin: Mapping[str, Any],
    ) -> None:
        wide = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.dim() > 0}
        if not wide:
            value = torch.as_tensor(next(iter(values.values())), dtype=torch.float64)
            stage.items["optimizer", f"'{key}'"] = value
            return
        for name, value in _tensors(self._filled(replica, self._models[0], wide)):
            if key != MASTER:
                stage.items["optimizer", f"'{key}' of '{name}'"] = value.double()
            elif isinstance(begin.get(name), Tensor):
                _add_change(stage, "parameter", name, value, begin[name])

    # ---- modules

    def counts(self, step: int) -> list[int]:
        """Returns the number of microbatches of each batch of a step."""
        counts: list[int] = self.load(0, f"step{step}")["counts"]
        return counts

    def step_of(self, what: str, number: int) -> int:
        """Returns the step of a stage, or that before an update."""
        steps: int = number if what == "step" else self.load(0, f"update{number}")["steps"] - 1
        return steps

    def modules(self, step: int, counts: Sequence[int]) -> Runs:
        """Returns places of ranks and results of their modules, by microbatch of all batches.

        Args:
            step: number of the step.
            counts: number of microbatches of each batch.
        """
        found = []
        for rank, facts in enumerate(self.facts):
            begin = 0 if len(self.facts) == 1 else sum(counts[: self.batch_of(rank)])
            rows: Rows = self.load(rank, f"step{step}")["modules"]
            moved = {(begin + mb, name, call): row for (mb, name, call), row in rows.items()}
            found.append((facts["place"], moved))
        return found

    # ---- copies

    def apart(self) -> tuple[str, str, str] | None:
        """Returns a parameter, and the places of two ranks with different copies of it, or None.

        Copies are compared after the first update where they differ.
        """
        for number in range(self.num_updates):
            for model in self._models:
                found = self._apart_in(number, model)
                if found is not None:
                    return found
        return None

    def _apart_in(self, number: int, model: int) -> tuple[str, str, str] | None:
        first: dict[Any, tuple[str, Tensor]] = {}
        parameters = set(self.load(0, f"begin{model}")["parameters"])
        for rank, facts in enumerate(self.facts):
            values = self.load(rank, f"update{number}")["values"][model]
            slices, flats = values.get(SHARDS_MARK) or {}, values.get(FLAT_MARK) or {}
            for name in values:
                if name not in parameters or name in flats:
                    continue
                value = values[name].double()
                place, other = first.setdefault((name, slices.get(name)), (facts["place"], value))
                if share_of(value, other) > 1e-6:
                    return name, place, facts["place"]
        return None


def same_inputs(first: JobRecords, second: JobRecords) -> bool:
    """Returns whether two jobs have read equal inputs, in one batch per step."""
    own, others = (sorted(records.folder.glob("*-*.pickle")) for records in (first, second))
    return (
        first.num_batches == second.num_batches == 1
        and [path.name for path in own] == [path.name for path in others]
        and all(filecmp.cmp(*paths, shallow=False) for paths in zip(own, others, strict=True))
    )


def _add_change(stage: Stage, kind: str, name: str, value: Tensor, before: Any) -> None:
    """Adds the change of a value, which is less exact than the value."""
    if not isinstance(before, Tensor) or before.shape != value.shape:
        before = torch.zeros_like(value)
    stage.items[kind, name] = value.double() - before.double()
    stage.slack[kind, name] = 0.0
    if value.is_floating_point():
        norm = float(value.double().norm())
        stage.slack[kind, name] = 8 * torch.finfo(value.dtype).eps * norm


def _tensors(values: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    return ((name, value) for name, value in values.items() if isinstance(value, Tensor))
