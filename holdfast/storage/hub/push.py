"""Pushes a folder to a repository of a hub, in one commit.

`export/to_store.py` calls it for ``hf://`` targets. It never deletes a file that its caller does not name.

We rejected `upload_folder` of huggingface_hub: it cuts a large folder into several commits, and a reader could see a
part of a checkpoint.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.errors import StorageError, Unsupported
from holdfast.ondisk.version import __version__
from holdfast.storage.hub.hub import Hub
from holdfast.storage.hub.refusals import LOG_IN, refusal
from holdfast.storage.naming import naming
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.wrapper import nested


def prepare(place: StorePlace) -> None:
    """Make sure that a push can go there, before hours of work: a repository or branch that is missing is made.

    Raises StorageError, and Unsupported without huggingface_hub, or for a revision that is a commit.
    """
    hub, address = _hub_of(place), _hub_of(place).address
    library = _library(hub)
    if re.fullmatch(r"[0-9a-f]{40}", address.revision):
        raise Unsupported(f"{hub.url} names a commit, and commits do not change: name a branch to push to")
    if not hub.client.token:
        raise _error(OSError(errno.EACCES, f"cannot push to {hub.url}: it takes a token that may write: {LOG_IN}"))
    with naming(place, "push to"):
        try:
            place.store.list(place.key, deep=True)
            _check_right(hub)
            return
        except OSError as error:
            missing = getattr(error, "missing", "")
            if not missing:
                raise
    with _asking(hub):
        api, kind = _api(library, hub), address.kind.removesuffix("s")
        if missing == "repository":
            api.create_repo(address.repo, repo_type=kind, private=hub.options.get("private"), exist_ok=True)
        if address.revision not in ("", "main"):
            api.create_branch(address.repo, branch=address.revision, repo_type=kind, exist_ok=True)


def push(files: dict[str, Path], place: StorePlace, *, stale: Iterable[str], message: str) -> str:
    """Commit ``files`` by their paths below ``place`` (``""`` for itself), without those that are ``stale``.

    The commit follows the one that ``place`` is read at: if somebody pushed since, nothing changes. Returns its
    address. Raises StorageError.
    """
    hub = _hub_of(place)
    library = _library(hub)
    operations: list[Any] = [
        library.CommitOperationAdd((place / path).key, str(file)) for path, file in sorted(files.items())
    ]
    operations += [library.CommitOperationDelete((place / path).key, is_folder=False) for path in sorted(stale)]
    with _asking(hub):
        made = _api(library, hub).create_commit(
            hub.address.repo, operations, commit_message=message, repo_type=hub.address.kind.removesuffix("s"),
            revision=hub.address.revision or None, parent_commit=hub.commit,
        )  # fmt: skip
    return str(made.commit_url)


def _check_right(hub: Hub) -> None:
    """Raise OSError if the hub says that the token may not write; what else it answers is of no account."""
    with hub.client.get(f"{hub.client.endpoint}/{hub.address.api}/auth-check/write") as reply:
        if reply.status in (401, 403):
            raise refusal(f"push to {hub.url}", hub.address, hub.client, reply.status, reply.headers)


def _hub_of(place: StorePlace) -> Hub:
    return next(store for store in nested(place.store) if isinstance(store, Hub))


def _library(hub: Hub) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        text = f'pushing to {hub.url} needs huggingface_hub: pip install "holdfast-torch[hub]" ({error})'
        raise Unsupported(text) from None
    return huggingface_hub


def _api(library: ModuleType, hub: Hub) -> Any:
    client = hub.client
    return library.HfApi(
        endpoint=client.endpoint, token=client.token, library_name="holdfast", library_version=__version__
    )


@contextmanager
def _asking(hub: Hub) -> Iterator[None]:
    """Says of the library's errors what they mean, and what to do."""
    doing = f"push to {hub.url}"
    try:
        yield
    except StorageError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises errors of its own, of httpx2 and of the standard library
        cause: BaseException | None = error
        while cause is not None and getattr(cause, "response", None) is None:
            cause = cause.__cause__
        answer = getattr(cause, "response", None)
        if answer is not None:
            raise _error(refusal(doing, hub.address, hub.client, answer.status_code, answer.headers)) from None
        text = " ".join(str(error).split())[:300].replace(hub.client.token or "\0", "…")
        raise _error(OSError(getattr(error, "errno", None) or errno.EIO, f"cannot {doing}: {text}")) from None


def _error(error: OSError) -> StorageError:
    refused = StorageError(error.strerror)
    refused.errno = error.errno
    return refused
