"""From what a user writes to a `Place`: a local path, or a place in the store that a URL names.

Every public verb that takes a path calls it. Never connects to anything, and never shows a secret.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from holdfast.errors import Unsupported
from holdfast.storage.cloud.cloud import Cloud
from holdfast.storage.cloud.failures import no_credentials
from holdfast.storage.cloud.options import checked
from holdfast.storage.cloud.profiles import NoCredentials, profile_name, profile_settings
from holdfast.storage.hub.address import parsed
from holdfast.storage.hub.hub import Hub
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place
from holdfast.storage.store import Store
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.retrying import Retrying

SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
    "r2": "r2",
    "weka": "weka",
    "http": "http",
    "https": "https",
    "hf": "hf",
}
"""What a URL may begin with, and what that is here."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HOST = re.compile(r"[A-Za-z0-9._:$-]+|\[[0-9A-Fa-f:]+\](:\d+)?")
_FLATTENED = re.compile(rf"({'|'.join(SCHEMES)}):/[^/]")

_stores: dict[tuple[object, ...], Store] = {}
_lock = threading.Lock()


def location(path: str | os.PathLike[str] | Place, options: Mapping[str, Any] | None = None) -> Place:
    """Where ``path`` is: an absolute local path, or a place in the store that a URL names.

    Raises ValueError for a URL or an option that cannot be meant, Unsupported if the client for stores is missing.
    """
    if isinstance(path, Place) and not isinstance(path, LocalPlace):
        if options:
            raise ValueError(f"{path} is a place in a store already: options belong to holdfast.storage.at")
        return path
    text = os.fspath(path)
    if not text:  # a variable of a script that was never set: it shall not mean the working directory
        raise ValueError("the path is empty: give a folder, or a URL")
    matched = _URL.match(text)
    if matched and matched[1].lower() != "file":
        return _place(matched[1].lower(), matched[2], options or {})
    if options:
        raise ValueError(f"{text} is a local path: options are for URLs")
    if matched:
        return LocalPlace(os.path.abspath(_of_file_url(matched[2], text)))
    if flattened := _FLATTENED.match(text):
        raise ValueError(
            f"{text!r} was a URL until pathlib took one slash away: pass {flattened[1]}://… as a str, "
            "or what holdfast.storage.at returns"
        )
    return LocalPlace(os.path.abspath(os.path.expanduser(text)))


def at(url: str, options: Mapping[str, Any] | None = None) -> StorePlace:
    """Return the place that a URL names, with options that a URL should not hold, such as keys.

    Every function of holdfast that takes a path takes a place, and a plain URL too, also with options that are no
    secrets: ``s3://bucket/run?profile=lab``. Credentials, region and endpoint are looked for where the vendors' tools
    do: the environment, ``~/.aws``, the settings of gcloud and Azure, the machine's role.

    Args:
        url: ``s3://``, ``gs://``, ``az://``, ``r2://``, ``weka://``; ``https://`` for reading; or a repository of the
            Hugging Face hub, ``hf://owner/name@revision/path``.
        options: endpoint_url, region, profile, anonymous, access_key_id, secret_access_key, session_token, account,
            account_key, sas_token, token, private, credential_file, allow_http, virtual_host, verify_tls, ca_file,
            connect_timeout, read_timeout, write_timeout, retry_timeout, concurrency, part_size, sign_payload,
            bulk_delete. docs/stores.md says what each is.

    Raises:
        ValueError: A local path, or a URL or an option that cannot be meant.
        Unsupported: The client for stores is not installed.

    Example:
        >>> run = holdfast.storage.at("s3://bucket/run", {"profile": "lab", "endpoint_url": "http://10.0.0.5:9000"})
        >>> run / "step-100"
        Place('s3://bucket/run/step-100')
    """
    place = location(url, options)
    if isinstance(place, StorePlace):
        return place
    raise ValueError(f"{url} is a local path, not a URL: pass it as it is")


def _of_file_url(rest: str, text: str) -> str:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise ValueError(f"{text!r} names the host {host!r}: a file URL has three slashes, file:///absolute/path")
    return unquote(slash + path)


def _place(scheme: str, rest: str, options: Mapping[str, Any]) -> StorePlace:
    if scheme not in SCHEMES:
        near = get_close_matches(scheme, SCHEMES, n=1, cutoff=0.5)
        meant = f" (did you mean {near[0]}://?)" if near else ""
        raise ValueError(f"holdfast has no store for {scheme}://{meant}: there are {', '.join(SCHEMES)} and file")
    rest, _, query = rest.partition("?")
    in_query = dict(parse_qsl(query, keep_blank_values=True))
    if scheme == "hf":
        return _of_hub(rest, in_query, options)
    host, _, path = rest.partition("/")
    plain = f"{scheme}://{host.rpartition('@')[2]}/{path}"
    kind = SCHEMES[scheme]
    given: dict[str, Any] = {}
    if kind == "az" and "@" in host:
        host, _, account = host.partition("@")
        given = _of_account(account)
    if "@" in host or (kind == "az" and ":" in host):  # container:password@account
        plain = plain if "@" in host else f"{scheme}://…/{path}"
        raise ValueError(f"{plain} has credentials in it: pass them in options, the environment or a credentials file")
    if not host:
        raise ValueError(
            f"{plain} names no {'host' if kind in ('http', 'https') else 'bucket'}: {scheme}://BUCKET/path"
        )
    if not _HOST.fullmatch(host):
        raise ValueError(f"{plain} has a character in {host!r} that no name of a bucket, container or host has")
    given = {
        **given,
        **checked(in_query, plain, from_url=True),
        **checked(options, plain),
    }
    if kind in ("http", "https"):
        path = unquote(urlsplit(f"//{host}/{path}").path.lstrip("/"))
    key = _key(path, plain)
    return StorePlace(_store(kind, host, given), key)


def _key(path: str, plain: str) -> str:
    parts = [part for part in path.split("/") if part]
    if "." in parts or ".." in parts:
        raise ValueError(f"{plain} has a part '.' or '..', which mean nothing in a store")
    return "/".join(parts)


def _of_hub(rest: str, in_query: Mapping[str, Any], options: Mapping[str, Any]) -> StorePlace:
    address, path = parsed(rest)
    given = {**checked(in_query, address.url, from_url=True), **checked(options, address.url)}
    key, hub = _key(path, f"{address.url}/{path}"), Hub(address, given)
    assert hub.client  # raises ValueError
    # A store of its own for each place: it reads one commit, and the next place may be of another. It repeats nothing
    # by itself, and a hub that asks to slow down says for how long.
    return StorePlace(Retrying(hub, attempts=8, most=20.0), key)


def _of_account(host: str) -> dict[str, Any]:
    account, dot, domain = host.partition(".")
    given = {"account": account}
    if dot and domain not in ("dfs.core.windows.net", "blob.core.windows.net"):
        # Another cloud of Azure's; blobs and the file system are two names of the same.
        given["endpoint_url"] = f"https://{account}.{domain.replace('dfs.', 'blob.', 1)}"
    return given


def _store(scheme: str, bucket: str, options: dict[str, Any]) -> Store:
    if importlib.util.find_spec("obstore") is None:
        raise Unsupported(f'{scheme}://{bucket} needs obstore: pip install "holdfast-torch[cloud]"')
    try:
        settled = _settled(scheme, bucket, options)
    except NoCredentials as error:
        raise no_credentials(str(error), f"{scheme}://{bucket}") from None
    key = (scheme, bucket, *sorted(settled.items()))
    with _lock:
        store = _stores.get(key)
        if store is None:
            # Twice: the client itself repeats what fails for minutes, but for a few things that it gives up at once.
            store = _stores[key] = Retrying(Cloud(scheme, bucket, settled), attempts=2)
        return store


def _settled(scheme: str, bucket: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options with what the environment and the profile say of endpoint and region, so that they travel along."""
    if scheme == "gs" and "endpoint_url" not in options and os.environ.get("GOOGLE_BASE_URL"):
        return {**options, "endpoint_url": os.environ["GOOGLE_BASE_URL"]}
    if scheme not in ("s3", "r2", "weka"):
        return options
    profile = profile_settings(profile_name(scheme, options))
    if scheme == "s3":
        endpoint = _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT") or profile.get("endpoint_url")
        region = _first("AWS_REGION", "AWS_DEFAULT_REGION") or profile.get("region")
    else:
        prefix = scheme.upper()
        endpoint = _first(f"{prefix}_ENDPOINT_URL") or profile.get("endpoint_url")
        region = _first(f"{prefix}_REGION") or profile.get("region") or ("auto" if scheme == "r2" else None)
        if scheme == "r2":
            endpoint = _of_r2(options.get("account")) or endpoint or _of_r2(_first("R2_ACCOUNT_ID"))
        if not endpoint and "endpoint_url" not in options:
            also = ", or the account id as R2_ACCOUNT_ID or the option account" if scheme == "r2" else ""
            raise ValueError(
                f"{scheme}://{bucket} needs an endpoint: set {prefix}_ENDPOINT_URL, or the option endpoint_url{also}"
            )
    settings = {"endpoint_url": endpoint, "region": region}
    return {**checked(settings, f"{scheme}://{bucket}"), **options}


def _of_r2(account: str | None) -> str | None:
    return f"https://{account}.r2.cloudflarestorage.com" if account else None


def _first(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
