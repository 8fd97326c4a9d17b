"""Why a store said no: from an error of the client library to an OSError that says what is wrong, and what to do.

`cloud.py` passes every error through it. Never shows a secret, a query string or a request's headers.
"""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

from holdfast.storage.cloud import advice
from holdfast.storage.cloud.answers import Answer, Asked, answered
from holdfast.storage.wrappers.retrying import transient


class Refusal(NamedTuple):
    """A number of `errno`, what is wrong, and what to do."""

    number: int
    wrong: str
    advice: str = ""
    transient: bool = False
    outdated: bool = False


_NO_BUCKET = re.compile("The specified (bucket|container) does not exist")
# From the client itself, where a server answers with a range that it cannot understand.
_BEYOND = re.compile(r'Wanted range starting at|CONTENT_RANGE header: "bytes 0--1/0"')

VERBS = {
    "list": "list",
    "size": "look for",
    "get": "read",
    "create": "write",
    "put": "write",
    "delete": "delete",
    "open": "open",
}


def refused(error: BaseException, asked: Asked) -> OSError:
    """The OSError for an error of the client library.

    FileNotFoundError for a missing key alone. An attribute ``transient`` that is True says that another attempt may
    succeed, one ``outdated`` that newer credentials may. Two numbers are for `cloud.py` alone: ERANGE for a range that
    begins behind the end, ENOPROTOOPT for a web server that knows no ranges.
    """
    answer = answered(error, asked.secrets)
    refusal = _refusal(answer, asked)
    what = f"{asked.url}/{asked.key}" if asked.key else asked.url
    at = f" (at {asked.endpoint})" if asked.endpoint else ""
    text = f"cannot {VERBS[asked.verb]} {what}{at}: {refusal.wrong}"
    if refusal.advice:
        text += f". {refusal.advice}"
    made = OSError(refusal.number, text)
    if refusal.outdated:
        vars(made)["outdated"] = True
    return transient(made) if refusal.transient else made


def no_credentials(text: str, url: str) -> OSError:
    """What is raised where credentials are missing before anything is sent."""
    return OSError(errno.EACCES, f"cannot open {url}: {text}")


def _refusal(answer: Answer, asked: Asked) -> Refusal:
    for rule in (_connection, _who_we_are, _bucket, _of_the_key, _permission, _passing):
        if refusal := rule(answer, asked):
            return refusal
    return Refusal(errno.EIO, _said(answer) or f"{answer.name}: {answer.text}")


def _said(answer: Answer) -> str:
    """The store's own words."""
    told = ": ".join(dict.fromkeys(part for part in (answer.code, answer.message) if part))
    if not told:
        return f"the server answered {answer.status} without a reason" if answer.status else ""
    return f"the server says {told}" + (f" (status {answer.status})" if answer.status else "")


# One rule for each thing that can be wrong. The order matters: a connection that never stood has no other reasons.


def _connection(answer: Answer, asked: Asked) -> Refusal | None:
    depth = answer.depth
    host = asked.endpoint or {"http": asked.url, "https": asked.url}.get(asked.scheme, "the server")
    if answer.status or not answer.kind:
        return None
    if advice.asks_for_credentials(depth):
        return Refusal(
            errno.EACCES,
            f"no credentials could be fetched ({asked.credentials}): {answer.text}",
            advice.GIVE_CREDENTIALS[asked.family],
            transient=answer.kind in ("Timeout", "Interrupted"),
        )
    if "BadScheme" in depth:
        return Refusal(
            errno.EPROTO,
            f"{host} has no TLS (http://), which is not allowed",
            "Leave the option allow_http out, or set it to true",
        )
    if "dns error" in depth:
        passing = "Temporary failure" in depth
        why = "the name server does not answer" if passing else "there is no such host"
        return Refusal(errno.EHOSTUNREACH, f"{host} was not found: {why}", advice.CHECK_HOST[asked.family], passing)
    if "certificate" in depth.lower() or "UnknownIssuer" in depth or "CaUsedAsEndEntity" in depth:
        found = re.search("|".join(advice.CERTIFICATES), depth)
        why = advice.CERTIFICATES[found[0]] if found else "it is not valid"
        return Refusal(
            errno.EPROTO,
            f"the TLS certificate of {host} is not trusted: {why}",
            "Give the certificate authority in the option ca_file, or set verify_tls=false to accept any",
        )
    if "InvalidMessage" in depth or "InvalidContentType" in depth or "record overflow" in depth.lower():
        return Refusal(errno.EPROTO, f"{host} does not speak TLS", "Write http:// instead of https:// if it should not")
    if "ConnectionRefused" in depth:
        return Refusal(
            errno.ECONNREFUSED,
            f"nobody listens at {host}: the connection was refused",
            "Check endpoint_url (host and port), and that the server runs",
            transient=True,
        )
    if answer.kind == "Timeout" or "TimedOut" in depth:
        where = f"no connection to {host} could be made" if answer.kind == "Connect" else f"{host} is silent"
        return Refusal(errno.ETIMEDOUT, f"{where}: {answer.text}", advice.SLOW.get(asked.verb, ""), transient=True)
    if answer.kind == "Unknown":
        return None
    tls = "" if host.startswith("https") or not asked.endpoint else "If the server wants TLS, write https://"
    return Refusal(errno.ECONNRESET, f"the connection to {host} failed: {answer.text}", tls, transient=True)


def _who_we_are(answer: Answer, asked: Asked) -> Refusal | None:
    code, who = answer.code, f" ({asked.credentials})" if asked.credentials else ""
    if "External AWS credential provider" in answer.depth:
        return Refusal(errno.EACCES, f"no credentials could be fetched{who}: {answer.text}")
    if advice.asks_for_credentials(answer.depth):
        return Refusal(
            errno.EACCES,
            f"no credentials could be fetched{who}: {answer.text}",
            advice.GIVE_CREDENTIALS[asked.family],
            transient=answer.status >= 500 or answer.status == 429,
        )
    if code in ("RequestTimeTooSkewed", "RequestExpired") or "Request date header too old" in answer.message:
        return Refusal(
            errno.EACCES, advice.skew(answer.depth, asked.ask_clock), "Set this machine's clock (NTP), then try again"
        )
    if code in ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"):
        state = "is not valid" if code == "InvalidToken" else "has expired"
        text = f"the session token{who} {state}"
        return Refusal(errno.EACCES, text, "Get new credentials (session_token belongs to its key)", outdated=True)
    if code in ("InvalidAccessKeyId", "InvalidAccessKey"):
        return Refusal(
            errno.EACCES,
            f"the server does not know the access key id{who}",
            "Check access_key_id, and that endpoint_url is the server that issued it",
            outdated=True,
        )
    if code == "SignatureDoesNotMatch":
        return Refusal(
            errno.EACCES,
            f"the secret key does not belong to the access key id{who}",
            "Check secret_access_key (a lost or added character, a key that was replaced)",
            outdated=True,
        )
    if code in ("AuthenticationFailed", "InvalidAuthenticationInfo") or "failed to authenticate" in answer.message:
        return Refusal(errno.EACCES, *advice.azure_authentication(answer.message, who))
    if code in ("NoAuthenticationInformation", "MissingSecurityHeader", "MissingAuthenticationToken") or (
        answer.status == 401
    ):
        told = answer.message or answer.text
        return Refusal(
            errno.EACCES, f"credentials are missing or not valid{who}: {told}", advice.GIVE_CREDENTIALS[asked.family]
        )
    if answer.message and "invalid_grant" in answer.depth:
        return Refusal(
            errno.EACCES, f"the credentials{who} are not accepted: {answer.message}", advice.LOGIN[asked.family]
        )
    return None


def _bucket(answer: Answer, asked: Asked) -> Refusal | None:
    code = answer.code
    word = "container" if asked.family == "az" else "bucket"
    redirected = answer.status in (301, 307, 308) or "Received redirect without LOCATION" in answer.text
    if asked.family == "s3" and (
        redirected
        or code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
    ):
        told = advice.expected_region(answer.depth) or asked.ask_region()
        used = f" and not {asked.region!r}" if asked.region else ""
        if told:
            return Refusal(
                errno.EINVAL,
                f"the {word} is in the region {told!r}{used}",
                f"Set the option region={told} or AWS_REGION",
            )
        return Refusal(
            errno.EINVAL,
            f"the {word} is not in the region {asked.region!r}" + (f": {answer.message}" if answer.message else ""),
            "Set the option region or AWS_REGION to the region of the bucket",
        )
    if asked.family == "http" and redirected:
        return Refusal(errno.EINVAL, f"the server redirects (status {answer.status})", "Use the address that it names")
    if code in ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName") or _NO_BUCKET.search(answer.text):
        return Refusal(
            errno.ENXIO,
            f"there is no {word} {asked.bucket!r}"
            + (" (the name is not valid)" if code == "InvalidBucketName" else ""),
            f"Check the name and {'the account' if word == 'container' else 'endpoint_url'}; holdfast makes no {word}",
        )
    return None


def _of_the_key(answer: Answer, asked: Asked) -> Refusal | None:
    if answer.code in ("NoSuchUpload", "InvalidBlockList"):
        return Refusal(
            errno.ESTALE,
            "the server no longer knows the upload: somebody ended it, or its end was confirmed and the answer lost",
            "Check that no rule of the bucket ends unfinished uploads within hours",
            transient=True,
        )
    if answer.status == 404 and asked.verb in ("size", "get", "delete"):
        return Refusal(errno.ENOENT, "there is no such file")
    if answer.status == 404:
        return Refusal(errno.ENXIO, f"{_said(answer) or answer.text}", "Check the bucket's name and endpoint_url")
    if answer.name == "AlreadyExistsError" and asked.verb == "create":
        # Refused at the first attempt, in words that can mean nothing else: it was another writer.
        certain = answer.status == 412 or answer.code == "BlobAlreadyExists"
        return Refusal(errno.EEXIST, _said(answer), transient=answer.repeated or not certain)
    if answer.status == 416 or answer.code == "InvalidRange" or _BEYOND.search(answer.text):
        return Refusal(errno.ERANGE, "the range begins behind the end of the file")
    if "Range request not supported" in answer.text or "Received non-partial response" in answer.text:
        return Refusal(errno.ENOPROTOOPT, "the server knows no ranges")
    if (
        "Encountered illegal character" in answer.text
        or "Could not parse path" in answer.text
        or "empty path segment" in answer.text.lower()
    ):
        return Refusal(
            errno.EINVAL,
            f"the store has a key that cannot be read with this client: {answer.text}",
            "Keys must not have empty parts (a//b), parts '.' or '..', or control characters",
        )
    if asked.verb == "create" and (answer.status == 501 or answer.code == "NotImplemented"):
        return Refusal(errno.ENOTSUP, f"the server knows no conditions: {_said(answer)}")
    if asked.verb == "delete" and (
        answer.status in (405, 501) or answer.code in ("NotImplemented", "MethodNotAllowed")
    ):
        return Refusal(
            errno.ENOTSUP, _said(answer), "If it cannot delete many files at once, set the option bulk_delete=false"
        )
    if answer.code in ("EntityTooLarge", "EntityTooSmall"):
        return Refusal(errno.EFBIG, _said(answer), "Set the option part_size to what the server accepts")
    if answer.code in ("QuotaExceeded", "XMinioStorageFull", "InsufficientStorage") or answer.status == 507:
        return Refusal(errno.ENOSPC, f"the store is full: {_said(answer)}", "Make room, or ask for more")
    return None


def _permission(answer: Answer, asked: Asked) -> Refusal | None:
    if answer.status not in (403, 405) and answer.code not in ("AccessDenied", "Forbidden"):
        return None
    if asked.family == "http":
        # A folder, or what is missing in a bucket whose list is not public: for a reader it is not there.
        return Refusal(errno.ENOENT, f"it is not there, or not for everyone: the server answered {answer.status}")
    who = f" (credentials: {asked.credentials})" if asked.credentials else ""
    needed = advice.permission(asked.family, asked.verb)
    if answer.code == "AuthorizationFailure":
        needed += ". It may also be the firewall of the storage account"
    return Refusal(errno.EACCES, f"access denied{who}: {_said(answer)}", needed)


PASSING = (
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
    "ServerBusy",
    "RequestTimeout",
    "OperationTimedOut",
    "OperationAborted",
    "ConditionalRequestConflict",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "RequestLimitExceeded",
    "BandwidthLimitExceeded",
    "ContainerBeingDeleted",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "Md5Mismatch",
)


def _passing(answer: Answer, asked: Asked) -> Refusal | None:
    if (
        answer.code in ("SlowDown", "ServerBusy", "TooManyRequests", "Throttling", "ThrottlingException")
        or answer.status == 429
    ):
        wrong = f"the server asks to slow down: {_said(answer)}"
        return Refusal(errno.EAGAIN, wrong, "Lower the option concurrency, or the number of ranks that write", True)
    if answer.code in ("BadDigest", "XAmzContentSHA256Mismatch", "Md5Mismatch"):
        return Refusal(errno.EIO, f"the bytes changed on their way: {_said(answer)}", "", True)
    if answer.status >= 500 or answer.status in (408, 409) or answer.code in PASSING:
        return Refusal(errno.EAGAIN, _said(answer), "", transient=True)
    return None
