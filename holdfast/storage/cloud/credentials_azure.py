"""Who we are to Azure, in the order of Azure's own libraries, with the names of its command line too.

`wiring.py` calls it when a client is made. Never shows a secret.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from holdfast.storage.cloud.credentials import Found, reachable
from holdfast.storage.cloud.profiles import NoCredentials


def azure(options: Mapping[str, Any]) -> Found:
    """Credentials for Azure: options, environment, managed identity, `az login`. Raises NoCredentials."""
    told, source = _azure_told(options)
    if "account_name" not in told:
        raise NoCredentials(
            "the storage account is missing: give it as az://container@account/…, as the option account, or in "
            "AZURE_STORAGE_ACCOUNT_NAME or AZURE_STORAGE_CONNECTION_STRING"
        )
    if options.get("anonymous"):
        return Found(None, "none (anonymous)", {**told, "skip_signature": True})
    if source:
        return Found(None, source, told)
    for name in (
        "AZURE_STORAGE_TOKEN",
        "AZURE_CLIENT_ID",
        "AZURE_STORAGE_CLIENT_ID",
        "AZURE_SKIP_SIGNATURE",
        "AZURE_MSI_ENDPOINT",
        "AZURE_IDENTITY_ENDPOINT",
        "AZURE_USE_AZURE_CLI",
        "AZURE_CREDENTIAL_TYPE",
        "AZURE_FABRIC_TOKEN_SERVICE_URL",
    ):
        if name in os.environ:
            return Found(None, f"the environment ({name})", told, renews=True)
    if reachable("http://169.254.169.254"):
        return Found(None, "the machine's managed identity", told, renews=True)
    if shutil.which("az"):
        return Found(None, "az login", {**told, "use_azure_cli": True}, renews=True)
    raise NoCredentials(
        "there are no credentials: no option account_key or sas_token, nothing in the environment "
        "(AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_STORAGE_CONNECTION_STRING, AZURE_CLIENT_ID), this "
        "is no machine with a managed identity, and there is no `az`. Give one of these, or the option anonymous=true "
        "for a public container"
    )


_AZURE_ENVIRONMENT = {
    "account_name": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
    "account_key": (
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_KEY",
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_MASTER_KEY",
    ),
    "sas_key": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
    "endpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_SECRETS = {"account_key", "sas_key", "token"}
_CONNECTION_STRING = {
    "accountname": "account_name",
    "accountkey": "account_key",
    "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}


def _azure_told(options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    told: dict[str, Any] = {}
    names = {
        "account": "account_name",
        "account_key": "account_key",
        "sas_token": "sas_key",
        "endpoint_url": "endpoint",
    }
    for ours, theirs in names.items():
        if ours in options:
            told[theirs] = options[ours].lstrip("?") if ours == "sas_token" else options[ours]
    secret = "the options" if told.keys() & _SECRETS else ""
    # A key belongs to its account: what the environment says of another one does not count.
    connection = _connection_string(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    environment = {
        ours: value for ours, names in _AZURE_ENVIRONMENT.items() for value in _first(names) if ours not in told
    }
    for found, source in ((environment, "the environment"), (connection, "AZURE_STORAGE_CONNECTION_STRING")):
        if found.get("account_name", told.get("account_name")) != told.get("account_name", found.get("account_name")):
            continue
        has_secret = bool(found.keys() & _SECRETS)
        for name, value in found.items():
            if not (secret and name in _SECRETS):
                told.setdefault(name, value)
        if has_secret and not secret:
            secret = source
    return told, secret


def _first(names: tuple[str, ...]) -> list[str]:
    return [os.environ[name] for name in names if os.environ.get(name)][:1]


def _connection_string(text: str) -> dict[str, str]:
    fields = {
        key.strip().lower(): value.strip() for key, _, value in (p.partition("=") for p in text.split(";")) if key
    }
    found = {ours: fields[theirs] for theirs, ours in _CONNECTION_STRING.items() if theirs in fields}
    if "endpoint" not in found and "account_name" in found and "endpointsuffix" in fields:
        scheme = fields.get("defaultendpointsprotocol", "https")
        found["endpoint"] = f"{scheme}://{found['account_name']}.blob.{fields['endpointsuffix']}"
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        found.setdefault("account_name", "devstoreaccount1")
        found.setdefault("endpoint", "http://127.0.0.1:10000/devstoreaccount1")
        # Public: the emulator's documentation prints it, and every emulator has it.
        emulator = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
        found.setdefault("account_key", emulator)
    return found
