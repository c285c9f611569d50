"""Implements ``smp ckpt``, which shows, checks and converts checkpoints without a job."""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smp.checkpoint import exporting, folder, inspection, resharding
from smp.checkpoint import manifest as manifests
from smp.checkpoint.manifest import FileRecord, Manifest
from smp.checkpoint.reader import FolderReader
from smp.checkpoint.store import copies, names
from smp.checkpoint.store.fetching import Fetched
from smp.checkpoint.store.names import Key
from smp.checkpoint.store.objects import ObjectStore
from smp.world.settings import read_settings

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

    command = _command(commands, "export", _export, "the model in a form that others read")
    command.add_argument("target", type=Path, metavar="TARGET", help="folder to write")
    command.add_argument(
        "--max-shard-size",
        type=_argument(exporting.parse_bytes),
        metavar="SIZE",
        help="of a file of hf; default: 5GB",
    )
    command.add_argument(
        "--format",
        choices=("hf", "dcp", "megatron-dist"),
        default="hf",
        help="hf: safetensors of Hugging Face; dcp: torch.distributed.checkpoint, with optimizer; "
        "megatron-dist: such a folder with the further files of Megatron-Core",
    )
    command.add_argument(
        "--without-optimizer", action="store_true", help="write the model alone, not with hf"
    )
    command.add_argument("--dtype", choices=_FLOATS, help="of weights; default: as saved")
    command.add_argument(
        "--from",
        dest="registrations",
        action="append",
        type=_argument(_registration),
        metavar="FAMILY:CLASS",
        help="translate names of this distributed class (gpt2:GPT2LMHeadModel); default: that of "
        "the checkpoint",
    )

    _add_keys(command)

    text = "read a folder of torch.distributed.checkpoint, or of Megatron-Core"
    command = commands.add_parser("import", help=text, description=text)
    command.set_defaults(execute=lambda arguments: _guarded(_import, arguments))
    command.add_argument("folder", type=Path, metavar="FOLDER", help="what FSDP2 has saved")
    command.add_argument("target", type=Path, metavar="TARGET", help="folder to write")
    _add_keys(command)

    command = _command(commands, "reshard", _reshard, "rewrite as another number of files")
    command.add_argument("target", type=Path, metavar="TARGET", help="folder to write")
    command.add_argument(
        "--parts", type=int, default=1, metavar="N", help="files of each kind; default: 1"
    )

    _command(commands, "list", _list, "which checkpoints are in a folder or store")

    command = _command(commands, "fetch", _fetch, "copy a checkpoint of a store into a folder")
    command.add_argument("target", type=Path, metavar="TARGET", help="folder to write")

    command = _command(commands, "send", _send, "copy a checkpoint folder into a store")
    command.add_argument("target", metavar="ADDRESS", help="such as s3://bucket/prefix")

    command = _command(commands, "prune", _prune, "delete old checkpoints of a store")
    command.add_argument(
        "--keep", type=_argument(_count), required=True, metavar="N", help="complete ones that stay"
    )


def _add_keys(command: argparse.ArgumentParser) -> None:
    """Adds the keys of a state dict of torch.distributed.checkpoint."""
    for what in ("model", "optimizer"):
        command.add_argument(
            f"--{what}-key",
            metavar="KEY",
            help=f"key of the {what} in a state dict of PyTorch; default: {what}",
        )


def _keys(arguments: argparse.Namespace) -> dict[str, str]:
    """Returns the keys that were given, as arguments of functions."""
    given = {name: getattr(arguments, name) for name in ("model_key", "optimizer_key")}
    return {name: key for name, key in given.items() if key is not None}


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


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a type of an argument, whose errors are those of ``parse``."""

    def run(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return run


def _registration(text: str) -> exporting.Translate:
    family, _, module_cls = text.partition(":")
    return exporting.translator(family, module_cls)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r} is not a number of 1 or more")
    return int(text)


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
        fetched = copies.fetched(address, _root(), tag)
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


def _root() -> Path:
    """Returns the folder for files of stores on this machine."""
    return read_settings(os.environ).store_root.expanduser()


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
        store = ObjectStore(names.parse(arguments.folder))
        key = copies.find(store, arguments.tag)
        shown, texts = f"{store.address}/{key.folder()}", _problems_in_store(store, key)
    else:
        path = _checkpoint(arguments.folder, arguments.tag).path
        shown, texts = str(path), inspection.problems(path)
    count = 0
    for text in texts:
        print(f"{shown}: {text}")
        count += 1
    if count:
        print(f"{shown}: {count} problems")
        return 1
    found = _checkpoint(arguments.folder, arguments.tag, with_files=False)
    print(f"{shown}: {_files_text(manifests.read(found.path).files)}: all as written")
    return 0


def _problems_in_store(store: ObjectStore, key: Key) -> Iterator[str]:
    """Yields the problems of the objects, or else of the manifest."""
    is_whole = True
    for text in copies.problems(store, key):
        is_whole = False
        yield text
    if is_whole:
        manifest = copies.fetched(store.address, _root(), key.name).manifest
        yield from inspection.problems_of_entries(manifest)


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
    is_dcp, size = arguments.format != "hf", arguments.max_shard_size
    if is_dcp and size is not None:
        raise ValueError("--max-shard-size is for --format hf; leave it out")
    if arguments.without_optimizer and not is_dcp:
        raise ValueError("--without-optimizer is for --format dcp and megatron-dist; hf has none")
    if _keys(arguments) and not is_dcp:
        raise ValueError("--model-key and --optimizer-key are for --format dcp and megatron-dist")
    if is_dcp:
        dcp = importlib.import_module("smp.checkpoint.dcp")  # takes a second to import
        with_optimizer = not arguments.without_optimizer
        files = dcp.export(
            found.path,
            arguments.target,
            dtype,
            arguments.registrations,
            with_optimizer,
            arguments.format == "megatron-dist",
            **_keys(arguments),
        )
    else:
        files = exporting.export(
            found.path, arguments.target, size or 5 * 10**9, dtype, arguments.registrations
        )
    for file in files:
        print(f"{file}  {bytes_text(file.stat().st_size)}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    dcp = importlib.import_module("smp.checkpoint.dcp_import")
    manifest, left = dcp.import_folder(arguments.folder, arguments.target, **_keys(arguments))
    if left:
        print(f"smp ckpt: neither model nor optimizer, not imported: {', '.join(left)}")
    for name, record in manifest.files.items():
        print(f"{arguments.target / name}  {bytes_text(record.num_bytes)}")
    return 0


def _reshard(arguments: argparse.Namespace) -> int:
    found = _checkpoint(arguments.folder, arguments.tag)
    manifest = resharding.reshard(found.path, arguments.target, arguments.parts)
    for name, record in manifest.files.items():
        print(f"{arguments.target / name}  {bytes_text(record.num_bytes)}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    if not names.is_address(arguments.folder):
        for path in folder.partial_checkpoints(Path(arguments.folder)):
            files = manifests.read(path).files
            print(f"{path.name}  {_files_text(files)}")
        return 0
    for found in copies.list_generations(ObjectStore(names.parse(arguments.folder))):
        if arguments.tag not in (None, found.key.name, found.key.name.removesuffix("_partial")):
            continue
        saved = datetime.datetime.fromtimestamp(found.key.time_s).isoformat(" ", "seconds")
        state = "complete" if found.is_complete else "not complete"
        num_bytes = sum(found.sizes.values())
        print(
            f"{found.key.folder()}  {saved}  {len(found.sizes)} objects, {bytes_text(num_bytes)}, "
            f"{state}"
        )
    return 0


def _fetch(arguments: argparse.Namespace) -> int:
    address = names.parse(arguments.folder)
    manifest = copies.fetch(address, arguments.tag, arguments.target)
    for name, record in manifest.files.items():
        print(f"{arguments.target / name}  {bytes_text(record.num_bytes)}")
    return 0


def _send(arguments: argparse.Namespace) -> int:
    address = names.parse(arguments.target)
    path = Path(arguments.folder)
    if arguments.tag is not None or not (path / manifests.FILE_NAME).exists():
        path = folder.find(path, arguments.tag)
    key, sent = copies.send(path, address, lambda name: print(f"{address}: {name}", flush=True))
    num_there = len(manifests.read(path).files) - len(sent)
    print(f"{address}/{key.folder()}: complete, {len(sent)} files sent, {num_there} were there")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    store = ObjectStore(names.parse(arguments.folder))
    for key in copies.prune(store, arguments.keep):
        print(f"deleted {store.address}/{key.folder()}")
    return 0


def _files_text(files: Mapping[str, FileRecord]) -> str:
    num_bytes = sum(record.num_bytes for record in files.values())
    return f"{len(files)} files, {bytes_text(num_bytes)}"


def bytes_text(count: int) -> str:
    """Formats a number of bytes for users: ``1.5 MB``."""
    if count < 1000:
        return f"{count} B"
    units = ("kB", "MB", "GB", "TB", "PB")
    power = min((len(str(count)) - 1) // 3, len(units))
    return f"{count / 1000**power:.3g} {units[power - 1]}"
