"""What the files of AWS's tools say: profiles with their keys, regions and endpoints.

`credentials.py` and `urls.py` call it. Never shows a line of such a file.
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
