"""Which format a path is of: each reader is asked in turn, the most particular first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.commit.folder import what_is_there
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, Untrusted
from holdfast.formats.own import Own
from holdfast.formats.reader import Reader
from holdfast.policies.signing.keys import Keys
from holdfast.storage.naming import storage_error
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.listed import Listed

# Each is asked with `read(path)`, which returns None for what is not its format. Those that look for a file of a name
# that nobody else uses come first; what is anything else is left to the general ones. They are imported when the first
# foreign path is opened, and so is `assemble`: a program that reads none pays nothing.
_READERS = (
    "megatron.megatron", "olmo.olmo", "deepspeed.deepspeed", "torchsnapshot.torchsnapshot",
    "torch_checkpointing.torch_checkpointing", "composer.composer", "hfai.hfai", "dcp.dcp", "huggingface.huggingface",
    "torch_save.full",
)  # fmt: skip


_UNEXPECTED = (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError)


def open_foreign(path: Place) -> Reader | None:
    """The foreign checkpoint at ``path``, or None if there is none that is known.

    ``path``: a folder, a file, or a template with ``{rank}``. Raises Damaged, Unsupported, StorageError.
    """
    if path.is_remote:
        place = as_store(path)
        path = StorePlace(Listed(place.store, _above_templates(place.key)), place.key)
    # A large one is hundreds of thousands of objects, of which none is garbage.
    with no_collection(), _telling(path):
        for name in _READERS:
            contents = import_module(f"holdfast.formats.{name}").read(path)
            if contents is not None:
                reader: Reader = import_module("holdfast.formats.assemble").assemble(contents, path)
                return reader
    return None


def _above_templates(key: str) -> str:
    """The folder that holds all files of a template, or the key itself."""
    return key if "{" not in key else key.partition("{")[0].rpartition("/")[0]


@contextmanager
def _telling(path: Place) -> Iterator[None]:
    try:
        yield
    except HoldfastError as error:
        if str(path) in str(error):
            raise
        named = type(error)(f"{path}: {error}")
        named.file = error.file
        raise named from None
    except _UNEXPECTED as error:
        # What is read here is untrusted. Each reader checks what it takes; what none has thought of is refused too.
        raise Damaged(
            f"{path} contradicts itself in a way that its reader does not expect ({type(error).__name__}: "
            f"{str(error)[:200]}): it was altered, or is of another version"
        ) from error
    except OSError as error:
        raise storage_error("read", str(path), error.errno, error.strerror or str(error)) from error


def reader_of(place: Place, require: Keys | None = None) -> Reader:
    """What reads the checkpoint at a place, of holdfast or of another library.

    Raises NotACheckpoint if there is none, Untrusted for another library's if a key is required, Damaged, Unsupported.
    """
    own = Own(place, require=require)
    try:
        own.manifest  # noqa: B018 - reading it is the check
    except NotACheckpoint as error:
        if require is not None and not place.is_remote and not place.exists():
            raise
        if require is not None:  # not even looked at: a reader of another format would have to believe it
            raise Untrusted(
                f"{error}. require= takes signed checkpoints of holdfast: other formats cannot be signed, convert them "
                "(holdfast.convert) and sign the result if you trust them"
            ) from None
        foreign = open_foreign(place)
        if foreign is None:
            if place.is_remote:
                raise NotACheckpoint(what_is_there(place)) from None
            raise
        events.log.info("%s: read as %s%s", place, foreign.format, f" ({foreign.reading})" if foreign.reading else "")
        return foreign
    return own
