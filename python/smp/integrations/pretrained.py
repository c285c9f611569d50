"""``smp.save_huggingface``: a folder of ``from_pretrained``, written by the ranks at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import file_system, huggingface, left_over, safetensors_stream, shards
from smp.checkpoint import folder as folders
from smp.checkpoint.archive import Deferred
from smp.checkpoint.gathering import Gatherer
from smp.checkpoint.lazy_tensor import LazyTensor
from smp.checkpoint.locks import OwnerLock
from smp.integrations import adapters as adapters_of_peft
from smp.integrations.serving import Served, problem_of
from smp.model import DistributedModel, engine_of
from smp.world import runtime
from smp.world.rank import Rank
from smp.world.roll_call import roll_call, together

WHAT = "smp.save_huggingface"
_GENERATION_CONFIG = "generation_config.json"


def save_huggingface(
    model: DistributedModel,
    folder: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Writes the model as ``save_pretrained`` of the plain model does. Collective over all ranks.

    Each file is written by a rank that has most of it, so ranks write at once if there are several
    files. A writer gets the tensors that others have one at a time; no rank has the whole model.
    Files get their names when all are complete, the index last. The optimizer is not written.

    Args:
        model: partitioned model. Adapters of PEFT are merged into the weights.
        folder: folder that all ranks see; made if missing.
        max_shard_bytes: most bytes of tensors in a file; a single tensor may be larger.
        dtype: dtype of floating-point tensors; None: the model's own.

    Returns:
        all files, on all ranks.

    Raises:
        ValueError: on all ranks, if arguments are invalid, or differ, if the weights are
            quantized, or if adapters cannot be merged.
        RuntimeError: on all ranks, if one could not write, or the folder has safetensors files
            already.
        PeerFailure: not all ranks have called this.
    """
    current = runtime.current()
    rank, path = current.rank, Path(folder)
    problem = problem_of(model, dtype, "merged", "files")
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        problem = problem or f"max_shard_bytes must be at least 1, got {max_shard_bytes!r}"
    call = {
        "model": model._idx if isinstance(model, DistributedModel) else None,
        "folder": os.fspath(folder),
        "max_shard_bytes": max_shard_bytes,
        "dtype": str(dtype),
        "error": problem,
    }
    snippet = "smp.save_huggingface(model, folder)"
    generation = roll_call(rank, WHAT, call, snippet, folders.new_generation())[0]
    current.wrapped.spread_written()
    writing = _Writing(path, generation, rank)
    try:
        together(rank, WHAT, writing.begin)
        together(rank, WHAT, writing.join)
        plan = together(rank, WHAT, lambda: _Plan.of(model, rank, max_shard_bytes, dtype))

        def write() -> None:
            try:
                plan.write(writing.temporary, rank)
            finally:
                plan.gatherer.drain()

        together(rank, WHAT, write)
        configs = _configs_of(model, plan)
        return together(rank, WHAT, lambda: writing.commit(plan, configs))
    finally:
        writing.end()


class _Writing:
    """A write of files into a folder, which get their names when all are there.

    Attributes:
        temporary: folder in which they lie until then.
    """

    def __init__(self, folder: Path, generation: str, rank: Rank) -> None:
        self._folder, self._generation, self._rank = folder, generation, rank
        self.temporary = left_over.temporary(folder, "shards", generation)
        self._lock: OwnerLock | None = None

    def begin(self) -> None:
        """Makes the temporary folder on the first rank."""
        if self._rank.global_rank != 0:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if any(self._folder.glob("*.safetensors*")):
            raise FileExistsError(
                f"{self._folder} already has safetensors files; give another folder"
            )
        self._lock = left_over.own(self._folder, self._generation)
        self.temporary.mkdir()

    def join(self) -> None:
        """Waits until this rank sees the temporary folder."""
        host = self._rank.launch.hosts[self._rank.global_rank]
        file_system.wait_until_seen(
            self.temporary,
            f"host {host} does not see {self.temporary}, which the first rank created: "
            f"{self._folder} must be a folder that all hosts share",
        )

    def commit(self, plan: _Plan, configs: Mapping[str, str]) -> list[Path]:
        """Gives all files their names on the first rank, and returns them."""
        names = shards.file_names(len(plan.shards))
        index = [shards.INDEX_NAME] if len(names) > 1 else []
        if self._lock is not None:
            for name, text in configs.items():
                file_system.write_file(self._folder / name, text.encode(), self._generation)
            for name in names:
                os.replace(self.temporary / name, self._folder / name)
            file_system.sync_folder(self._folder)
            for name in index:
                content = shards.index_of(plan.shards, plan.sizes)
                file_system.write_file(self._folder / name, content, self._generation)
        return [self._folder / name for name in (*names, *index, *configs)]

    def end(self) -> None:
        """Deletes what is not committed."""
        if self._lock is not None:
            left_over.settle(self._folder, self._generation)
            self._lock.release(delete=True)
            self._lock = None


@dataclass(frozen=True)
class _Plan:
    """The files of a model, and the rank that writes each.

    Attributes:
        gatherer: gathers the tensors at their writers.
        tensors: tensors by name, to be made at their writers in the order of the files.
        sizes: bytes of each tensor.
        shards: names of the tensors in each file.
        writers: global rank that writes each file.
    """

    gatherer: Gatherer
    tensors: Mapping[str, Deferred]
    sizes: Mapping[str, int]
    shards: Sequence[Sequence[str]]
    writers: Sequence[int]

    @classmethod
    def of(
        cls, model: DistributedModel, rank: Rank, max_shard_bytes: int, dtype: torch.dtype | None
    ) -> _Plan:
        served = Served.of(model, rank, dtype, "merged", "files")
        # Large elements first, as files have them.
        content = dict(sorted(served.content.items(), key=lambda item: -item[1].dtype.itemsize))
        sizes = {name: tensor.numel() * tensor.dtype.itemsize for name, tensor in content.items()}
        cut = shards.cut(sizes, max_shard_bytes)
        owned = _owned(served.gatherer, content, rank)
        writers = shards.choose_writers(cut, sizes, owned)
        order = shards.interleaved(cut, writers, sizes)
        tensors = served.gatherer.plan(
            {name: content[name] for name in order},
            {name: (writer,) for name, writer in order.items()},
        )
        return cls(served.gatherer, tensors, sizes, cut, writers)

    def write(self, folder: Path, rank: Rank) -> None:
        """Writes the files of this rank."""
        files = zip(shards.file_names(len(self.shards)), self.shards, self.writers, strict=True)
        for file, names, writer in files:
            if writer == rank.global_rank:
                tensors = {name: self.tensors[name] for name in names}
                safetensors_stream.write(folder / file, tensors)


def _owned(
    gatherer: Gatherer, content: Mapping[str, torch.Tensor], rank: Rank
) -> dict[str, dict[int, int]]:
    """Returns the bytes of what each tensor is made of, by name and by rank that has them."""
    by_leaf: dict[str, dict[int, int]] = {}
    for name, named in gatherer.state.tensors.items():
        num_bytes = named.tensor.dtype.itemsize * torch.Size(named.shape).numel()
        ways = {each: gatherer.sources(name, each) for each in range(rank.world_size)}
        by_leaf[name] = {
            each: num_bytes // len(sources) for each, sources in ways.items() if each in sources
        }
    owned: dict[str, dict[int, int]] = {}
    for name, tensor in content.items():
        owned[name] = {}
        for leaf in tensor.leaves if isinstance(tensor, LazyTensor) else ():
            for owner, num_bytes in by_leaf[leaf].items():
                owned[name][owner] = owned[name].get(owner, 0) + num_bytes
    return owned


def _configs_of(model: DistributedModel, plan: _Plan) -> dict[str, str]:
    """Returns the configuration files of a model of transformers, by name; none of other models."""
    module: Any = model.get_module()
    if adapters_of_peft.is_adapted(module):
        module = module.get_base_model()
    text = huggingface.config_of(module)
    if text is None:
        return {}
    former = {r.dist_module: r.module_cls for r in engine_of(model).registrations}
    config = json.loads(text)
    config["architectures"] = [former.get(type(module), type(module)).__name__]
    dtypes = (tensor.dtype for tensor in plan.tensors.values() if tensor.dtype.is_floating_point)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # by the release of transformers
    config[key] = str(next(dtypes, config.get(key))).removeprefix("torch.")
    found = {huggingface.CONFIG: json.dumps(config, indent=2, sort_keys=True) + "\n"}
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        found[_GENERATION_CONFIG] = generation.to_json_string()
    return found
