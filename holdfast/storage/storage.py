"""What is done with places together: one as a store, many deleted at once, links that lead out of a checkpoint.

Whatever reads, deletes, copies or uploads files of a checkpoint calls it. Never opens a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from holdfast.errors import Damaged, StorageError
from holdfast.storage.local.local import Local
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace

JOURNAL = ".journal"
"""The folder in a run's root that tells of the run. It is never a checkpoint, nor looked into for one."""


def as_store(place: Place) -> StorePlace:
    """The place in a store: of a local folder, in a store of all that lies below it."""
    return place if isinstance(place, StorePlace) else StorePlace(Local(str(place)), "")


def delete(*paths: Place) -> None:
    """Delete files, those that are there. Raises StorageError for the first that cannot be, once all were tried."""
    by_store: dict[int, list[StorePlace]] = {}
    failed: StorageError | None = None
    for path in paths:
        if isinstance(path, StorePlace):
            by_store.setdefault(id(path.store), []).append(path)
            continue
        try:
            path.delete()
        except StorageError as error:
            failed = failed or error
    for places in by_store.values():
        try:
            with naming(places[0], "delete"):
                places[0].store.delete([place.key for place in places])
        except StorageError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def set_aside(paths: Iterable[Place], name: str) -> None:
    """Rename files to ``name``, each in its own folder. A store cannot rename: there they are deleted.

    Files that are not there are passed over. Raises StorageError.
    """
    elsewhere: list[Place] = []
    for path in paths:
        if isinstance(path, LocalPlace):
            path.set_aside(name)
        else:
            elsewhere.append(path)
    delete(*elsewhere)


class LinkCheck:
    """Checks paths below the folder of a checkpoint, which may itself be reached through a link."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._home = str(folder.real())
        self._folders: dict[str, str] = {}

    def leads_out(self, path: str) -> str | None:
        """Where ``path`` of the manifest really lies, if that is outside; None if it is inside, or not there.

        A reused file (``../step-5/model/x``) has to lie in one of the folders beside this one.
        """
        if not self._folder.has_links:  # nor have keys a way up
            return None
        home = os.path.dirname(self._home) if path.startswith("../") else self._home
        real = self._real(path)
        return None if real.startswith(home.rstrip("/") + "/") else real

    def _real(self, path: str) -> str:
        # A checkpoint has a handful of folders and thousands of files.
        above, _, name = path.rpartition("/")
        if above not in self._folders:
            self._folders[above] = os.path.realpath(os.path.join(self._home, above))
        file = f"{self._folders[above]}/{name}"
        return os.path.realpath(file) if os.path.islink(file) else file

    def path(self, path: str) -> Place:
        """Where the file lies, for opening it. Raises Damaged if a link leads out."""
        file = self._folder / path
        real = self.leads_out(path)
        if real is not None:
            error = Damaged(
                f"{file} is reached by a link that leads out of its checkpoint, to {real}: nothing outside is read; "
                "put the file itself there"
            )
            error.file = str(file)
            raise error
        return file


def without_links_out(folder: Place, paths: list[str]) -> list[Place]:
    """Those of ``paths`` that lie in the folder, links followed: what may be deleted with it."""
    links = LinkCheck(folder)
    return [folder / path for path in paths if links.leads_out(path) is None]
