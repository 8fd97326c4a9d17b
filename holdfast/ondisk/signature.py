"""A signature beside a manifest: a statement of what the maker saved, and the maker's signature under it.

`keys` makes and checks one, the reader takes strong sums from it. Never reads a file and knows no cryptography but
SHA-256: the sums of the format find accidents, and could be forged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.errors import Untrusted
from holdfast.ondisk import manifest
from holdfast.ondisk.manifest import FileRecord, Manifest, own_path

FORMAT, VERSION = "holdfast-signature", 1
_NAME = re.compile(r"manifest\.(?P<save>[0-9a-f]{16})\.[0-9a-f]{16}\.sig")
_TAIL = re.compile(rb',"signature":"([0-9a-f]{128})"\}\s*$')
_SEPARATOR = b"holdfast signature 1\0"
"""Before what is signed, so that the same key never signs anything else that looks alike."""


class SignedFile(msgspec.Struct, array_like=True, frozen=True):
    """A data file: SHA-256 of its header, and of its blocks as in ``sums`` if the header does not hold them itself."""

    header: str
    sums: str | None = None


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """What is signed. ``files`` in the order of the manifest's; ``key`` is the maker's public key.

    ``manifest``: SHA-256 of the manifest in its canonical form, which is the same for a copy whose files lie elsewhere.
    ``attachments``: SHA-256 of each by name.
    """

    format: str = FORMAT
    version: int = VERSION
    save: str
    manifest: str
    files: list[SignedFile]
    attachments: dict[str, str]
    key: str


_decoder = msgspec.json.Decoder(Signature)


def file_name(record: Manifest) -> str:
    """``manifest.7c1e09ab52d3f410.5be1….sig``: beside the manifest, named with the save and with what is signed.

    So the signature of what is to replace a manifest is there before it, and the old one is as good as ever until then.
    """
    return f"manifest.{record.save}.{canonical(record)[:16]}.sig"


def save_of(path: str) -> str | None:
    """The save that a file signs, by its relative path; None if it is no signature."""
    match = _NAME.fullmatch(path)
    return match["save"] if match else None


def canonical(record: Manifest) -> str:
    """SHA-256 of what a manifest says, wherever its files and attachments lie."""
    own = [FileRecord(own_path(f.path), f.bytes, f.header_bytes, f.header_digest) for f in record.data_files]
    plain = msgspec.structs.replace(
        record,
        files=[manifest.file_row(file) for file in own],
        attachments=[(attachment_name(path, record.save), *proof) for path, *proof in record.attachments],
    )
    # Decoded once more: what was just drafted may hold tuples and numbers that a reader sees in another form.
    again = msgspec.json.decode(msgspec.json.encode(plain), type=Manifest)
    return hashlib.sha256(msgspec.json.encode(again)).hexdigest()


def attachment_name(path: str, save: str) -> str:
    """How users call an attached file."""
    return path.removeprefix("attachments/").removeprefix(f"{save}/")


def stated(record: Manifest, files: Sequence[SignedFile], attachments: Mapping[str, str], key: str) -> bytes:
    """The statement without its signature; `signed_bytes` of it are what has to be signed."""
    signature = Signature(
        save=record.save, manifest=canonical(record), files=list(files), attachments=dict(attachments), key=key
    )
    return msgspec.json.encode(signature)[:-1]


def signed_bytes(statement: bytes) -> bytes:
    return _SEPARATOR + statement


def sealed(statement: bytes, signature: bytes) -> bytes:
    return statement + b',"signature":"' + signature.hex().encode() + b'"}'


def decode(data: bytes, where: str) -> tuple[Signature, bytes, bytes]:
    """What a file says, the statement in it, and the signature, which is yet to be checked. Raises Untrusted."""
    tail = _TAIL.search(data)
    if tail is None:
        raise Untrusted(f"{where} is no signature, or was cut off")
    try:
        signature = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise Untrusted(f"{where} is no signature: {error}") from None
    if (signature.format, signature.version) != (FORMAT, VERSION):
        raise Untrusted(
            f"{where} is a {signature.format!r} of version {signature.version}, this holdfast knows version {VERSION}"
        )
    return signature, data[: tail.start()], bytes.fromhex(tail[1].decode())


def fault(signature: Signature, record: Manifest) -> str | None:
    """Why a statement is not about this manifest; None if it is."""
    if signature.save != record.save:
        return f"it is of save {signature.save}, the manifest of save {record.save}"
    if signature.manifest != canonical(record):
        return "the manifest is not the one that was signed"
    names = [attachment_name(path, record.save) for path, _, _ in record.attachments]
    if len(signature.files) != len(record.files) or sorted(signature.attachments) != sorted(names):
        return "it names other files than the manifest"
    return None
