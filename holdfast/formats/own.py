"""A checkpoint of holdfast: its manifest, checked, and what the manifest names."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from holdfast import events
from holdfast.commit.folder import what_is_there
from holdfast.errors import Damaged, NotACheckpoint, StorageError, Unsupported, Untrusted
from holdfast.ondisk import blocks, manifest
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.signature import Signature
from holdfast.policies.signing.keys import Keys, read_signature
from holdfast.read.damage import Damage, Findings
from holdfast.read.examine import examine
from holdfast.read.files import DataFiles
from holdfast.read.per_rank import value_of_rank
from holdfast.read.ranges import Verify
from holdfast.read.source import ReadStats
from holdfast.storage.place import Place
from holdfast.storage.storage import LinkCheck


class Own:
    """A `Reader` of a checkpoint of holdfast. Nothing is read before it is asked for.

    What ``path`` lacks is looked for ``beside`` it. With ``require``, one of these keys must have signed it.
    """

    reading = ""

    def __init__(self, path: Place, *, beside: Place | None = None, require: Keys | None = None) -> None:
        self.path, self._beside, self._require = path, beside, require
        self.left_out: Mapping[str, str] = {}

    @cached_property
    def manifest(self) -> Manifest:
        return self._proved[0]

    @cached_property
    def _proved(self) -> tuple[Manifest, Signature | None]:
        """The commit record, and the signature of just that, if one is required."""
        try:
            record = read_manifest(self.path)
        except NotACheckpoint:
            if self._beside is None:
                raise
            record = read_manifest(self._beside)
        if self._require is None:
            return record, None
        try:
            return record, read_signature(self.path, record, self._require)
        except Untrusted:
            if self._beside is None:
                raise
            return record, read_signature(self._beside, record, self._require)

    @cached_property
    def files(self) -> DataFiles:
        record, signature = self._proved
        return DataFiles(self.path, record.data_files, self._beside, signature=signature)

    def stored_name(self, name: str) -> str:
        return self.manifest.aliases.get(name, name)

    @property
    def format(self) -> str:
        return self.manifest.format

    @property
    def signed_by(self) -> str | None:
        signature = self._proved[1]
        return None if signature is None else signature.key

    def verifying(self, verify: Verify) -> Verify:
        if self._require is None:
            return verify
        if verify is False:
            raise ValueError("require= has every byte checked that is used: leave out verify=False, or require=")
        return "blocks"

    def per_rank(self, path: str, rank: int) -> Any:
        of_ranks = self.manifest.per_rank[path]
        return value_of_rank(self.files, of_ranks, path, rank, verify=self.verifying(True))

    @property
    def attachments(self) -> Mapping[str, int]:
        return {self._name(path): size for path, size, _ in self.manifest.attachments}

    def attachment(self, name: str) -> bytes:
        for path, size, digest in self.manifest.attachments:
            if self._name(path) == name:
                data = self._small(path)
                if len(data) != size or blocks.digest(data) != digest:
                    raise Damaged(f"{self.path / path} is altered: its digest is not the manifest's")
                signature = self._proved[1]
                if signature is not None and blocks.strong_sum(data) != signature.attachments[name]:
                    raise Damaged(f"{self.path / path} is altered: it is not what was signed")
                return data
        raise KeyError(f"{self.path} has no attachment {name!r}; it has {sorted(self.attachments)}")

    def _small(self, path: str) -> bytes:
        for folder in (self.path, self._beside):
            # In a store each attachment is below its save.
            for name in (path, f"attachments/{self.manifest.save}/{self._name(path)}"):
                if folder is not None:
                    with suppress(FileNotFoundError):
                        return LinkCheck(folder).path(name).read_small()
        raise Damaged(f"{self.path / path} is missing")

    def _name(self, path: str) -> str:
        """The name under which a file was attached."""
        return path.removeprefix("attachments/").removeprefix(f"{self.manifest.save}/")

    def examine(self, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> Findings:
        record, files, stats, part = self.manifest, self.files, ReadStats(), share[0]
        total = sum(file.bytes for file in record.data_files) // share[1]
        with events.task("verify", str(self.path), rank=part, total=total) as task:
            faults = examine(files, record, stats, deep=deep, share=share, progress=task.advance)
            others = [] if part else self.altered_attachments()
        return Findings(record.save, task.done, stats.read, stats.unverified, faults, others)

    def altered_attachments(self) -> list[Damage]:
        """The attached files that are missing, or not what was attached."""
        damages = []
        for path, size, _ in self.manifest.attachments:
            try:
                self.attachment(self._name(path))
            except Damaged as error:
                damages.append(Damage(str(self.path / path), str(error), nbytes=size))
        return damages


def read_manifest(folder: Place) -> Manifest:
    """Read and prove the manifest of a folder."""
    target = folder / manifest.FILE_NAME
    try:
        data = target.read_small()
    except (FileNotFoundError, StorageError) as error:
        refused = isinstance(error, StorageError) and error.errno in (errno.EACCES, errno.EPERM)
        if refused or (isinstance(error, StorageError) and (folder.is_remote or folder.is_dir())):
            raise
        if folder.is_remote:  # looking what is there instead costs requests: `open_checkpoint` does
            raise NotACheckpoint(f"there is no {target}") from None
        raise NotACheckpoint(what_is_there(folder)) from None
    try:
        return manifest.decode(data, str(target))
    except Damaged:
        if not folder.is_remote:
            raise
        return manifest.decode(target.read_small(), str(target))  # on the way a bit may have flipped


def read_known(folder: Place) -> Manifest:
    """`read_manifest`, if we know all that it says: what we did not know would be lost when it is written again."""
    record, target = read_manifest(folder), folder / manifest.FILE_NAME
    if target.read_small().rstrip() != manifest.encode(record):
        raise Unsupported(f"{target} says more than this holdfast knows of: install a newer one")
    return record
