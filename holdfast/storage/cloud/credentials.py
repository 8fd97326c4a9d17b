"""Credentials for S3, Google Cloud Storage and Azure: which of several are used, and where they come from.

`client.py` and `doctor` ask `credentials_for`. Never shows a secret.

The client library signs in by itself from its environment variables, key files, roles of pods and machines, and `az
login`. Done here is what it does not: AWS profiles, the order where several are there, keys that a job replaces while
it runs, and an error in a second, in the place of a minute of attempts, where there are none at all.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from holdfast.events import log
from holdfast.storage.cloud.profiles import INDIRECT, NoCredentials, aws_files, azure_settings, profile_settings

TTL = timedelta(minutes=10)
"""How long a key counts that may be replaced. The client renews five minutes earlier, so it is read every five."""

_METADATA = "http://169.254.169.254"
_GOOGLE = (
    "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_SKIP_SIGNATURE",
    "GOOGLE_BEARER_TOKEN",
)  # fmt: skip
_AZURE = (
    "AZURE_STORAGE_TOKEN", "AZURE_CLIENT_ID", "AZURE_STORAGE_CLIENT_ID", "AZURE_SKIP_SIGNATURE", "AZURE_MSI_ENDPOINT",
    "AZURE_IDENTITY_ENDPOINT", "AZURE_USE_AZURE_CLI", "AZURE_CREDENTIAL_TYPE", "AZURE_FABRIC_TOKEN_SERVICE_URL",
)  # fmt: skip
"""Variables by which the client library signs in by itself."""

Provider = Callable[[], Mapping[str, Any]]


class Credentials(NamedTuple):
    """Where credentials come from (``source``, for errors), and how the client gets them.

    ``config`` goes to the client as it is, ``provider`` gives keys (None: the client has a way of its own), and
    ``renews`` says that a later look may find newer ones.
    """

    source: str
    config: Mapping[str, Any] = {}
    provider: Provider | None = None
    renews: bool = False


def credentials_for(scheme: str, options: Mapping[str, Any]) -> Credentials:
    """Credentials for a URL's store. Raises NoCredentials, which says where they were looked for."""
    if scheme == "gs":
        return google(options)
    if scheme == "az":
        return azure(options)
    return Credentials("none") if scheme in ("http", "https") else s3(scheme, options)


def s3(scheme: str, options: Mapping[str, Any]) -> Credentials:
    """For S3 and its kin: options, environment, profile, role, in this order."""
    if options.get("anonymous"):
        return Credentials("none (anonymous)", {"skip_signature": True})
    if "access_key_id" in options or "secret_access_key" in options:
        return _keys_of_options(options)
    if "profile" in options:
        return _profile(options["profile"])
    if scheme in ("r2", "weka"):
        prefix = scheme.upper()
        if f"{prefix}_ACCESS_KEY_ID" in os.environ:
            return _environment(prefix)
        if own := os.environ.get(f"{prefix}_PROFILE") or (prefix if profile_settings(prefix) else None):
            return _profile(own)
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1"):
        return Credentials("none (AWS_SKIP_SIGNATURE)")
    if _set(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")):
        return _environment("AWS")
    if "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ and "AWS_ROLE_ARN" in os.environ:
        return Credentials("AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN", renews=True)
    profile = os.environ.get("AWS_PROFILE")
    if profile or {"aws_access_key_id", *INDIRECT} & profile_settings("default").keys():
        return _profile(profile or "default")
    if _set(("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")):
        return Credentials("the container's role", renews=True)
    disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if not disabled and reachable(os.environ.get("AWS_METADATA_ENDPOINT", _METADATA)):
        return Credentials("the instance's role", renews=True)
    own = {"r2": "R2_ACCESS_KEY_ID, ", "weka": "WEKA_ACCESS_KEY_ID, "}.get(scheme, "")
    raise NoCredentials(
        f"there are no credentials: none in the options, none in the environment ({own}AWS_ACCESS_KEY_ID, "
        f"AWS_WEB_IDENTITY_TOKEN_FILE), none for the profile {profile or 'default'!r} in {aws_files()}, and this is no "
        "machine with a role. Give one of these, or the option anonymous=true for a public bucket"
    )


def _key(key_id: str, secret: str, token: str | None, ttl: timedelta | None = TTL) -> dict[str, Any]:
    for what, text in (("access key id", key_id), ("secret key", secret), ("session token", token or "")):
        if not (text.isascii() and text.isprintable()) or " " in text:
            raise NoCredentials(f"the {what} has a character that no key has (a line's end? a blank?)")
    expires = datetime.now(timezone.utc) + ttl if ttl else None
    return {"access_key_id": key_id, "secret_access_key": secret, "token": token or None, "expires_at": expires}


def _keys_of_options(options: Mapping[str, Any]) -> Credentials:
    for name in ("access_key_id", "secret_access_key"):
        if name not in options:
            raise NoCredentials(f"the option {name} is missing: a key needs its id and its secret")
    # No config: the client would take a token of the environment as one of this key.
    key = _key(options["access_key_id"], options["secret_access_key"], options.get("session_token"), None)
    return Credentials("the options", provider=lambda: key)


def _environment(prefix: str) -> Credentials:
    key_id, secret, token = (f"{prefix}_{name}" for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN"))
    for name in (key_id, secret):
        if not os.environ.get(name):
            raise NoCredentials(f"{name} is missing in the environment: a key needs its id and its secret")

    def read() -> dict[str, Any]:
        return _key(os.environ[key_id], os.environ[secret], os.environ.get(token))

    read()
    return Credentials(f"the environment ({key_id})", provider=read, renews=True)


def _profile(name: str) -> Credentials:
    settings = profile_settings(name)
    if not settings:
        raise NoCredentials(f"there is no profile {name!r} in {aws_files()}")
    if "aws_access_key_id" in settings:
        return Credentials(f"the profile {name!r} of {aws_files()}", provider=_key_of_profile(name), renews=True)
    indirect = next((key for key in INDIRECT if key in settings), None)
    if indirect is None:
        raise NoCredentials(f"the profile {name!r} in {aws_files()} has neither aws_access_key_id nor a way to get one")
    return Credentials(
        f"the profile {name!r} ({indirect}, through boto3)", provider=_boto3(name, indirect), renews=True
    )


def _key_of_profile(name: str) -> Provider:
    last: dict[str, Any] = {}

    def read() -> dict[str, Any]:
        try:
            settings = profile_settings(name)
            key = _key(
                settings["aws_access_key_id"], settings["aws_secret_access_key"], settings.get("aws_session_token")
            )
        except (NoCredentials, KeyError) as error:
            # The file may be half written just now.
            why = str(error) if isinstance(error, NoCredentials) else f"the profile has no {error}"
            if not last:
                raise NoCredentials(f"the profile {name!r} in {aws_files()} cannot be used: {why}") from None
            log.warning("credentials of the profile %r are kept as they were: %s", name, why)
            key = {**last, "expires_at": datetime.now(timezone.utc) + TTL}
        last.update(key)
        return key

    read()
    return read


def _boto3(name: str, indirect: str) -> Provider:
    try:
        import boto3  # type: ignore[import-not-found, unused-ignore]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise NoCredentials(
            f"the profile {name!r} gets its credentials by {indirect}, which needs boto3: pip install boto3"
        ) from None
    try:
        provider = Boto3CredentialProvider(boto3.Session(profile_name=name), ttl=TTL)
        provider()
    except Exception as error:  # noqa: BLE001 (botocore's errors have no common root; what it says is passed on)
        raise NoCredentials(f"boto3 gets no credentials for the profile {name!r} ({indirect}): {error}") from None
    return provider.__call__  # without its config: the region is an option, whatever the profile says


def google(options: Mapping[str, Any]) -> Credentials:
    """For Google Cloud Storage: options, environment, gcloud's file, role, in this order."""
    if options.get("anonymous"):
        return Credentials("none (anonymous)", {"skip_signature": True})
    if "token" in options:
        return Credentials("the options", {"bearer_token": options["token"]})
    if given := options.get("credential_file"):
        return _google_file(given, " (from the options)")
    if given := os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return _google_file(given, " (from GOOGLE_APPLICATION_CREDENTIALS)")
    if variable := _set(_GOOGLE):
        return Credentials(f"the environment ({variable})")
    home = Path("~/.config/gcloud/application_default_credentials.json").expanduser()
    if home.exists():
        return _google_file(home)
    host = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_ROOT") or "169.254.169.254"
    if reachable(f"http://{host}"):
        return Credentials("the instance's service account", renews=True)
    raise NoCredentials(
        "there are no credentials: no option credential_file, no GOOGLE_APPLICATION_CREDENTIALS or "
        f"GOOGLE_SERVICE_ACCOUNT in the environment, no {home}, and this is no machine of Google's. Give one of these, "
        "run `gcloud auth application-default login`, or use the option anonymous=true for a public bucket"
    )


def _google_file(file: str | Path, origin: str = "") -> Credentials:
    path = str(Path(file).expanduser())
    return Credentials(f"{path}{origin}", {"application_credentials": path}, renews=True)


def azure(options: Mapping[str, Any]) -> Credentials:
    """For Azure: options, environment, managed identity, `az login`, in this order."""
    settings, source = azure_settings(options)
    if "account_name" not in settings:
        raise NoCredentials(
            "the storage account is missing: give it as az://container@account/…, as the option account, or in "
            "AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING"
        )
    if options.get("anonymous"):
        return Credentials("none (anonymous)", {**settings, "skip_signature": True})
    if source:
        return Credentials(source, settings)
    if variable := _set(_AZURE):
        return Credentials(f"the environment ({variable})", settings, renews=True)
    if reachable(_METADATA):
        return Credentials("the machine's managed identity", settings, renews=True)
    if shutil.which("az"):
        return Credentials("az login", {**settings, "use_azure_cli": True}, renews=True)
    raise NoCredentials(
        "there are no credentials: no option account_key or sas_token, nothing in the environment "
        "(AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_STORAGE_CONNECTION_STRING, AZURE_CLIENT_ID), this "
        "is no machine with a managed identity, and there is no `az`. Give one of these, or the option anonymous=true "
        "for a public container"
    )


def _set(variables: Iterable[str]) -> str | None:
    """The first of these variables that the environment has."""
    return next((name for name in variables if name in os.environ), None)


def reachable(url: str) -> bool:
    """Whether a service of the machine answers; the client would try for most of a minute where there is none."""
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), 1.0).close()
    except OSError:
        return False
    return True
