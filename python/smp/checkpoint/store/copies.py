"""Copies checkpoints between stores and folders on request. Imports no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from smp.checkpoint import folder as folders
from smp.checkpoint import manifest as manifests
from smp.checkpoint.manifest import FILE_NAME, Manifest, ManifestError
from smp.checkpoint.store import names, plan, sending
from smp.checkpoint.store.fetching import Fetched
from smp.checkpoint.store.names import Address, Key
from smp.checkpoint.store.objects import ObjectStore
from smp.checkpoint.store.plan import Stored

_PATIENCE_S = 600.0


def newest_complete(store: ObjectStore, tag: str | None) -> Key | None:
    """Returns the newest complete generation, or a tag's newest one; None if there is none."""
    keys = store.generations()
    while (key := plan.newest(keys, tag, folders.PARTIAL_SUFFIX)) is not None:
        if store.stored(key).is_complete:
            return key
        keys.remove(key)
    return None


def find(store: ObjectStore, tag: str | None) -> Key:
    """Returns the same as `newest_complete`, or raises.

    Raises:
        FileNotFoundError: there is none; the text names the existing ones.
    """
    key = newest_complete(store, tag)
    if key is None:
        there = [one.key.name for one in list_generations(store) if one.is_complete]
        asked = "no complete checkpoint" if tag is None else f"no complete checkpoint {tag!r}"
        raise FileNotFoundError(
            f"{store.address} has {asked}; it has: {', '.join(sorted(set(there))) or 'none'}"
        )
    return key


def list_generations(store: ObjectStore) -> list[Stored]:
    """Returns all generations, complete or not, oldest first."""
    return [store.stored(key) for key in store.generations()]


def fetched(address: Address, root: Path, tag: str | None) -> Fetched:
    """Returns a checkpoint of a store as a folder that fetches files on demand.

    Args:
        address: address of the store.
        root: `settings.store_root` of this machine.
        tag: tag of the checkpoint; None: the newest.

    Raises:
        FileNotFoundError: there is no such checkpoint.
    """
    store = ObjectStore(address)
    return Fetched(store, find(store, tag), names.local_folder(root, address), _PATIENCE_S)


def fetch(address: Address, tag: str | None, target: Path) -> Manifest:
    """Copies a checkpoint of a store into a new folder.

    Raises:
        FileExistsError: ``target`` exists.
        FileNotFoundError: there is no such checkpoint.
        ManifestError: an object is damaged.
    """
    folders.check_name(target.name)
    if target.exists():
        raise FileExistsError(f"{target} exists already; give a new folder")
    store = ObjectStore(address)
    key = find(store, tag)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetching-") as temporary:
        source = Fetched(store, key, Path(temporary), _PATIENCE_S)
        source.get_all()
        source.folder.rename(target)
        source.close()
    return manifests.read(target)


def send(
    source: Path, address: Address, told: Callable[[str], None] = lambda _: None
) -> tuple[Key, list[str]]:
    """Copies a checkpoint folder into a store; files that the store has already are skipped.

    Args:
        source: checkpoint folder.
        address: address of the store.
        told: called with the name of each file that has been sent.

    Returns:
        the key of the checkpoint, and the files that were sent.

    Raises:
        FileNotFoundError: ``source`` is no complete checkpoint.
        ManifestError: a file is damaged or missing.
        ValueError: an older release wrote it, whose generations have no order.
    """
    manifest = manifests.read(source)
    if not names.is_ordered(manifest.generation):
        raise ValueError(
            f"{source} has the generation {manifest.generation!r}, which has no time of saving; "
            "`smp ckpt reshard` gives it one"
        )
    key = Key(manifest.generation, _name(source))
    store = ObjectStore(address)
    sizes = {name: record.num_bytes for name, record in manifest.files.items()}
    missing = plan.missing(sizes, store.stored(key).sizes)
    for name in missing:
        manifests.check_file(source / name, manifest.files[name])
        store.put(key, name, source / name)
        told(name)
    found = store.stored(key)
    if lost := plan.missing(sizes, found.sizes):
        raise RuntimeError(f"{address} lacks bytes of {', '.join(lost)}; send it again")
    if not found.is_complete:
        store.put(key, FILE_NAME, source / FILE_NAME)
    return key, missing


def _name(source: Path) -> str:
    name = source.resolve().name
    return name if name.endswith(folders.PARTIAL_SUFFIX) else name + folders.PARTIAL_SUFFIX


def problems(store: ObjectStore, key: Key) -> Iterator[str]:
    """Yields the problems of a checkpoint in a store; reads it once, file by file."""
    with tempfile.TemporaryDirectory(prefix="smp-verify-") as temporary:
        try:
            source = Fetched(store, key, Path(temporary), _PATIENCE_S)
        except (ManifestError, FileNotFoundError) as error:
            yield str(error)
            return
        sizes = {name: record.num_bytes for name, record in source.manifest.files.items()}
        found = store.stored(key).sizes
        for name in sizes:
            if name not in found:
                yield f"{name}: missing"
            elif found[name] != sizes[name]:
                yield f"{name}: {found[name]} bytes, {sizes[name]} in the manifest"
            else:
                try:
                    source.get(name).unlink()
                except ManifestError as error:
                    yield str(error)
        for name in plan.surplus(found, sizes):
            yield f"{name}: not in the manifest"
        source.close()


def prune(store: ObjectStore, keep: int) -> list[Key]:
    """Deletes complete checkpoints beyond the newest ``keep``, and older incomplete ones that have
    not changed for an hour.

    Raises:
        FileNotFoundError: no checkpoint is complete.
    """
    return sending.prune(store, find(store, None), keep, set())
