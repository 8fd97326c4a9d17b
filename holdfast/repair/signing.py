"""Signs a checkpoint that is there already, and makes and loads keys."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holdfast import events
from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.commit.commit import place_signature
from holdfast.commit.transfer import home
from holdfast.errors import Unsupported
from holdfast.formats.own import read_known
from holdfast.ondisk import blocks, datafile
from holdfast.ondisk.manifest import FORMAT, FileRecord
from holdfast.ondisk.signature import SignedFile
from holdfast.policies.signing.keys import Key, ed25519, private_key, public_key, signer
from holdfast.ranks.ranks import DEADLINE
from holdfast.read.proved import ProvedFile
from holdfast.storage.local import disk
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

__all__ = ["generate", "load_key", "sign"]

THREADS = 4


def sign(path: str | os.PathLike[str] | Place, key: Key, *, deadline: float = DEADLINE) -> Checkpoint:
    """Sign a checkpoint that is there already, with a private Ed25519 key.

    Every byte is read and compared with its sum on the way, so damage is not signed. An earlier signature is replaced.
    One process calls it.

    Args:
        path: The checkpoint, a path, a URL or a place in a store.
        key: 32 raw bytes, a PEM without a password, the path of a file with either, or a key of `cryptography`.
        deadline: Seconds to wait for any one answer of a store.

    Returns:
        The checkpoint, opened with the key required.

    Raises:
        ValueError: ``key`` is no private key.
        Unsupported: The checkpoint is of another format.
        NotACheckpoint: There is no checkpoint.
        Damaged: Bytes are not what was written.
        StorageError: The disk or store refused.
    """
    made, folder = signer(key), with_deadline(location(path), deadline)
    if made is None:
        raise ValueError("sign needs a private key")
    opened = open_checkpoint(folder)
    if opened.format != FORMAT:
        raise Unsupported(
            f"{folder} is of the format {opened.format}, which cannot be signed: holdfast.convert it first"
        )
    record = read_known(folder)
    with (
        events.task("sign", str(folder), total=opened.nbytes) as task,
        ThreadPoolExecutor(THREADS, thread_name_prefix="holdfast-sign") as pool,
    ):

        def signed(file: FileRecord) -> SignedFile:
            done = _sums_of(folder, file)
            task.advance(file.bytes)
            return done

        files = list(pool.map(signed, record.data_files))
        attachments = {name: blocks.strong_sum(opened.attachment(name)) for name in opened.attachments}
    place_signature(folder, record, made(record, files, attachments))
    return open_checkpoint(folder, require=bytes.fromhex(made.public))


def _sums_of(folder: Place, file: FileRecord) -> SignedFile:
    """SHA-256 of a file's header and blocks, all proved by the sums of the format."""
    source = ProvedFile(home(folder), file, threading.Event())
    head, parts = source.header()
    header = datafile.parse_header(bytes(head), file.bytes)
    sums: dict[int, str] = {}
    for part in parts:
        data, origin = source.part(part), part[0].begin
        sums.update((b.begin, blocks.strong_sum(data[b.begin - origin : b.begin - origin + b.nbytes])) for b in part)
    text = ",".join(
        "".join(sums[piece.begin + at] for at in range(0, piece.nbytes, blocks.BLOCK))
        for piece in header.pieces.values()
    )
    return SignedFile(blocks.strong_sum(head), None if header.metadata.get("sha256") == text else text)


def generate(path: str | os.PathLike[str]) -> Path:
    """Make a key pair: the private key at ``path``, readable by its owner alone, the public one beside it (``.pub``).

    Both are PEM files. Returns the path of the public one. Raises FileExistsError if either is there.
    """
    made = ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization as form

    private, public = Path(path), Path(f"{os.fspath(path)}.pub")
    secret = made.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    shown = made.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    if public.exists():
        raise FileExistsError(f"{public} exists")
    for where, data, mode in ((private, secret, 0o600), (public, shown, 0o644)):
        fd = disk.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            disk.write_all(fd, data, 0, where)
        finally:
            os.close(fd)
    return public


def load_key(key: Key, *, private: bool = False) -> Any:
    """A key of `cryptography` from any form that is taken: raw bytes, a PEM, a path. Raises ValueError."""
    return private_key(key) if private else public_key(key)
