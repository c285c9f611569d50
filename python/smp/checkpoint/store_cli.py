"""Implements the commands of ``smp ckpt`` for stores."""

from __future__ import annotations

import argparse
import datetime
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from smp.checkpoint import folder, inspection
from smp.checkpoint import manifest as manifests
from smp.checkpoint.store import copies, names
from smp.checkpoint.store.names import Address
from smp.checkpoint.store.objects import ObjectStore
from smp.world.settings import read_settings

_Command = Callable[[Any, str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def add_commands(commands: Any, add: _Command) -> None:
    """Adds ``list``, ``fetch``, ``send`` and ``prune``.

    Args:
        commands: subparsers of ``smp ckpt``.
        add: makes a command, which has a folder and a tag.
    """
    add(commands, "list", _list, "which checkpoints are in a folder or store")
    command = add(commands, "fetch", _fetch, "copy a checkpoint of a store into a folder")
    command.add_argument("target", type=Path, metavar="TARGET", help="folder to write")
    command = add(commands, "send", _send, "copy a checkpoint folder into a store")
    command.add_argument("target", metavar="ADDRESS", help="such as s3://bucket/prefix")
    command = add(commands, "prune", _prune, "delete old checkpoints of a store")
    command.add_argument(
        "--keep", type=_count, required=True, metavar="N", help="complete ones that stay"
    )


def root() -> Path:
    """Returns the folder for files of stores on this machine."""
    return read_settings(os.environ).store_root.expanduser()


def verify(address: Address, tag: str | None) -> int:
    """Reads a checkpoint of a store and prints its problems; returns the status."""
    store = ObjectStore(address)
    key = copies.find(store, tag)
    shown, count = f"{address}/{key.folder()}", 0
    for text in copies.problems(store, key):
        print(f"{shown}: {text}")
        count += 1
    if not count:
        manifest = copies.fetched(address, root(), tag).manifest
        for text in inspection.problems_of_entries(manifest):
            print(f"{shown}: {text}")
            count += 1
    if count:
        print(f"{shown}: {count} problems")
        return 1
    num_bytes = sum(record.num_bytes for record in manifest.files.values())
    print(f"{shown}: {len(manifest.files)} files, {bytes_text(num_bytes)}: all as written")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    if not names.is_address(arguments.folder):
        for path in folder.partial_checkpoints(Path(arguments.folder)):
            files = manifests.read(path).files
            num_bytes = sum(record.num_bytes for record in files.values())
            print(f"{path.name}  {len(files)} files, {bytes_text(num_bytes)}")
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


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def bytes_text(count: int) -> str:
    """Formats a number of bytes for users: ``1.5 MB``."""
    if count < 1000:
        return f"{count} B"
    units = ("kB", "MB", "GB", "TB", "PB")
    power = min((len(str(count)) - 1) // 3, len(units))
    return f"{count / 1000**power:.3g} {units[power - 1]}"
