"""What the vendors' own settings say: the profiles in AWS's files, and Azure's account, key and endpoint.

`credentials.py` and `urls.py` call it. Never shows a secret or a line of such a file. The client library reads most of
Azure's variables itself, but no connection strings, nor the names that the `az` command uses.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INDIRECT = (
    "role_arn", "sso_session", "sso_start_url", "credential_process", "web_identity_token_file", "login_session",
)  # fmt: skip
"""Settings of a profile that gets its keys from elsewhere: by a command, a browser login, another profile's role."""


class NoCredentials(Exception):
    """There are none, or what is configured cannot be used; the text says where they were looked for."""


def profile_settings(name: str) -> dict[str, str]:
    """What the AWS files say of a profile; empty if they do not know it. Raises NoCredentials for a broken file."""
    settings: dict[str, str] = {}
    config, credentials = aws_file("AWS_CONFIG_FILE", "config"), aws_file("AWS_SHARED_CREDENTIALS_FILE", "credentials")
    parsed = _parsed(config)
    section = name if name == "default" and parsed.has_section(name) else f"profile {name}"
    for source, section_name in ((parsed, section), (_parsed(credentials), name)):
        if source.has_section(section_name):
            settings.update({key: value or "" for key, value in source.items(section_name)})
    services = f"services {settings['services']}" if "services" in settings else ""
    if services and parsed.has_section(services):
        # Lines that are indented belong to the setting above them: "s3 =" and below it "endpoint_url = …".
        for line in parsed.get(services, "s3", fallback="").splitlines():
            key, _, value = line.partition("=")
            if key.strip() == "endpoint_url":
                settings["endpoint_url"] = value.strip()
    return settings


def profile_name(scheme: str, options: Mapping[str, Any]) -> str:
    """The profile whose region and endpoint count."""
    if "profile" in options:
        return str(options["profile"])
    if scheme in ("r2", "weka"):
        return os.environ.get(f"{scheme.upper()}_PROFILE") or scheme.upper()
    return os.environ.get("AWS_PROFILE") or "default"


def aws_file(variable: str, name: str) -> Path:
    return Path(os.environ.get(variable) or f"~/.aws/{name}").expanduser()


def aws_files() -> str:
    return f"{aws_file('AWS_SHARED_CREDENTIALS_FILE', 'credentials')} and {aws_file('AWS_CONFIG_FILE', 'config')}"


def _parsed(file: Path) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True, default_section="\0none")
    try:
        parser.read(file, encoding="utf-8")
    except configparser.Error as error:
        # The parser's own text quotes the line, which may be a secret.
        line = getattr(error, "lineno", None) or next((number for number, _ in getattr(error, "errors", [])), "?")
        raise NoCredentials(f"{file} cannot be understood (line {line}): it must consist of [sections]") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NoCredentials(f"{file} cannot be read: {type(error).__name__}") from None
    return parser


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
