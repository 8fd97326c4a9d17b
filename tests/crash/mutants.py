"""The library with one safeguard taken out, each in a way that was, or could be, somebody's mistake.

Each is a patch of the running library and the operation that it harms. `test_mutants.py` proves that the check finds
every one, so a check that finds nothing in the library itself has looked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from holdfast.commit import commit as commit_module
from holdfast.commit import folder
from holdfast.export.partial import Partial
from holdfast.ondisk import manifest
from holdfast.storage import storage
from holdfast.storage.local import disk, durable
from holdfast.storage.local.local_place import LocalPlace
from tests.crash import operations
from tests.crash.record import Rule
from tests.crash.runs import Run


@dataclass(frozen=True)
class Mutant:
    """``run()`` records the operation while ``patch()`` is in force; ``caught_by``: profiles that must find it."""

    name: str
    run: Callable[[], Run]
    caught_by: frozenset[str]
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext


def without(verb: str, path: Callable[[str], bool]) -> Rule:
    """Calls of this kind are not made, and nobody is told."""

    def rule(number: int, call: disk.Call, do: Callable[[], Any]) -> Any:
        return None if call.verb == verb and path(call.path) else do()

    return rule


def _data(path: str) -> bool:
    return path.endswith(".safetensors")


def _half_manifest(path: str) -> bool:
    return ".manifest." in path


def _any(path: str) -> bool:
    return True


def commit_before_sync() -> Run:
    """The manifest stands first, and the data is synced after it, before anybody is told."""
    late = False

    def rule(number: int, call: disk.Call, do: Callable[[], Any]) -> Any:
        return None if call.verb == "sync" and _data(call.path) and not late else do()

    def commit(at: Path, record: manifest.Manifest, replaces: bool) -> None:
        nonlocal late
        real(at, record, replaces)
        late = True
        for file in record.data_files:
            storage_sync(at / file.path)
        late = False

    real = commit_module._commit
    with mock.patch.object(commit_module, "_commit", commit):
        return operations.save_over(rule=rule)


def storage_sync(path: Path) -> None:
    fd = disk.open(path, os.O_RDONLY)
    try:
        disk.sync(fd, path)
    finally:
        os.close(fd)


@contextmanager
def delete_before_replace() -> Iterator[None]:
    """An overwrite makes room before it commits."""

    def replace(path: LocalPlace, data: bytes, temporary: str) -> None:
        old = commit_module._previous(path)
        new = manifest.decode(data, "a manifest")
        if old is not None:
            commit_module.remove_old_files(path.parent, old, new)
        real(path, data, temporary)

    real = LocalPlace.replace_small
    with mock.patch.object(LocalPlace, "replace_small", replace):
        yield


@contextmanager
def sweep_files_first() -> Iterator[None]:
    """A sweep takes data files before the manifest that names them."""

    def delete(root: Path, names: Any, cited: Any, loose: Any, spare: Any = ()) -> None:
        for name in names:
            held = [path for path in (root / name).files_below() if path not in cited.get(name, ())]
            storage.delete(*(root / name / path for path in held if path != manifest.FILE_NAME))
        real(root, names, cited, loose, spare)

    real = folder.delete_checkpoints
    with mock.patch("holdfast.run.retention.delete_checkpoints", delete):
        yield


@contextmanager
def manifest_not_synced_away() -> Iterator[None]:
    """A sweep does not make sure that the manifest is gone before the files go."""

    def delete(root: Path, names: Any, cited: Any, loose: Any, spare: Any = ()) -> None:
        with mock.patch.object(LocalPlace, "sync_folder", lambda path: None):
            real(root, names, cited, loose, spare)

    real = folder.delete_checkpoints
    with mock.patch("holdfast.run.retention.delete_checkpoints", delete):
        yield


@contextmanager
def overwrite_in_place() -> Iterator[None]:
    """The manifest is written where it stands, not beside it."""

    def replace(path: LocalPlace, data: bytes, temporary: str) -> None:
        durable.write_synced(str(path), data)
        path.parent.sync_folder()

    with mock.patch.object(LocalPlace, "replace_small", replace):
        yield


@contextmanager
def cited_files_swept() -> Iterator[None]:
    """Nobody asks who borrows from a step that goes."""
    with mock.patch("holdfast.run.retention.KeptSteps._cited", lambda self, but=(): {}):
        yield


@contextmanager
def plan_outlives_publishing() -> Iterator[None]:
    """A conversion forgets to say that what lies in its folder is no longer what it has copied."""
    with mock.patch.object(Partial, "_forget_plan", lambda self: None):
        yield


@contextmanager
def names_of_content_not_synced() -> Iterator[None]:
    """A conversion notes what it has copied into files whose names may be lost."""
    with mock.patch.object(Partial, "_sync_folders", lambda self, files: None):
        yield


@contextmanager
def trust_what_is_there() -> Iterator[None]:
    """Who finds a folder takes its name for durable."""
    with mock.patch.object(LocalPlace, "make_home", LocalPlace.make_folder):
        yield


ALL = frozenset({"ext4-ordered", "ext4-writeback", "xfs", "btrfs", "nfs", "weak"})
LOCAL = ALL - {"nfs"}

MUTANTS = [
    Mutant("no sync of data", partial(operations.plain_save, rule=without("sync", _data)), ALL),
    Mutant("commit before sync", commit_before_sync, ALL),
    Mutant(
        "no sync of the manifest's bytes", partial(operations.plain_save, rule=without("sync", _half_manifest)), ALL
    ),
    Mutant(
        "no sync of the manifest's bytes, overwriting",
        partial(operations.save_over, rule=without("sync", _half_manifest)),
        ALL,
    ),
    Mutant(
        "no sync of folders", partial(operations.plain_save, rule=without("sync folder", _any)), frozenset({"weak"})
    ),
    Mutant("delete before replace", operations.save_over, ALL, delete_before_replace),
    Mutant("overwrite in place", operations.save_over, ALL, overwrite_in_place),
    Mutant("sweep files first", operations.sweep, ALL, sweep_files_first),
    Mutant("sweep without a sync", operations.sweep, frozenset({"weak"}), manifest_not_synced_away),
    Mutant("sweep what is cited", operations.citing, ALL, cited_files_swept),
    Mutant("no sync of data in the background", partial(operations.background, rule=without("sync", _data)), ALL),
    Mutant(
        "convert: the plan outlives publishing", partial(operations.convert, "torch"), ALL, plan_outlives_publishing
    ),
    Mutant("convert: names are not synced", operations.convert, frozenset({"weak"}), names_of_content_not_synced),
    Mutant(
        "a folder taken for durable",
        partial(operations.killed, 1, managed=False),
        frozenset({"weak"}),
        trust_what_is_there,
    ),
]
