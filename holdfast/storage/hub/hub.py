"""A repository of a Hugging Face hub as a `Store` for reading: one commit of it, its files by ranges.

`storage/urls.py` makes one for each ``hf://`` URL that is opened. Never mixes two commits, and never writes.

The revision is looked up once, when something is first asked, and all that is read afterwards is of that commit.
Sizes come from the hub's listing. Where it redirects to for a file is kept: all ranges of the file are read there.
"""

from __future__ import annotations

import errno
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn
from urllib.parse import quote, urljoin

from holdfast.events import log
from holdfast.storage.hub.address import Address
from holdfast.storage.hub.client import Client, Reply, client_of, shown
from holdfast.storage.hub.refusals import refusal
from holdfast.storage.store import Buffer, Entry, Got, Listing, check_key, clipped
from holdfast.storage.wrappers.retrying import is_transient, transient

MOST_ANSWER, MOST_FILES = 64 << 20, 1_000_000
"""Bytes of one answer in JSON, and files of a listing; a hub that sends more is not believed."""

_STALE = (400, 401, 403, 404, 410)
"""What a host may answer when the address that the hub gave for a file has expired."""

_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class Hub:
    """The files of a repository at one commit. Made of plain data; asks when it is first used."""

    takes_pushes = True

    def __init__(self, address: Address, options: Mapping[str, Any], at: tuple[str, float] | None = None) -> None:
        self.address, self.options = address, dict(options)
        self._at = at
        self._listings: dict[tuple[str, bool], Listing] = {}
        self._entries: dict[str, Entry] = {}
        self._locations: dict[str, str] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hub, (self.address, self.options, self._at)

    def __repr__(self) -> str:
        return f"Hub({self.url!r})"

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def no_saves(self) -> str:
        """Why nothing can be saved here, and what to do instead."""
        return (
            "in a repository of the hub every file of a save would be a commit of its own. Save to a folder or a "
            f"bucket, then push it in one commit: holdfast.copy(step, {self.url!r}), or "
            f'holdfast.convert(step, {self.url!r}, to="huggingface")'
        )

    @cached_property
    def client(self) -> Client:
        """Whom it asks, with whose token. Raises ValueError for a hub's address or a token that cannot be meant."""
        return client_of(self.options)

    @property
    def commit(self) -> str:
        """The commit that is read. Raises OSError if there is no such repository or revision."""
        return self._pinned()[0]

    def _pinned(self) -> tuple[str, float]:
        with self._lock:
            if self._at is None:
                url = f"{self.client.endpoint}/{self.address.api}/revision/{self.address.quoted_revision}"
                told, _ = self._json(f"{url}?expand=sha&expand=lastModified", f"open {self.url}")
                commit = told.get("sha") if isinstance(told, dict) else None
                if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40,64}", commit):
                    raise OSError(errno.EPROTO, f"cannot open {self.url}: {shown(url)} names no commit")
                self._at = commit, _seconds(told.get("lastModified"))
                log.debug("%s is read at commit %s", self.url, commit)
            return self._at

    # What there is

    def list(self, prefix: str, *, deep: bool) -> Listing:
        if prefix:
            check_key(self.url, prefix)
        with self._lock:
            if (prefix, deep) not in self._listings:
                below = self._tree(prefix, deep=deep)
                self._entries.update((entry.key, entry) for entry in below.files)
                self._listings[prefix, deep] = Listing(sorted(below.files), [] if deep else sorted(below.folders))
            return self._listings[prefix, deep]

    def size(self, key: str) -> int | None:
        entry = self._entry(key)
        return None if entry is None else entry.nbytes

    def _entry(self, key: str) -> Entry | None:
        parent = check_key(self.url, key).rpartition("/")[0]
        with self._lock:
            if key not in self._entries and (parent, True) not in self._listings:
                self.list(parent, deep=False)
            return self._entries.get(key)

    def _tree(self, folder: str, *, deep: bool) -> Listing:
        """The files and folders below a folder, page by page."""
        commit, modified = self._pinned()
        path = f"/{quote(folder)}" if folder else ""
        url = f"{self.client.endpoint}/{self.address.api}/tree/{commit}{path}?recursive={str(deep).lower()}"
        below = Listing([], [])
        while url:
            try:
                page, url = self._json(url, f"list {self.url}/{folder}".rstrip("/"))
            except OSError as error:
                if is_transient(error) or below != ([], []):
                    raise
                if not isinstance(error, FileNotFoundError) and not (folder and self._entry(folder)):
                    raise
                break  # nothing is there, or a file
            for row in page:
                entry = _entry_of(row, self.url, modified)
                if not entry.key.startswith(f"{folder}/" if folder else ""):
                    continue
                if entry.nbytes < 0:
                    below.folders.append(entry.key)
                else:
                    below.files.append(entry)
            if len(below.files) + len(below.folders) > MOST_FILES:
                text = f"more than {MOST_FILES} files lie below {self.url}/{folder}: name the folder of one checkpoint"
                raise OSError(errno.E2BIG, text)
        return below

    def _json(self, url: str, doing: str) -> tuple[Any, str]:
        """What a question is answered with, and where its next page is."""
        with _naming(doing), self.client.get(url) as reply:
            body = self._body(reply)
            if reply.status != 200:
                raise refusal(doing, self.address, self.client, reply.status, reply.headers, body)
            after = _NEXT.search(reply.headers.get("Link") or "")
            try:
                return json.loads(body), urljoin(url, after[1]) if after else ""
            except (ValueError, RecursionError):
                raise transient(OSError(errno.EPROTO, f"cannot {doing}: {shown(url)} sends no JSON")) from None

    @staticmethod
    def _body(reply: Reply) -> bytes:
        body = bytearray()
        while part := reply.read(1 << 20):
            body += part
            if len(body) > MOST_ANSWER:
                raise OSError(errno.EMSGSIZE, f"{shown(reply.url)} answers with more than {MOST_ANSWER} bytes")
        return bytes(body)

    # Bytes

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        entry = self._entry(key)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, f"there is no file {self.url}/{key}")
        first, last = clipped(begin, end, entry.nbytes)
        data = bytearray(last - first)
        with _naming(f"read {self.url}/{key}"):
            self._fill(entry, memoryview(data), first)
        return Got(data, entry.nbytes)

    def _fill(self, entry: Entry, view: memoryview, begin: int) -> None:
        """Read a range; one that is cut goes on where it was cut, as long as anything comes."""
        at = 0
        while at < len(view):
            before = at
            try:
                with self._opened(entry, begin + at, begin + len(view)) as body:
                    while at < len(view) and (count := body.readinto(view[at:])):
                        at += count
            except OSError as error:
                if at == before or not is_transient(error):
                    raise
            if at == before:
                raise transient(OSError(errno.ECONNRESET, f"the connection was cut at byte {begin + at}"))
            if at < len(view):
                log.debug("%s/%s was cut at byte %d, and goes on there", self.url, entry.key, begin + at)

    def _opened(self, entry: Entry, first: int, last: int) -> Reply:
        """An answer whose next byte is the ``first`` of the range."""
        asked = {} if (first, last) == (0, entry.nbytes) else {"Range": f"bytes={first}-{last - 1}"}
        location = self._locations.get(entry.key)
        if location is not None:
            reply = self.client.get(location, asked)
            if reply.status not in _STALE:
                return self._at_first(reply, entry, first)
            with reply:
                self._locations.pop(entry.key, None)
        above, commit = f"{self.client.endpoint}/{self.address.path}", self._pinned()[0]
        url = f"{above}/resolve/{commit}/{quote(entry.key)}"
        reply = self.client.get(url, asked)
        if reply.url != url and reply.status in (200, 206):
            self._locations[entry.key] = reply.url
        return self._at_first(reply, entry, first)

    def _at_first(self, reply: Reply, entry: Entry, first: int) -> Reply:
        try:
            if reply.status not in (200, 206):
                doing = f"read {self.url}/{entry.key}"
                raise refusal(doing, self.address, self.client, reply.status, reply.headers, reply.read(1 << 12))
            if (coded := reply.headers.get("Content-Encoding") or "identity") != "identity":
                raise OSError(errno.EPROTO, f"{shown(reply.url)} sends the file as {coded}, which was not asked for")
            told = reply.headers.get("Content-Range" if reply.status == 206 else "Content-Length") or ""
            range_ = _RANGE.match(told)
            begins, nbytes = (range_[1], range_[2]) if range_ else ("0", told)
            if (nbytes.isdigit() and int(nbytes) != entry.nbytes) or (reply.status == 206 and int(begins) != first):
                text = f"{shown(reply.url)} answers with other bytes ({told}) than the {entry.nbytes} that are listed"
                raise transient(OSError(errno.EIO, text))
            skip = first if reply.status == 200 else 0  # a server without ranges sends all
            while skip and (part := reply.read(min(skip, 1 << 20))):
                skip -= len(part)
        except BaseException:
            reply.__exit__()
            raise
        return reply

    # Writing

    def create(self, key: str, data: bytes) -> bool:
        self._refuse(key)

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        self._refuse(key)

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._refuse(keys[0])

    def _refuse(self, key: str) -> NoReturn:
        raise OSError(errno.EROFS, f"{self.url}/{key} cannot be written or deleted: {self.no_saves}")


def _entry_of(row: Any, url: str, modified: float) -> Entry:
    """A row of a listing; a folder has -1 bytes. Raises OSError for one that no hub sends."""
    try:
        key, kind = check_key(url, row["path"]), row["type"]
        if kind == "directory":
            return Entry(key, -1, modified)
        large = row.get("lfs") or {}
        nbytes, content = int(large.get("size", row["size"])), str(large.get("oid") or row.get("oid") or "")
        if kind == "file" and nbytes >= 0:
            return Entry(key, nbytes, modified, content)
    except (LookupError, TypeError, ValueError, AttributeError):
        pass
    raise OSError(errno.EPROTO, f"cannot list {url}: the hub sends a listing with a bad row")


@contextmanager
def _naming(doing: str) -> Iterator[None]:
    """Says in errors of the connection what was being done."""
    try:
        yield
    except OSError as error:
        text = error.strerror or str(error)
        if not text.startswith("cannot "):
            named = type(error)(error.errno, f"cannot {doing}: {text}")
            vars(named).update(vars(error))
            raise named from None
        raise


def _seconds(date: Any) -> float:
    """A date of the hub in seconds since the epoch; 0.0 if it is none."""
    try:
        return datetime.fromisoformat(str(date).replace("Z", "+00:00")).timestamp()
    except ValueError:
        return 0.0
