"""Implements ``smp ckpt``, which shows, checks and converts checkpoints without a job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import exporting, folder, inspection, resharding, store_cli
from smp.checkpoint import manifest as manifests
from smp.checkpoint.manifest import Manifest
from smp.checkpoint.reader import FolderReader
from smp.checkpoint.store import copies, names
from smp.checkpoint.store.fetching import Fetched
from smp.checkpoint.store_cli import bytes_text

_FLOATS = ("float32", "float16", "bfloat16", "float64")
_MAX_LISTED = 50


def add_parser(subparsers: Any) -> None:
    """Adds the command ``ckpt``; its default ``execute`` takes the arguments, returns the status.

    Status 0: done without a problem; 1: there is a problem, or two checkpoints differ.
    """
    parser = subparsers.add_parser(
        "ckpt",
        help="look at checkpoints, check and convert them",
        description="Looks at checkpoints, checks and converts them; needs no device.",
    )
    commands = parser.add_subparsers(dest="ckpt_command", metavar="COMMAND", required=True)

    command = _command(commands, "info", _info, "what a checkpoint holds")
    command.add_argument("--entries", action="store_true", help="list all tensors")
    command.add_argument("--json", action="store_true", help="for programs")

    _command(commands, "verify", _verify, "read all files and compare their checksums")

    command = _command(commands, "diff", _diff, "in what two checkpoints differ; any layouts")
    command.add_argument("second", metavar="SECOND", help="folder or address")

    command = _command(commands, "export", _export, "the model as safetensors of Hugging Face")
    command.add_argument("target", type=Path, metavar="TARGET", help="folder to write")
    command.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="default: 5GB"
    )
    command.add_argument("--dtype", choices=_FLOATS, help="of weights; default: as saved")
    command.add_argument(
        "--from",
        dest="registrations",
        action="append",
        type=_registration,
        metavar="FAMILY:CLASS",
        help="translate names of this distributed class (gpt2:GPT2LMHeadModel); default: that of "
        "the checkpoint",
    )

    command = _command(commands, "reshard", _reshard, "rewrite as another number of files")
    command.add_argument("target", type=Path, metavar="TARGET", help="folder to write")
    command.add_argument(
        "--parts", type=int, default=1, metavar="N", help="files of each kind; default: 1"
    )
    store_cli.add_commands(commands, _command)


def _command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="a checkpoint, where checkpoints are saved, or an address such as s3://bucket/prefix",
    )
    parser.add_argument("--tag", help="of the checkpoint, where several are; default: the newest")
    parser.set_defaults(execute=lambda arguments: _guarded(run, arguments))
    return parser


def _guarded(run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace) -> int:
    try:
        return run(arguments)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        print(f"smp ckpt: {error}", file=sys.stderr)
        return 1


def _size(text: str) -> int:
    try:
        return exporting.parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _registration(text: str) -> exporting.Translate:
    family, _, module_cls = text.partition(":")
    try:
        return exporting.translator(family, module_cls)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint that a command works on.

    Attributes:
        path: folder of the checkpoint.
        shown: name of the checkpoint in printed text.
        fetched: keeps the files fetched from a store while this object lives.
    """

    path: Path
    shown: str
    fetched: Fetched | None = None


def _checkpoint(place: str, tag: str | None = None, with_files: bool = True) -> _Checkpoint:
    """Returns the folder itself if it is a checkpoint, else the tag's or newest one in it.

    Args:
        place: a folder or an address.
        tag: tag of the checkpoint; None: the newest.
        with_files: whether to fetch all files from a store, not the manifest alone.
    """
    if names.is_address(place):
        address = names.parse(place)
        fetched = copies.fetched(address, store_cli.root(), tag)
        if with_files:
            fetched.get_all()
        return _Checkpoint(fetched.folder, f"{address}/{fetched.key.folder()}", fetched)
    path = Path(place)
    if not path.exists():
        raise FileNotFoundError(
            f"{place} does not exist; name a checkpoint, or the folder of several"
        )
    if not path.is_dir():
        raise NotADirectoryError(f"{place} is a file; name the folder of the checkpoint")
    if tag is not None or (not (path / manifests.FILE_NAME).exists() and path.is_dir()):
        path = folder.find(path, tag)
    return _Checkpoint(path, str(path))


def _info(arguments: argparse.Namespace) -> int:
    found = _checkpoint(arguments.folder, arguments.tag, with_files=False)
    manifest = manifests.read(found.path)
    if arguments.json:
        print(json.dumps(_facts(found.shown, manifest, arguments.entries), indent=2))
        return 0
    sizes = ", ".join(f"{axis} {size}" for axis, size in manifest.layout.sizes.items())
    print(f"folder      {found.shown}")
    print(f"generation  {manifest.generation}")
    print(f"written by  {', '.join(f'{n} {v}' for n, v in manifest.versions.items())}")
    print(f"layout      {sizes}")
    num_bytes = sum(record.num_bytes for record in manifest.files.values())
    print(f"files       {len(manifest.files)}, {bytes_text(num_bytes)}")
    for total in inspection.totals(manifest):
        print(
            f"{total.kind:<11} {total.num_entries} tensors, {total.num_elements:,} elements, "
            f"{bytes_text(total.num_bytes)}"
        )
    print(f"values      {', '.join(manifest.values) or 'none'}")
    if arguments.entries:
        for name, entry in manifest.entries.items():
            print(f"  {name}  {entry.dtype} {list(entry.shape)}  {len(entry.blocks)} blocks")
    return 0


def _facts(shown: str, manifest: Manifest, with_entries: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "folder": shown,
        "generation": manifest.generation,
        "versions": manifest.versions,
        "layout": {"config": manifest.layout.config, "sizes": manifest.layout.sizes},
        "files": {name: record.num_bytes for name, record in manifest.files.items()},
        "kinds": {
            t.kind: {"tensors": t.num_entries, "elements": t.num_elements, "bytes": t.num_bytes}
            for t in inspection.totals(manifest)
        },
        "values": manifest.values,
    }
    if with_entries:
        facts["entries"] = {
            name: {"dtype": e.dtype, "shape": list(e.shape), "blocks": len(e.blocks)}
            for name, e in manifest.entries.items()
        }
    return facts


def _verify(arguments: argparse.Namespace) -> int:
    if names.is_address(arguments.folder):
        return store_cli.verify(names.parse(arguments.folder), arguments.tag)
    path = _checkpoint(arguments.folder, arguments.tag).path
    count = 0
    for text in inspection.problems(path):
        print(f"{path}: {text}")
        count += 1
    if count:
        print(f"{path}: {count} problems")
        return 1
    manifest = manifests.read(path)
    num_bytes = sum(record.num_bytes for record in manifest.files.values())
    print(f"{path}: {len(manifest.files)} files, {bytes_text(num_bytes)}: all as written")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    one, other = _checkpoint(arguments.folder, arguments.tag), _checkpoint(arguments.second)
    first, second = FolderReader(one.path), FolderReader(other.path)
    count = 0
    with first, second:
        for difference in inspection.differences(first, second):
            count += 1
            if count <= _MAX_LISTED:
                print(f"{difference.name}: {difference.text}")
    if count > _MAX_LISTED:
        print(f"and {count - _MAX_LISTED} more")
    num_entries = len(first.manifest.entries)
    print(f"{count} differences" if count else f"equal: {num_entries} tensors and all values")
    return 1 if count else 0


def _export(arguments: argparse.Namespace) -> int:
    found = _checkpoint(arguments.folder, arguments.tag)
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    files = exporting.export(
        found.path, arguments.target, arguments.max_shard_size, dtype, arguments.registrations
    )
    for file in files:
        print(f"{file}  {bytes_text(file.stat().st_size)}")
    return 0


def _reshard(arguments: argparse.Namespace) -> int:
    found = _checkpoint(arguments.folder, arguments.tag)
    manifest = resharding.reshard(found.path, arguments.target, arguments.parts)
    for name, record in manifest.files.items():
        print(f"{arguments.target / name}  {bytes_text(record.num_bytes)}")
    return 0
