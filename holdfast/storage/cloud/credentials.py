"""Who we are to a store: what the client library does not look for by itself, in the order of the vendors' own tools.

`wiring.py` calls it when a client is made, `urls.py` asks for a profile's region and endpoint. Never shows a secret.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from holdfast.events import log
from holdfast.storage.cloud.profiles import NoCredentials, aws_files, profile_settings

# The client renews five minutes before the end, so what is read here is read again every five minutes.
HELD = timedelta(minutes=10)

# What tells that a profile gets its keys from elsewhere: by a command, a browser login, another profile's role.
INDIRECT = (
    "role_arn",
    "sso_session",
    "sso_start_url",
    "credential_process",
    "web_identity_token_file",
    "login_session",
)

Provider = Callable[[], dict[str, Any]]


class Found(NamedTuple):
    """Credentials: ``provider`` gives them (None: the client has a way of its own), ``source`` names it in errors.

    ``config`` is what the client must be told besides; ``renews`` says that a later look may find newer ones.
    """

    provider: Provider | None
    source: str
    config: Mapping[str, Any] = {}
    renews: bool = False


def s3(scheme: str, options: Mapping[str, Any]) -> Found:
    """Credentials for S3: options, environment, profile, role, in this order. Raises NoCredentials."""
    if options.get("anonymous"):
        return Found(None, "none (anonymous)", {"skip_signature": True})
    if "access_key_id" in options or "secret_access_key" in options:
        return Found(_of_options(options), "the options")
    if "profile" in options:
        return _of_profile(options["profile"])
    if scheme in ("r2", "weka"):
        prefix = scheme.upper()
        if f"{prefix}_ACCESS_KEY_ID" in os.environ:
            return Found(_of_environment(prefix), f"the environment ({prefix}_ACCESS_KEY_ID)", renews=True)
        profile = os.environ.get(f"{prefix}_PROFILE") or (prefix if profile_settings(prefix) else None)
        if profile:
            return _of_profile(profile)
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("true", "1"):
        return Found(None, "none (AWS_SKIP_SIGNATURE)")
    if "AWS_ACCESS_KEY_ID" in os.environ or "AWS_SECRET_ACCESS_KEY" in os.environ:
        return Found(_of_environment("AWS"), "the environment (AWS_ACCESS_KEY_ID)", renews=True)
    if "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ and "AWS_ROLE_ARN" in os.environ:
        return Found(None, "AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN", renews=True)
    profile = os.environ.get("AWS_PROFILE")
    settings = profile_settings(profile or "default")
    if profile or "aws_access_key_id" in settings or any(name in settings for name in INDIRECT):
        return _of_profile(profile or "default")
    if "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI" in os.environ or "AWS_CONTAINER_CREDENTIALS_FULL_URI" in os.environ:
        return Found(None, "the container's role", renews=True)
    metadata = os.environ.get("AWS_METADATA_ENDPOINT", "http://169.254.169.254")
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true" and reachable(metadata):
        return Found(None, "the instance's role", renews=True)
    own = {"r2": "R2_ACCESS_KEY_ID, ", "weka": "WEKA_ACCESS_KEY_ID, "}.get(scheme, "")
    raise NoCredentials(
        f"there are no credentials: none in the options, none in the environment ({own}AWS_ACCESS_KEY_ID, "
        f"AWS_WEB_IDENTITY_TOKEN_FILE), none for the profile {profile or 'default'!r} in {aws_files()}, and this is no "
        "machine with a role. Give one of these, or the option anonymous=true for a public bucket"
    )


def _credential(key_id: str, secret: str, token: str | None, held: timedelta | None) -> dict[str, Any]:
    for what, text in (("access key id", key_id), ("secret key", secret), ("session token", token or "")):
        if not (text.isascii() and text.isprintable()) or " " in text:
            raise NoCredentials(f"the {what} has a character that no key has (a line's end? a blank?)")
    expires = datetime.now(timezone.utc) + held if held else None
    return {"access_key_id": key_id, "secret_access_key": secret, "token": token or None, "expires_at": expires}


def _of_options(options: Mapping[str, Any]) -> Provider:
    missing = [name for name in ("access_key_id", "secret_access_key") if name not in options]
    if missing:
        raise NoCredentials(f"the option {missing[0]} is missing: a key needs its id and its secret")
    made = _credential(options["access_key_id"], options["secret_access_key"], options.get("session_token"), None)
    return lambda: made


def _of_environment(prefix: str) -> Provider:
    for name in (f"{prefix}_ACCESS_KEY_ID", f"{prefix}_SECRET_ACCESS_KEY"):
        if not os.environ.get(name):
            raise NoCredentials(f"{name} is missing in the environment: a key needs its id and its secret")

    def read() -> dict[str, Any]:
        # Read again every time: a job may put newer ones there.
        key_id, secret = os.environ[f"{prefix}_ACCESS_KEY_ID"], os.environ[f"{prefix}_SECRET_ACCESS_KEY"]
        return _credential(key_id, secret, os.environ.get(f"{prefix}_SESSION_TOKEN"), HELD)

    read()
    return read


def _of_profile(name: str) -> Found:
    settings = profile_settings(name)
    if not settings:
        raise NoCredentials(f"there is no profile {name!r} in {aws_files()}")
    if "aws_access_key_id" in settings:
        return Found(_of_files(name), f"the profile {name!r} of {aws_files()}", renews=True)
    indirect = next((key for key in INDIRECT if key in settings), None)
    if indirect is None:
        raise NoCredentials(f"the profile {name!r} in {aws_files()} has neither aws_access_key_id nor a way to get one")
    return Found(_of_boto3(name, indirect), f"the profile {name!r} ({indirect}, through boto3)", renews=True)


def _of_files(name: str) -> Provider:
    last: dict[str, Any] = {}

    def read() -> dict[str, Any]:
        try:
            settings = profile_settings(name)
            key_id, secret = settings["aws_access_key_id"], settings["aws_secret_access_key"]
        except (NoCredentials, KeyError) as error:
            # Whoever rewrites the file may be in the middle of it.
            why = str(error) if isinstance(error, NoCredentials) else f"the profile has no {error}"
            if not last:
                raise NoCredentials(f"the profile {name!r} in {aws_files()} cannot be used: {why}") from None
            log.warning("credentials of the profile %r are kept as they were: %s", name, why)
        else:
            last.update(_credential(key_id, secret, settings.get("aws_session_token"), HELD))
        return {**last, "expires_at": datetime.now(timezone.utc) + HELD}

    read()
    return read


def _of_boto3(name: str, indirect: str) -> Provider:
    try:
        import boto3  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise NoCredentials(
            f"the profile {name!r} gets its credentials by {indirect}, which needs boto3: pip install boto3"
        ) from None
    try:
        held = boto3.Session(profile_name=name).get_credentials()
        if held is None:
            raise NoCredentials(f"boto3 finds no credentials for the profile {name!r} ({indirect})")
        held.get_frozen_credentials()
    except NoCredentials:
        raise
    except Exception as error:  # noqa: BLE001 (botocore's errors have no common root; what it says is passed on)
        raise NoCredentials(f"boto3 gets no credentials for the profile {name!r} ({indirect}): {error}") from None

    def read() -> dict[str, Any]:
        frozen = held.get_frozen_credentials()
        return _credential(frozen.access_key, frozen.secret_key, frozen.token, HELD)

    return read


def reachable(url: str) -> bool:
    # Asked before the client is: it would try for most of a minute where there is no such service.
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 80), 1.0).close()
    except OSError:
        return False
    return True
