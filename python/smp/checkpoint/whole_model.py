"""Writes a whole model into one file; the first rank gathers and writes it tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from smp.checkpoint import archive, huggingface, safetensors_stream
from smp.checkpoint import user_content as user_contents
from smp.checkpoint.archive import Deferred
from smp.checkpoint.exporting import second_names
from smp.checkpoint.file_generation import FileGeneration
from smp.checkpoint.gathering import Gatherer
from smp.model import DistributedModel, engine_of
from smp.replacement import to_theirs
from smp.world.rank import Rank
from smp.world.roll_call import together

WHAT = "smp.save_checkpoint"


def save_whole(
    path: Path,
    tag: str,
    model: DistributedModel,
    user_content: Any,
    translate: bool,
    generation: str,
    rank: Rank,
) -> None:
    """Writes ``path/<tag>`` and ``path/user_content_<tag>`` in one step. Collective over all ranks.

    Args:
        path: folder; made if missing.
        tag: name of the file. If it ends in ``.safetensors`` the file has that format, otherwise
            PyTorch's. With a name that Hugging Face gives to weights the model's configuration is
            written, too.
        model: partitioned model.
        user_content: user content of the first rank.
        translate: whether to use the translators of the model.
        generation: unique name of this write.
        rank: rank of this process.
    """
    gatherer = Gatherer(model, rank)
    is_safe = tag.endswith(huggingface.SAFETENSORS)
    writing: FileGeneration | None = None

    def begin() -> dict[str, Tensor]:
        nonlocal writing
        if rank.global_rank == 0:
            writing = FileGeneration.begin(path, tag, generation)
        content = gatherer.lazy_state()
        if translate:
            content = to_theirs(engine_of(model).registrations, content)
        return _as_safetensors(content) if is_safe else content

    def write() -> None:
        try:
            if writing is not None:
                _write(writing, model, structure, extra, user_content)
        finally:
            gatherer.drain()

    try:
        content = together(rank, WHAT, begin)
        extra = {} if is_safe else gatherer.extra_state()
        structure = gatherer.plan(content, dict.fromkeys(content, (0,)))
        together(rank, WHAT, write)
    finally:
        if writing is not None:
            writing.abandon()


def _as_safetensors(content: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keeps one name of each tensor, the one of transformers, in the order of the file."""
    left_out = set(second_names(content))
    kept = [(name, tensor) for name, tensor in content.items() if name not in left_out]
    return dict(sorted(kept, key=lambda item: -item[1].dtype.itemsize))


def _write(
    writing: FileGeneration,
    model: DistributedModel,
    structure: Mapping[str, Deferred],
    extra: Mapping[str, Any],
    user_content: Any,
) -> None:
    path, tag = writing.target.parent, writing.target.name
    if tag.endswith(huggingface.SAFETENSORS):
        safetensors_stream.write(writing.temporary, structure)
    else:
        archive.write(writing.temporary, {**structure, **extra})
    content_of_user = {} if user_content is None else user_content
    user_contents.write(writing.content, content_of_user, writing.generation)
    huggingface.write_config(path, tag, model.get_module(), writing.generation)
    writing.commit()
