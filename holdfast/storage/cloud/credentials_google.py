"""Who we are to Google Cloud Storage, in the order of Google's own libraries.

`wiring.py` calls it when a client is made. Never shows a secret.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.storage.cloud.credentials import Found, reachable
from holdfast.storage.cloud.profiles import NoCredentials


def google(options: Mapping[str, Any]) -> Found:
    """Credentials for Google Cloud Storage: options, environment, gcloud's, role. Raises NoCredentials."""
    if options.get("anonymous"):
        return Found(None, "none (anonymous)", {"skip_signature": True})
    if "token" in options:
        return Found(None, "the options", {"bearer_token": options["token"]})
    given = options.get("credential_file") or os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if given:
        file = Path(given).expanduser()
        where = f"{file} (from {'the options' if 'credential_file' in options else 'GOOGLE_APPLICATION_CREDENTIALS'})"
        return Found(None, str(file), _google_file(file, where), renews=True)
    for name in (
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_SKIP_SIGNATURE",
        "GOOGLE_BEARER_TOKEN",
    ):
        if name in os.environ:
            return Found(None, f"the environment ({name})")
    home = Path("~/.config/gcloud/application_default_credentials.json").expanduser()
    if home.exists():
        return Found(None, str(home), _google_file(home, str(home)), renews=True)
    host = os.environ.get("GCE_METADATA_HOST") or os.environ.get("GCE_METADATA_ROOT") or "169.254.169.254"
    if reachable(f"http://{host}"):
        return Found(None, "the instance's service account", renews=True)
    raise NoCredentials(
        "there are no credentials: no option credential_file, no GOOGLE_APPLICATION_CREDENTIALS or "
        f"GOOGLE_SERVICE_ACCOUNT in the environment, no {home}, and this is no machine of Google's. Give one of these, "
        "run `gcloud auth application-default login`, or use the option anonymous=true for a public bucket"
    )


def _google_file(file: Path, where: str) -> dict[str, Any]:
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoCredentials(f"{where} cannot be read: {error.strerror}") from None
    except ValueError:
        raise NoCredentials(f"{where} is not JSON") from None
    kind = told.get("type") if isinstance(told, dict) else None
    if kind == "service_account" or (isinstance(told, dict) and "private_key" in told):
        return {"service_account": str(file)}
    if kind == "authorized_user":
        return {"application_credentials": str(file)}
    raise NoCredentials(
        f"{where} is of type {kind!r}: holdfast can use service_account and authorized_user. On a machine of Google's, "
        "unset it to use the machine's own service account"
    )
