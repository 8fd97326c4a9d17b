"""Ed25519 keys: made, read from wherever users keep them, signing a checkpoint and checking who signed one.

`signing`, `save` and `open` call it. Imports `cryptography` only when it is used, and never shows a private key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from holdfast.errors import Unsupported, Untrusted
from holdfast.ondisk import signature
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.signature import Signature, SignedFile
from holdfast.storage.place import Place

Key = Any
"""A key: of `cryptography`, 32 raw bytes, the text or bytes of a PEM, or the path of a file that holds either."""

Keys = Key | Sequence[Key]
"""One public key or several, any of which will do."""


def ed25519() -> Any:
    """The module that makes and reads keys. Raises Unsupported where it is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise Unsupported("signatures need the package cryptography: pip install 'holdfast-torch[sign]'") from None
    return ed25519


@dataclass(frozen=True)
class Signer:
    """A private key, ready to sign. Its text shows the public half alone."""

    public: str
    _key: Any = field(repr=False, compare=False)

    def __call__(self, record: Manifest, files: Sequence[SignedFile], attachments: Mapping[str, str]) -> bytes:
        statement = signature.stated(record, files, attachments, self.public)
        return signature.sealed(statement, self._key.sign(signature.signed_bytes(statement)))


def signer(key: Key | Signer | None) -> Signer | None:
    """What signs with a private key. Raises ValueError for what is no private Ed25519 key; None stays None."""
    if key is None or isinstance(key, Signer):
        return key
    private = private_key(key)
    return Signer(_raw(private.public_key()).hex(), private)


def signing(sign: Key | Literal[True] | None) -> Callable[[], Signer] | None:
    """What gives the first rank its signer, once it asks: a key that cannot be read fails the save on all ranks."""
    if sign is None:
        return None

    @cache
    def first_ranks_signer() -> Signer:
        own = None if sign is True else signer(sign)
        if own is None:
            raise ValueError("sign=True says that the first rank has the key, but this is the first rank")
        return own

    return first_ranks_signer


def private_key(key: Key) -> Any:
    """A private key from any form that is taken. The error never shows what it was given."""
    module = ed25519()
    if isinstance(key, module.Ed25519PrivateKey):
        return key
    return _parsed(key, private=True)


def public_key(key: Key) -> Any:
    """A public key from any form that is taken; not from a private one, which has no business with a reader."""
    module = ed25519()
    if isinstance(key, module.Ed25519PublicKey):
        return key
    return _parsed(key, private=False)


def _parsed(key: Key, *, private: bool) -> Any:
    from cryptography.hazmat.primitives import serialization

    module, kind = ed25519(), "private" if private else "public"
    data = _bytes_of(key, kind)
    try:
        pem = data.lstrip().startswith(b"-----BEGIN")
        if private:
            load: Any = serialization.load_pem_private_key
            parsed = load(data, password=None) if pem else module.Ed25519PrivateKey.from_private_bytes(data)
        else:
            load = serialization.load_pem_public_key
            parsed = load(data) if pem else module.Ed25519PublicKey.from_public_bytes(data)
    except (ValueError, TypeError):  # the cause may quote what it was given
        raise ValueError(f"this is no {kind} Ed25519 key: 32 bytes, or a PEM without a password") from None
    if not isinstance(parsed, module.Ed25519PrivateKey if private else module.Ed25519PublicKey):
        raise ValueError(f"this is a {kind} key of another kind than Ed25519")
    return parsed


def _bytes_of(key: Key, kind: str) -> bytes:
    if isinstance(key, (bytes, bytearray, memoryview)):
        return bytes(key)
    if isinstance(key, str) and key.lstrip().startswith("-----BEGIN"):
        return key.encode()
    if isinstance(key, (str, os.PathLike)):
        path = Path(key)
        try:
            return path.read_bytes()
        except OSError as error:
            # Perhaps the key itself was given as text: then a path in the error would show it.
            where = str(path) if isinstance(key, os.PathLike) or path.suffix or os.sep in str(key) else "the file given"
            raise ValueError(f"cannot read the {kind} key from {where}: {error.strerror}") from None
    raise ValueError(f"a {kind} key is 32 bytes, a PEM, the path of one, or a key of cryptography; not {type(key)}")


def _raw(public: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return bytes(public.public_bytes(Encoding.Raw, PublicFormat.Raw))


def trusted(require: Keys) -> dict[str, Any]:
    """The keys that a reader trusts, by their raw bytes in hexadecimal digits. Raises ValueError if there is none."""
    several = isinstance(require, Sequence) and not isinstance(require, (str, bytes, bytearray, memoryview))
    keys = [public_key(key) for key in (require if several else [require])]
    if not keys:
        raise ValueError("require= names no key")
    return {_raw(key).hex(): key for key in keys}


def read_signature(folder: Place, record: Manifest, require: Keys) -> Signature:
    """The signature of the checkpoint in ``folder``, made by one of the keys ``require`` over just this manifest.

    Raises Untrusted, saying what is missing or wrong, and ValueError for what is no key.
    """
    keys = trusted(require)
    target = folder / signature.file_name(record)
    try:
        data = target.read_small()
    except FileNotFoundError:
        raise Untrusted(
            f"{folder} is not signed: there is no {target}. Load it without require= if you trust where it comes from, "
            "or have its maker sign it (holdfast.tools.sign)"
        ) from None
    return checked(data, str(target), record, keys)


def found_signature(folder: Place, record: Manifest) -> bytes | None:
    """The signature of just this manifest as it lies there, unchecked, to go where a copy goes; None if there is none.

    A signature of something else is left behind: readers that require one refuse what has none.
    """
    try:
        data = (folder / signature.file_name(record)).read_small()
        said, _, _ = signature.decode(data, str(folder))
    except (FileNotFoundError, Untrusted):
        return None
    return data if signature.fault(said, record) is None else None


def checked(data: bytes, where: str, record: Manifest, keys: Mapping[str, Any]) -> Signature:
    """What a signature file says, if one of ``keys`` signed it and it is about ``record``. Raises Untrusted."""
    from cryptography.exceptions import InvalidSignature

    said, statement, sealed = signature.decode(data, where)
    if said.key not in keys:
        raise Untrusted(f"{where} was made with the key {said.key}, which is none of those required: {', '.join(keys)}")
    try:
        keys[said.key].verify(sealed, signature.signed_bytes(statement))
    except InvalidSignature:
        raise Untrusted(f"{where} does not fit its key {said.key}: it was altered, or never made with it") from None
    wrong = signature.fault(said, record)
    if wrong:
        raise Untrusted(f"{where} is not of this checkpoint: {wrong}")
    return said
