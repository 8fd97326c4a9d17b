"""The account, key and endpoint of Azure's storage, from options and the environment.

`credentials.py` calls it. Never shows a secret. The client library reads most of the variables itself; it knows neither
connection strings nor the names that the `az` command uses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

_OPTIONS = {
    "account": "account_name", "account_key": "account_key", "sas_token": "sas_key", "endpoint_url": "endpoint",
    "token": "token",
}  # fmt: skip
_ENVIRONMENT = {
    "AZURE_STORAGE_ACCOUNT_NAME": "account_name",
    "AZURE_STORAGE_ACCOUNT": "account_name",
    "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
    "AZURE_STORAGE_KEY": "account_key",
    "AZURE_STORAGE_ACCESS_KEY": "account_key",
    "AZURE_STORAGE_MASTER_KEY": "account_key",
    "AZURE_STORAGE_SAS_TOKEN": "sas_key",
    "AZURE_STORAGE_SAS_KEY": "sas_key",
    "AZURE_STORAGE_ENDPOINT": "endpoint",
    "AZURE_ENDPOINT": "endpoint",
}
_CONNECTION_STRING = {
    "accountname": "account_name", "accountkey": "account_key", "sharedaccesssignature": "sas_key",
    "blobendpoint": "endpoint",
}  # fmt: skip
_SECRETS = {"account_key", "sas_key", "token"}


def azure_settings(options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Settings for the client, and where the key, SAS or token in it comes from (``""`` if there is none)."""
    given = {name: options[option] for option, name in _OPTIONS.items() if option in options}
    if "sas_key" in given:
        given["sas_key"] = given["sas_key"].lstrip("?")
    environment: dict[str, Any] = {}
    for variable, name in _ENVIRONMENT.items():
        if os.environ.get(variable) and name not in given:
            environment.setdefault(name, os.environ[variable])
    settings, source = given, "the options" if given.keys() & _SECRETS else ""
    connection = _connection_string(os.environ.get("AZURE_STORAGE_CONNECTION_STRING", ""))
    for more, origin in ((environment, "the environment"), (connection, "AZURE_STORAGE_CONNECTION_STRING")):
        # A key belongs to its account: what is said of another account does not count.
        if (
            "account_name" in settings
            and more.get("account_name", settings["account_name"]) != settings["account_name"]
        ):
            continue
        settings = {**{name: more[name] for name in more if not (source and name in _SECRETS)}, **settings}
        source = source or (origin if more.keys() & _SECRETS else "")
    return settings, source


def _connection_string(text: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in text.split(";") if pair)
    fields = {key.strip().lower(): value.strip() for key, _, value in pairs}
    if fields.get("usedevelopmentstorage", "").lower() == "true":
        # The key is public: every emulator has it, and its documentation prints it.
        emulator = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
        fields = {
            "accountname": "devstoreaccount1", "accountkey": emulator,
            "blobendpoint": "http://127.0.0.1:10000/devstoreaccount1", **fields,
        }  # fmt: skip
    settings = {name: fields[field] for field, name in _CONNECTION_STRING.items() if field in fields}
    if "endpoint" not in settings and "account_name" in settings and "endpointsuffix" in fields:
        scheme = fields.get("defaultendpointsprotocol", "https")
        settings["endpoint"] = f"{scheme}://{settings['account_name']}.blob.{fields['endpointsuffix']}"
    return settings
