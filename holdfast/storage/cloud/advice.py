"""What to do about a refusal, in the words of the store it came from: permissions, places to look, dates and regions.

`refusals.py` calls it. Never decides what an error is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timezone

_LIST_TOO = "; without s3:ListBucket a file that is missing is refused in this way too"

PERMISSIONS: dict[str, dict[str, str]] = {
    "s3": {
        "list": "s3:ListBucket on the bucket",
        "size": f"s3:GetObject{_LIST_TOO}",
        "get": f"s3:GetObject{_LIST_TOO}",
        "create": "s3:PutObject, and s3:GetObject to see who was first",
        "put": "s3:PutObject and s3:AbortMultipartUpload",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "list": "storage.objects.list",
        "size": "storage.objects.get",
        "get": "storage.objects.get",
        "create": "storage.objects.create, and storage.objects.get to see who was first",
        "put": "storage.objects.create, storage.multipartUploads.create and storage.multipartUploads.abort "
        "(and storage.objects.delete to replace a file)",
        "delete": "storage.objects.delete",
    },
    "az": {
        "list": "the role Storage Blob Data Reader, or a SAS with l (list)",
        "size": "the role Storage Blob Data Reader, or a SAS with r (read)",
        "get": "the role Storage Blob Data Reader, or a SAS with r (read)",
        "create": "the role Storage Blob Data Contributor, or a SAS with r, c and w (read, create, write)",
        "put": "the role Storage Blob Data Contributor, or a SAS with c and w (create, write)",
        "delete": "the role Storage Blob Data Contributor, or a SAS with d (delete)",
    },
}

GIVE_CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the options access_key_id and "
    "secret_access_key; for a public bucket anonymous=true",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS or the option credential_file, or run "
    "`gcloud auth application-default login`; for a public bucket anonymous=true",
    "az": "Set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, the options "
    "account_key or sas_token, or run `az login`; for a public container anonymous=true",
    "http": "holdfast sends no credentials to web servers",
}

LOGIN = {
    "s3": "Get new credentials",
    "gs": "Run `gcloud auth application-default login`, or get a new key of the service account",
    "az": "Run `az login`, or get a new key or SAS",
    "http": "",
}

CHECK_HOST = {
    "s3": "Check endpoint_url and region, and this machine's network",
    "gs": "Check this machine's network, and endpoint_url if it is set",
    "az": "Check the name of the storage account (it is part of the host's name), and this machine's network",
    "http": "Check the host in the URL",
}

CERTIFICATES = {
    "UnknownIssuer": "its authority is unknown",
    "Expired": "it has expired",
    "NotValidForName": "it is for another host name",
    "NotValidYet": "it is not valid yet (is this machine's clock right?)",
    "CaUsedAsEndEntity": "it is a certificate authority's own",
}

SLOW = {
    "get": "If the server is slow and not stuck, raise the option read_timeout",
    "put": "If the network is slow and not stuck, raise the option write_timeout or lower concurrency",
}

# Where credentials come from that are not there: an instance's, a container's, a token service.
_CREDENTIAL_SERVICES = (
    "169.254.169.254",
    "169.254.170.",
    "/latest/api/token",
    "/latest/meta-data/",
    "metadata.google",
    "computeMetadata",
    "AssumeRoleWithWebIdentity",
    "oauth2.googleapis.com",
    "login.microsoftonline",
    "Failed to read token file",
    "Failed to read EKS token file",
    "az account get-access-token",
    "azure cli",
)


def asks_for_credentials(depth: str) -> bool:
    """Whether an error is about getting credentials, before anything was sent to the store."""
    return any(service in depth for service in _CREDENTIAL_SERVICES)


def permission(family: str, verb: str) -> str:
    """What must be allowed for a verb."""
    needed = PERMISSIONS.get(family, {}).get(verb)
    return f"It takes {needed}" if needed else ""


def skew(depth: str, ask_clock: Callable[[], float | None]) -> str:
    """By how much this machine's clock is off: as the answer tells, or as ``ask_clock`` finds out."""
    told = re.search(r"<ServerTime>(.*?)</ServerTime>", depth)
    try:
        server = datetime.fromisoformat(told[1].replace("Z", "+00:00")) if told else None
    except ValueError:
        server = None
    if server is None and (ahead := ask_clock()) is not None:
        return _ahead(ahead)
    if server is None:
        return "the server refuses the time of the request: this machine's clock is wrong (or the server's)"
    if server.tzinfo is None:
        server = server.replace(tzinfo=timezone.utc)
    ours = _request_time(depth) or datetime.now(timezone.utc)
    return _ahead((ours - server).total_seconds())


def _ahead(seconds: float) -> str:
    return f"this machine's clock is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} the server's"


def _request_time(depth: str) -> datetime | None:
    told = re.search(r"<RequestTime>(\d{8}T\d{6})Z</RequestTime>", depth)
    return datetime.strptime(told[1], "%Y%m%dT%H%M%S").replace(tzinfo=timezone.utc) if told else None


def expected_region(depth: str) -> str:
    """The region that an answer names; empty if it names none."""
    for pattern in (
        r"<Region>([\w-]+)</Region>",
        r"expecting '([\w-]+)'",
        r"<Endpoint>[^<]*?s3[.-]([a-z]{2}-[\w-]+?-\d)\.",
    ):
        if told := re.search(pattern, depth):
            return told[1]
    return ""


def azure_authentication(message: str, who: str) -> tuple[str, str]:
    """What is wrong and what to do, for Azure's one code for all of it."""
    if "MAC signature" in message:
        return f"the account key{who} is not a key of this storage account", "Check account and account_key"
    if "Signature not valid in the specified time frame" in message or "expired" in message.lower():
        return (
            f"the SAS or token{who} has expired, or is not valid yet",
            "Get a new one, and check this machine's clock",
        )
    if "Signature did not match" in message or "Signature fields" in message:
        return (
            f"the SAS{who} is not valid",
            "Check that sas_token is whole, and as the portal shows it (percent-encoded)",
        )
    if "audience" in message.lower():
        return f"the token{who} is for another service", "It must be for https://storage.azure.com"
    return f"the server does not accept the credentials{who}: {message}", "Check account, account_key and sas_token"
