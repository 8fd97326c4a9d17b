"""Why a store refused: one table from what it answered to an OSError that says what is wrong and what to do.

`cloud.py` passes every error of the client library through `failure`. Never shows a secret, a query string or a
request's headers.
"""

from __future__ import annotations

import errno as E
import re
from collections.abc import Mapping
from typing import NamedTuple

from holdfast.storage.cloud.facts import Facts, Request, answer_in
from holdfast.storage.wrappers.retrying import transient


class Text(str):
    """A sign that is a pattern in the text of an error, the store's whole answer included."""


class Row(NamedTuple):
    """One kind of failure: its number of `errno`, how it shows, what it means, and what to do about it.

    It shows by any of ``signs``: an HTTP status, a name (the store's code, the client's class of error or word for a
    connection), or a pattern in the error's text. ``also`` is a sign that must be there besides, ``only``
    names verbs, families of stores or ``connection`` (there was no answer). Sentences name `Facts`; advice may differ
    by family or verb. After a ``transient`` failure another attempt may succeed, after an ``outdated`` one newer
    credentials may.
    """

    number: int
    signs: tuple[int | str, ...]
    means: str
    advice: str | Mapping[str, str] = ""
    only: tuple[str, ...] = ()
    also: str = ""
    transient: bool = False
    outdated: bool = False


_BROKEN = tuple(range(500, 600))
_LINK = ("connection",)
_UNFETCHED = "no credentials could be fetched{who}: {answer.text}"
_NEWER = "Get new credentials (session_token belongs to its key)"

_GIVE_CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the options access_key_id and "
    "secret_access_key; for a public bucket anonymous=true",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS or the option credential_file, or run "
    "`gcloud auth application-default login`; for a public bucket anonymous=true",
    "az": "Set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, the options "
    "account_key or sas_token, or run `az login`; for a public container anonymous=true",
    "http": "holdfast sends no credentials to web servers",
}
_LOG_IN = {
    "s3": "Get new credentials",
    "gs": "Run `gcloud auth application-default login`, or get a new key of the service account",
    "az": "Run `az login`, or get a new key or SAS",
}
_CHECK_HOST = {
    "s3": "Check endpoint_url and region, and this machine's network",
    "gs": "Check this machine's network, and endpoint_url if it is set",
    "az": "Check the name of the storage account (it is part of the host's name), and this machine's network",
    "http": "Check the host in the URL",
}
_RAISE_TIMEOUT = {
    "get": "If the server is slow and not stuck, raise the option read_timeout",
    "put": "If the network is slow and not stuck, raise the option write_timeout or lower concurrency",
}
_CHECK_NAME = {
    "s3": "Check the name and endpoint_url; holdfast makes no bucket",
    "gs": "Check the name and endpoint_url; holdfast makes no bucket",
    "az": "Check the name and the account; holdfast makes no container",
    "http": "Check the name and endpoint_url; holdfast makes no bucket",
}
_TRUST = "Give the certificate authority in the option ca_file, or set verify_tls=false to accept any"
_CERTIFICATES = {
    "UnknownIssuer": "its authority is unknown",
    "(?s)(?i:certificate).*Expired": "it has expired",
    "NotValidForName": "it is for another host name",
    "NotValidYet": "it is not valid yet (is this machine's clock right?)",
    "CaUsedAsEndEntity": "it is a certificate authority's own",
    "(?i:certificate)": "it is not valid",
}
_FILE_TYPES = (
    "holdfast can use service_account and authorized_user. On a machine of Google's, unset it to use the machine's own "
    "service account"
)

# Where credentials come from that are not there: an instance's, a container's, a token service.
_CREDENTIAL_SERVICE = Text(
    r"169\.254\.169\.254|169\.254\.170\.|/latest/api/token|/latest/meta-data/|metadata\.google|computeMetadata|"
    r"AssumeRoleWithWebIdentity|oauth2\.googleapis\.com|login\.microsoftonline|Failed to read token file|"
    r"Failed to read EKS token file|az account get-access-token|azure cli"
)
_MOVED = (301, 307, 308, Text("Received redirect without LOCATION"))
_AZURE = ("AuthenticationFailed", "InvalidAuthenticationInfo", Text("failed to authenticate"))
_DENIED = (403, 405, "AccessDenied", "Forbidden")

TABLE = (
    # Getting credentials, before anything is sent to the store.
    Row(E.EACCES, (Text("External AWS credential provider"),), _UNFETCHED),
    Row(E.EACCES, ("Timeout", "Interrupted", 429, *_BROKEN), _UNFETCHED, _GIVE_CREDENTIALS, also=_CREDENTIAL_SERVICE,
        transient=True),
    Row(E.EACCES, (_CREDENTIAL_SERVICE,), _UNFETCHED, _GIVE_CREDENTIALS),
    Row(E.EACCES, (Text("Unable to open service account file"),), "{request.credentials} cannot be read"),
    Row(E.EACCES, (Text("Unable to decode service account file: unknown variant"),),
        "{request.credentials} is of another type", _FILE_TYPES),
    Row(E.EACCES, (Text("Unable to decode service account file"),),
        "{request.credentials} is not JSON, or lacks what such a file has", _FILE_TYPES),
    # A connection that never stood.
    Row(E.EPROTO, (Text("BadScheme"),), "{host} has no TLS (http://), which is not allowed",
        "Leave the option allow_http out, or set it to true", _LINK),
    Row(E.EHOSTUNREACH, (Text("dns error"),), "{host} was not found: the name server does not answer", _CHECK_HOST,
        _LINK, also=Text("Temporary failure"), transient=True),
    Row(E.EHOSTUNREACH, (Text("dns error"),), "{host} was not found: there is no such host", _CHECK_HOST, _LINK),
    *(Row(E.EPROTO, (Text(sign),), f"the TLS certificate of {{host}} is not trusted: {why}", _TRUST, _LINK)
      for sign, why in _CERTIFICATES.items()),
    Row(E.EPROTO, (Text("InvalidMessage|InvalidContentType|(?i:record overflow)"),), "{host} does not speak TLS",
        "Write http:// instead of https:// if it should not", _LINK),
    Row(E.ECONNREFUSED, (Text("ConnectionRefused"),), "nobody listens at {host}: the connection was refused",
        "Check endpoint_url (host and port), and that the server runs", _LINK, transient=True),
    Row(E.ETIMEDOUT, ("Connect",), "no connection to {host} could be made: {answer.text}", _RAISE_TIMEOUT, _LINK,
        also=Text("TimedOut"), transient=True),
    Row(E.ETIMEDOUT, ("Timeout", Text("TimedOut")), "{host} is silent: {answer.text}", _RAISE_TIMEOUT, _LINK,
        transient=True),
    # "Canceled" is hyper's word for a connection that closed before the request went out; its kind is Unknown.
    Row(E.ECONNRESET, (Text(r"HttpError \{\s*kind: (?!Unknown)"), Text(r"hyper::Error\(\s*Canceled")),
        "the connection to {host} failed: {answer.text}",
        "{wants_tls}", _LINK, transient=True),
    # Credentials that the store does not accept.
    Row(E.EACCES, ("RequestTimeTooSkewed", "RequestExpired", Text("Request date header too old")), "{clock}",
        "Set this machine's clock (NTP), then try again"),
    Row(E.EACCES, ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"),
        "the session token{who} has expired", _NEWER, outdated=True),
    Row(E.EACCES, ("InvalidToken",), "the session token{who} is not valid", _NEWER, outdated=True),
    Row(E.EACCES, ("InvalidAccessKeyId", "InvalidAccessKey"), "the server does not know the access key id{who}",
        "Check access_key_id, and that endpoint_url is the server that issued it", outdated=True),
    Row(E.EACCES, ("SignatureDoesNotMatch",), "the secret key does not belong to the access key id{who}",
        "Check secret_access_key (a lost or added character, a key that was replaced)", outdated=True),
    Row(E.EACCES, _AZURE, "the account key{who} is not a key of this storage account", "Check account and account_key",
        also=Text("MAC signature")),
    Row(E.EACCES, _AZURE, "the SAS or token{who} has expired, or is not valid yet",
        "Get a new one, and check this machine's clock",
        also=Text(r"Signature not valid in the specified time frame|<(?:Message|\w*Detail)>[^<]*(?i:expired)")),
    Row(E.EACCES, _AZURE, "the SAS{who} is not valid",
        "Check that sas_token is whole, and as the portal shows it (percent-encoded)",
        also=Text("Signature did not match|Signature fields")),
    Row(E.EACCES, _AZURE, "the token{who} is for another service", "It must be for https://storage.azure.com",
        also=Text(r"<(?:Message|\w*Detail)>[^<]*(?i:audience)")),
    Row(E.EACCES, _AZURE, "the server does not accept the credentials{who}: {reason}",
        "Check account, account_key and sas_token"),
    Row(E.EACCES, ("NoAuthenticationInformation", "MissingSecurityHeader", "MissingAuthenticationToken", 401),
        "credentials are missing or not valid{who}: {reason}", _GIVE_CREDENTIALS),
    Row(E.EACCES, (Text("invalid_grant"),), "the credentials{who} are not accepted: {reason}", _LOG_IN),
    # The bucket.
    Row(E.EINVAL, ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", *_MOVED),
        "the bucket is {region}", "Set the option {region_option} or AWS_REGION to the region of the bucket", ("s3",)),
    Row(E.EINVAL, _MOVED, "the server redirects (status {answer.status})", "Use the address that it names", ("http",)),
    Row(E.ENXIO, ("InvalidBucketName",), "there is no {bucket} (the name is not valid)", _CHECK_NAME),
    Row(E.ENXIO, ("NoSuchBucket", "ContainerNotFound", Text("The specified (bucket|container) does not exist")),
        "there is no {bucket}", _CHECK_NAME),
    # The file. ERANGE and ENOPROTOOPT are for `cloud.py` alone.
    Row(E.ESTALE, ("NoSuchUpload", "InvalidBlockList"),
        "the server no longer knows the upload: somebody ended it, or its end was confirmed and the answer lost",
        "Check that no rule of the bucket ends unfinished uploads within hours", transient=True),
    Row(E.ENOENT, (404,), "there is no such file", only=("size", "get", "delete")),
    Row(E.ENXIO, (404,), "{said}", "Check the bucket's name and endpoint_url"),
    # It is another writer's for certain if it was refused at the first attempt, in words that can mean nothing else.
    Row(E.EEXIST, ("AlreadyExistsError",), "{said}", only=("create",), also=Text(r"after [1-9]\d* retries"),
        transient=True),
    Row(E.EEXIST, (412, "BlobAlreadyExists"), "{said}", only=("create",), also="AlreadyExistsError"),
    Row(E.EEXIST, ("AlreadyExistsError",), "{said}", only=("create",), transient=True),
    # The texts are the client's own, for an answer with a range that it cannot understand.
    Row(E.ERANGE, (416, "InvalidRange", Text('Wanted range starting at|CONTENT_RANGE header: "bytes 0--1/0"')),
        "the range begins behind the end of the file"),
    Row(E.ENOPROTOOPT, (Text("Range request not supported|Received non-partial response"),),
        "the server knows no ranges"),
    Row(E.EINVAL, (Text("Encountered illegal character|Could not parse path|(?i:empty path segment)"),),
        "the store has a key that cannot be read with this client: {answer.text}",
        "Keys must not have empty parts (a//b), parts '.' or '..', or control characters"),
    Row(E.ENOTSUP, (501, "NotImplemented"), "the server knows no conditions: {said}", only=("create",)),
    Row(E.ENOTSUP, (405, 501, "NotImplemented", "MethodNotAllowed"), "{said}",
        "If it cannot delete many files at once, set the option bulk_delete=false", ("delete",)),
    Row(E.EFBIG, ("EntityTooLarge", "EntityTooSmall"), "{said}", "Set the option part_size to what the server accepts"),
    Row(E.ENOSPC, ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", 507), "the store is full: {said}",
        "Make room, or ask for more"),
    # Permission. For the reader of a web server, a folder and a file that is not public are not there.
    Row(E.ENOENT, _DENIED, "it is not there, or not for everyone: the server answered {answer.status}", only=("http",)),
    Row(E.EACCES, _DENIED, "access denied{who}: {said}",
        "{permission}. It may also be the firewall of the storage account", also="AuthorizationFailure"),
    Row(E.EACCES, _DENIED, "access denied{who}: {said}", "{permission}"),
    # What may pass.
    Row(E.EAGAIN, ("SlowDown", "ServerBusy", "TooManyRequests", "Throttling", "ThrottlingException", 429),
        "the server asks to slow down: {said}", "Lower the option concurrency, or the number of ranks that write",
        transient=True),
    Row(E.EIO, ("BadDigest", "XAmzContentSHA256Mismatch", "Md5Mismatch"), "the bytes changed on their way: {said}",
        transient=True),
    Row(E.EAGAIN, (
        *_BROKEN, 408, 409, "InternalError", "ServiceUnavailable", "RequestTimeout", "OperationTimedOut",
        "OperationAborted", "ConditionalRequestConflict", "RequestLimitExceeded", "BandwidthLimitExceeded",
        "ContainerBeingDeleted",
    ), "{said}", transient=True),
    Row(E.EIO, (Text(""),), "{said}"),
)  # fmt: skip
"""The first row that fits counts; the last one fits all."""

_VERBS = {"size": "look for", "get": "read", "create": "write", "put": "write"}


def failure(error: BaseException, request: Request) -> OSError:
    """The OSError for an error of the client library.

    FileNotFoundError for a missing key alone. An attribute ``transient`` that is True says that another attempt may
    succeed, one ``outdated`` that newer credentials may.
    """
    facts = Facts(request, answer_in(error, request.secrets))
    row = next(row for row in TABLE if _fits(row, facts))
    advice = row.advice
    if not isinstance(advice, str):
        advice = advice.get(request.family) or advice.get(request.verb, "")
    means, advice = (facts.filled(sentence) for sentence in (row.means, advice))
    at = f" (at {request.endpoint})" if request.endpoint else ""
    what = f"{request.url}/{request.key}" if request.key else request.url
    text = f"cannot {_VERBS.get(request.verb, request.verb)} {what}{at}: {means}"
    refusal = OSError(row.number, f"{text}. {advice}" if advice else text)
    if row.outdated:
        vars(refusal)["outdated"] = True
    return transient(refusal) if row.transient else refusal


def no_credentials(text: str, url: str) -> OSError:
    """What is raised where credentials are missing before anything is sent."""
    return OSError(E.EACCES, f"cannot open {url}: {text}")


def _fits(row: Row, facts: Facts) -> bool:
    request = facts.request
    if row.only and not {request.verb, request.family, facts.connection} & {*row.only}:
        return False
    return any(_shows(sign, facts) for sign in row.signs) and (not row.also or _shows(row.also, facts))


def _shows(sign: int | str, facts: Facts) -> bool:
    if isinstance(sign, Text):
        return re.search(sign, facts.answer.depth) is not None
    return sign in facts.names
