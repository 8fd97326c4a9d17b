"""A bucket of S3, Google Cloud Storage or Azure, or a web server, as a `Store`.

`storage/urls.py` makes one for each URL, the writer process its own from ``spec``. Never used across a fork.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast.errors import Unsupported
from holdfast.storage.cloud.client import ClientSettings, bucket_region, client_settings, clock_ahead
from holdfast.storage.cloud.facts import Request
from holdfast.storage.cloud.failures import failure, no_credentials
from holdfast.storage.cloud.feed import MIB, Feed, part_size
from holdfast.storage.cloud.options import checked, secrets_in
from holdfast.storage.cloud.profiles import NoCredentials
from holdfast.storage.store import Buffer, Entry, Got, Listing
from holdfast.storage.wrappers.retrying import is_transient, transient

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

READ_SILENCE, WRITE_SILENCE = 20.0, 60.0

# Metadata of a file that was uploaded in parts; Azure wants a name without hyphens.
_MARK = "holdfastupload"

# The client library runs its threads once a process; a forked child has none of them, and waits for them for ever.
_used = False
_forked = False


def obstore() -> ModuleType:
    """The client library. Raises Unsupported if it is not installed."""
    try:
        import obstore as library
        import obstore.store
    except ImportError as error:
        raise Unsupported(f'URLs need obstore: pip install "holdfast-torch[cloud]" ({error})') from None
    return library


def _after_fork() -> None:
    global _forked
    _forked = _used


os.register_at_fork(after_in_child=_after_fork)


class Cloud:
    """The files of one bucket (or container, or web server). Made of plain data; connects when it is first used.

    ``scheme`` is one of s3, r2, weka, gs, az, http, https, ``bucket`` a host for the last two, ``options`` those of
    `holdfast.storage.at`. Web servers can be read only, and cannot be listed.
    """

    def __init__(self, scheme: str, bucket: str, options: Mapping[str, Any] | None = None) -> None:
        self.scheme, self.bucket = scheme, bucket
        self.options = checked(options or {}, f"{scheme}://{bucket}")
        self._lock = threading.Lock()
        # One client for reads and some for uploads, by the silence after which an attempt is given up.
        self._clients: dict[float, ObjectStore] = {}
        self._settings: ClientSettings | None = None
        # Whether the store has answered: the bucket exists, and the credentials were good.
        self._there = False

    @classmethod
    def from_spec(cls, spec: Mapping[str, Any]) -> Cloud:
        return cls(spec["scheme"], spec["bucket"], spec["options"])

    @property
    def spec(self) -> dict[str, Any]:
        """What `from_spec` makes the same store of, in another process; secrets that were given as options included."""
        return {"scheme": self.scheme, "bucket": self.bucket, "options": dict(self.options)}

    def __reduce__(self) -> tuple[Any, ...]:
        return Cloud.from_spec, (self.spec,)

    def __repr__(self) -> str:
        return f"Cloud({self.url!r})"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    @property
    def no_saves(self) -> str:
        return "a web server can be read only" if self._web else ""

    @property
    def _web(self) -> bool:
        return self.scheme in ("http", "https")

    # The six verbs

    def list(self, prefix: str, *, deep: bool) -> Listing:
        if self._web:
            text = f"{self.url} is a web server: what is below {prefix or '/'!r} cannot be listed, only read by name"
            refusal = OSError(errno.ENOTSUP, text)
            vars(refusal)["unlisted"] = True
            raise refusal

        def ask(client: ObjectStore) -> Listing:
            if deep:
                metas = [meta for chunk in obstore().list(client, prefix or None, chunk_size=1000) for meta in chunk]
                return _listing(metas, [])
            level = obstore().list_with_delimiter(client, prefix or None)
            return _listing(level["objects"], level["common_prefixes"])

        return self._ask("list", prefix, ask)

    def size(self, key: str) -> int | None:
        try:
            return self._ask("size", key, lambda client: int(obstore().head(client, key)["size"]))
        except OSError as refusal:
            missing = isinstance(refusal, FileNotFoundError)
            if missing and self._there:
                return None
            if is_transient(refusal):
                raise
            return self._size_by_get(key, refusal)

    def _size_by_get(self, key: str, refusal: OSError) -> int | None:
        # An answer to HEAD has no text: not whether it is the bucket that is missing, nor what is wrong with the key.
        # And some web servers refuse HEAD alone.
        def ask(client: ObjectStore) -> int:
            return int(obstore().get(client, key, options={"range": (0, 1)}).meta["size"])

        try:
            return self._ask("size", key, ask)
        except FileNotFoundError:
            self._there = True
            return None
        except OSError as reason:
            raise (refusal if reason.errno in (errno.ERANGE, errno.ENOPROTOOPT) else reason) from None

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        if begin < 0 or (end is not None and end <= begin):
            return Got(b"", self._size_of(key))
        options: GetOptions = {}
        if end is not None:
            options = {"range": (begin, end)}
        elif begin:
            options = {"range": {"offset": begin}}

        def ask(client: ObjectStore) -> Got:
            answer = obstore().get(client, key, options=options)
            return Got(answer.bytes(), int(answer.meta["size"]))

        try:
            return self._ask("get", key, ask)
        except OSError as refusal:
            if refusal.errno == errno.ERANGE:  # the range begins at or behind the end
                return Got(b"", self._size_of(key))
            if refusal.errno == errno.ENOPROTOOPT:  # a web server without ranges
                whole = self.get(key)
                return Got(memoryview(whole.data)[begin:end], whole.nbytes)
            raise

    def create(self, key: str, data: bytes) -> bool:
        self._writable(key)
        refusal: OSError
        try:
            self._ask("create", key, lambda client: obstore().put(client, key, data, mode="create"), self._patience(0))
            return True
        except OSError as error:
            if not (isinstance(error, FileExistsError) or is_transient(error)):
                raise
            if isinstance(error, FileExistsError) and not is_transient(error):
                return False
            refusal = error
        # An answer may be lost and the request be sent again: what looks like a loser's answer can be the winner's.
        try:
            there = self.get(key).data
        except OSError as error:
            if isinstance(error, FileNotFoundError) or is_transient(error):
                # Two at once can both be turned away.
                raise transient(refusal) from None
            raise
        return bytes(there) == data

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        self._writable(key)
        part = part_size(nbytes, self.options.get("part_size", 8 * MIB))
        feed = Feed(chunks, nbytes, part, f"{self.url}/{key}")
        # Marks the object with its upload, in case the answer to the completing request is lost.
        mark = {_MARK: uuid.uuid4().hex}

        def ask(client: ObjectStore) -> None:
            if nbytes > part:
                many = self.options.get("concurrency", 8)
                obstore().put(
                    client, key, feed, use_multipart=True, chunk_size=part, max_concurrency=many, attributes=mark
                )
                return
            pieces = list(feed)
            # One buffer goes as it is; several are few bytes.
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            del pieces
            obstore().put(client, key, data, use_multipart=False)

        try:
            self._ask("put", key, ask, self._patience(min(part, nbytes)))
        except BaseException as refusal:
            if getattr(refusal, "errno", None) == errno.ESTALE and self._has(key, mark):
                return
            # An error of the chunks is raised as it is, whatever the client makes of it.
            if feed.raised is not None:
                raise feed.raised from None
            raise

    def _has(self, key: str, mark: Mapping[str, str]) -> bool:
        """Whether the file that is there was made by the upload with this mark."""

        def ask(client: ObjectStore) -> bool:
            return dict(obstore().get(client, key, options={"head": True}).attributes).items() >= mark.items()

        try:
            return self._ask("size", key, ask)
        except OSError:
            return False

    def delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        self._writable(keys[0])
        try:
            self._ask("delete", keys[0], lambda client: obstore().delete(client, list(keys)))
        except FileNotFoundError:
            # At some stores the first that is missing ends it for all.
            if len(keys) > 1:
                with ThreadPoolExecutor(16, "holdfast-delete") as pool:
                    list(pool.map(lambda key: self.delete([key]), keys))

    # What they share

    def _ask(self, verb: str, key: str, ask: Callable[[ObjectStore], T], silence: float | None = None) -> T:
        """The answer, or an OSError that says what is wrong."""
        client = self._client(silence or float(self.options.get("read_timeout", READ_SILENCE)))
        try:
            answer = ask(client)
            self._there = True
            return answer
        except BaseException as error:
            # A panic of the client library is no Exception, and no reason to end the process.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise self._refusal(error, verb, key) from None

    def _patience(self, part: int) -> float:
        # A server is silent while a part comes in, so a large part takes patience. In steps: each has its own client.
        return float(self.options.get("write_timeout", WRITE_SILENCE)) * max(1, math.ceil(part / (8 * MIB)))

    def _client(self, silence: float) -> ObjectStore:
        global _used
        if _forked:
            raise OSError(
                errno.EDEADLK,
                f"{self.url} cannot be used here: this process was forked from one that had used a store, and the "
                "threads that talk to stores do not survive a fork. Start processes with the method 'spawn' (in a "
                "DataLoader, multiprocessing_context='spawn'), or fork before the first use",
            )
        with self._lock:
            client = self._clients.get(silence)
            if client is None:
                _used = True
                client = self._clients[silence] = self._make(silence)
            return client

    def _make(self, silence: float) -> ObjectStore:
        try:
            self._settings = settings = client_settings(self.scheme, self.bucket, self.options, silence=silence)
        except NoCredentials as error:
            raise no_credentials(str(error), self.url) from None
        try:
            client: ObjectStore = getattr(obstore().store, settings.kind)(settings.target, **settings.arguments)
        except Exception as error:  # noqa: BLE001 (every error of the client is translated)
            raise self._refusal(error, "open", "") from None
        return client

    def _size_of(self, key: str) -> int:
        nbytes = self.size(key)
        if nbytes is None:
            raise FileNotFoundError(errno.ENOENT, f"there is no file {self.url}/{key}")
        return nbytes

    def _writable(self, key: str) -> None:
        if self._web:
            raise OSError(errno.EROFS, f"{self.url}/{key} cannot be written: a web server can be read only")

    def _refusal(self, error: BaseException, verb: str, key: str) -> OSError:
        credentials = self._settings.credentials if self._settings else None
        endpoint = str(self.options.get("endpoint_url", ""))
        request = Request(
            verb=verb,
            scheme=self.scheme,
            bucket=self.bucket,
            key=key,
            endpoint=endpoint,
            region=self._settings.region if self._settings else "",
            credentials=credentials.source if credentials else "",
            secrets=tuple(secrets_in(self.options)),
            ask_region=lambda: "" if endpoint else bucket_region(self.bucket),
            ask_clock=lambda: clock_ahead(endpoint) if endpoint else None,
        )
        refusal = failure(error, request)
        if getattr(refusal, "outdated", False) and self._there and credentials is not None and credentials.renews:
            # They were good before: the next attempt looks for newer ones.
            self._clients.clear()
            return transient(refusal)
        return refusal


def _listing(metas: Iterable[ObjectMeta], folders: Iterable[str]) -> Listing:
    files = sorted(Entry(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in metas)
    # Consoles and file browsers make empty objects that stand for folders; an empty file with files below it is one.
    above = {entry.key.rpartition("/")[0] for entry in files}
    return Listing([entry for entry in files if entry.nbytes or entry.key not in above], sorted(folders))
