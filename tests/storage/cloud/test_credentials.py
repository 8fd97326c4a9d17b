"""Credentials: whose are used where several are there, what is said where there are none, and that they are renewed."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from obstore.store import GCSStore

from holdfast.storage.cloud import client
from holdfast.storage.cloud.cloud import Cloud
from holdfast.storage.cloud.credentials import Credentials, azure, google, reachable, s3
from holdfast.storage.cloud.profiles import NoCredentials, profile_settings
from tests.servers import Server
from tests.storage.cloud.canned import canned
from tests.storage.cloud.clouds import options_of


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No settings and no role of the machine that runs the tests; the folder of ``~``."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "R2_", "WEKA_", "GOOGLE_", "AZURE_", "GCE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:1")
    (tmp_path / ".aws").mkdir()
    return tmp_path


def key_of(found: Credentials) -> str:
    assert found.provider is not None
    return str(found.provider()["access_key_id"])


def profiles(home: Path, text: str, name: str = "credentials") -> None:
    (home / ".aws" / name).write_text(text)


STATIC = "[{0}]\naws_access_key_id = of-{0}\naws_secret_access_key = hush\n"


# S3


def test_options_before_environment_before_profile(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoCredentials, match="there are no credentials: none in the options"):
        s3("s3", {})
    profiles(home, STATIC.format("default") + STATIC.format("lab") + "aws_session_token = token\n")
    assert key_of(s3("s3", {})) == "of-default"
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert key_of(s3("s3", {})) == "of-lab"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-env")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    assert key_of(s3("s3", {})) == "of-env"
    found = s3("s3", {"profile": "lab"})
    assert key_of(found) == "of-lab" and found.renews
    assert found.provider is not None and found.provider()["token"] == "token"
    assert key_of(s3("s3", {"access_key_id": "of-options", "secret_access_key": "hush"})) == "of-options"
    anonymous = s3("s3", {"anonymous": True, "access_key_id": "x"})
    assert anonymous.provider is None and anonymous.config == {"skip_signature": True}


def test_a_key_of_the_options_has_no_token_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-env")
    found = s3("s3", {"access_key_id": "AK", "secret_access_key": "hush"})
    assert found.provider is not None and found.provider()["token"] is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"access_key_id": "AK"}, "secret_access_key is missing"),
        ({"secret_access_key": "hush"}, "access_key_id is missing"),
        ({"profile": "absent"}, "no profile 'absent' in .*credentials and .*config"),
        ({"profile": "empty"}, "neither aws_access_key_id nor a way"),
        ({"profile": "half"}, "has no 'aws_secret_access_key'"),
        ({"access_key_id": "AK", "secret_access_key": "hush\n"}, "secret key has a character that no key has"),
    ],
)
def test_what_cannot_be_used_is_named(home: Path, given: dict[str, Any], text: str) -> None:
    profiles(home, "[profile empty]\nregion = x\n", "config")
    profiles(home, "[half]\naws_access_key_id = AK\n")
    with pytest.raises(NoCredentials, match=text) as caught:
        s3("s3", given)
    assert "hush" not in str(caught.value)


def test_half_a_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AK")
    with pytest.raises(NoCredentials, match="AWS_SECRET_ACCESS_KEY is missing in the environment"):
        s3("s3", {})


def test_a_broken_file_is_named_and_not_quoted(home: Path) -> None:
    profiles(home, "[lab]\naws_access_key_id = AK\nhush hush hush without a sign\n\n[broken\nhush = hush\n")
    (home / ".aws/config").write_text("hush = before any section\n")
    with pytest.raises(NoCredentials, match=r"config cannot be understood \(line 1\)") as caught:
        s3("s3", {"profile": "lab"})
    assert "hush" not in str(caught.value)


def test_both_files_make_one_profile(home: Path) -> None:
    profiles(home, STATIC.format("lab"))
    profiles(home, "[profile lab]\nregion = x\naws_access_key_id = of-config\n[default]\nregion = y\n", "config")
    assert profile_settings("lab")["region"] == "x"
    assert profile_settings("lab")["aws_access_key_id"] == "of-lab"
    assert profile_settings("default") == {"region": "y"}
    assert profile_settings("absent") == {}


def test_files_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").write_text(STATIC.format("default"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "mine"))
    assert key_of(s3("s3", {})) == "of-default"


def test_a_rewritten_file_is_read_again_and_a_broken_one_is_not_used(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiles(home, STATIC.format("default"))
    found = s3("s3", {})
    profiles(home, STATIC.format("default").replace("of-default", "newer"))
    assert key_of(found) == "newer"
    profiles(home, "[defau")
    assert key_of(found) == "newer"
    assert "credentials of the profile 'default' are kept as they were" in caplog.text
    assert "hush" not in caplog.text


@pytest.mark.parametrize("scheme", ["weka", "r2"])
def test_weka_and_r2_have_keys_of_their_own(home: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = scheme.upper()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-aws")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    assert key_of(s3(scheme, {})) == "of-aws"
    profiles(home, STATIC.format(name) + STATIC.format("lab"))
    assert key_of(s3(scheme, {})) == f"of-{name}"
    assert key_of(s3("s3", {})) == "of-aws"
    monkeypatch.setenv(f"{name}_PROFILE", "lab")
    assert key_of(s3(scheme, {})) == "of-lab"
    monkeypatch.setenv(f"{name}_ACCESS_KEY_ID", "own")
    monkeypatch.setenv(f"{name}_SECRET_ACCESS_KEY", "hush")
    assert key_of(s3(scheme, {})) == "own"


@pytest.mark.parametrize("indirect", ["role_arn = arn:x", "sso_session = lab", "credential_process = /bin/keys"])
def test_an_indirect_profile_needs_boto3(home: Path, indirect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles(home, f"[profile lab]\n{indirect}\n", "config")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(NoCredentials, match=f"by {indirect.split()[0]}, which needs boto3: pip install boto3"):
        s3("s3", {"profile": "lab"})
    # The client asks for frozen credentials every time: that is when boto3 renews them.
    turns = iter(["checked", "first", "second"])

    class Held:
        def get_frozen_credentials(self) -> Any:
            return types.SimpleNamespace(access_key=next(turns), secret_key="hush", token="token")

    class Session:
        region_name = "elsewhere"

        def __init__(self, profile_name: str) -> None:
            assert profile_name == "lab"

        def get_credentials(self) -> Held:
            return Held()

    for name in ("boto3", "boto3.session", "botocore", "botocore.credentials"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["boto3"], "Session", Session, raising=False)
    monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    found = s3("s3", {"profile": "lab"})
    assert [key_of(found), key_of(found)] == ["first", "second"]
    assert indirect.split()[0] in found.source
    assert not hasattr(found.provider, "config")  # nothing of the profile is set twice: its region is an option here


def test_roles_are_left_to_the_client(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with canned() as metadata:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", metadata.endpoint)
        assert s3("s3", {}) == Credentials("the instance's role", renews=True)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(NoCredentials):
            s3("s3", {})
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/x")
    assert s3("s3", {}).source == "the container's role"
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/token")
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:x")
    assert "AWS_ROLE_ARN" in s3("s3", {}).source


def test_an_error_says_whose_credentials_were_used(ceph: Server, home: Path) -> None:
    profiles(home, STATIC.format("lab"))
    store = Cloud("s3", ceph.bucket(), {"endpoint_url": ceph.endpoint, "profile": "lab"})
    with pytest.raises(
        OSError, match="does not know the access key id .credentials: the profile 'lab' of .*credentials"
    ):
        store.get("a")


def test_missing_credentials_are_told_before_anything_is_sent() -> None:
    with canned() as server:
        store = Cloud("s3", "bucket", {"endpoint_url": server.endpoint})
        for ask in (lambda: store.get("a"), lambda: store.put("a", [b"x"], 1), lambda: store.size("a")):
            with pytest.raises(PermissionError, match="cannot open s3://bucket: there are no credentials"):
                ask()
        assert server.asked == []


def test_the_environment_s_key_signs(ceph: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(ceph)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_access_key"])
    store = Cloud("s3", ceph.bucket(), {"endpoint_url": ceph.endpoint})
    store.put("a", [b"x"], 1)
    assert store.get("a").data == b"x"


def test_the_region_of_a_bucket_can_be_asked_for() -> None:
    with canned() as aws:
        aws.headers = {"x-amz-bucket-region": "eu-west-3"}
        for status in (200, 301, 403, 404):
            aws.status = status
            assert client.bucket_region("bucket", aws.endpoint) == "eu-west-3"
        aws.headers = {}
        assert client.bucket_region("bucket", aws.endpoint) == ""
    assert client.bucket_region("bucket", "http://127.0.0.1:1") == ""


# What the client is told


def test_the_payload_is_signed_where_there_is_no_tls() -> None:
    keys = {"access_key_id": "AK", "secret_access_key": "hush", "region": "x"}

    def arguments(more: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        settings = client.client_settings("s3", "bucket", {**keys, **more}, silence=20)
        return settings.arguments["config"], settings.arguments["client_options"]

    (plain, plain_client), (tls, tls_client) = (
        arguments({"endpoint_url": f"{kind}://h:1"}) for kind in ("http", "https")
    )
    assert plain["unsigned_payload"] is False and plain_client["allow_http"] is True
    assert tls["unsigned_payload"] is True and tls_client["allow_http"] is False
    assert arguments({"endpoint_url": "http://h:1", "sign_payload": False})[0]["unsigned_payload"] is True
    assert plain_client["user_agent"].startswith("holdfast/")
    assert plain_client["timeout"].total_seconds() >= 600 and plain_client["read_timeout"].total_seconds() == 20
    assert "hush" not in repr({**plain, **plain_client})


# Google


def service_account(file: Path, kind: str = "service_account") -> str:
    file.write_text(json.dumps({"type": kind, "private_key": "hush"} if kind == "service_account" else {"type": kind}))
    return str(file)


def test_google_s_order(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoCredentials, match="gcloud auth application-default login"):
        google({})
    gcloud = home / ".config/gcloud"
    gcloud.mkdir(parents=True)
    own = service_account(gcloud / "application_default_credentials.json", "authorized_user")
    assert google({}).config == {"application_credentials": own}
    file = service_account(tmp_path / "env.json")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", file)
    assert google({}).config == {"application_credentials": file}
    other = service_account(tmp_path / "other.json")
    assert google({"credential_file": other}).config == {"application_credentials": other}
    assert google({"token": "t"}).config == {"bearer_token": "t"}
    assert google({"anonymous": True}).config == {"skip_signature": True}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read"),
        ("hush", "is not JSON"),
        ('"hush"', "is not JSON, or lacks"),
        ('{"type": "service_account", "private_key_id": ["hush"]}', "is not JSON, or lacks"),
        ('{"type": "external_account"}', "is of another type.*service_account and authorized_user"),
    ],
)
def test_a_google_file_that_cannot_be_used(tmp_path: Path, content: str | None, text: str) -> None:
    file = tmp_path / "c.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(PermissionError, match=f"cannot open gs://bucket: .*{text}") as caught:
        Cloud("gs", "bucket", {"credential_file": str(file)}).get("a")
    assert f"{file} (from the options)" in str(caught.value) and "hush" not in str(caught.value)


@pytest.mark.parametrize("kind", ["service_account", "authorized_user"])
def test_a_google_file_of_either_type_is_accepted(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "c.json"
    pem = rsa.generate_private_key(65537, 2048).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    key = {"private_key": pem.decode(), "private_key_id": "1", "client_email": "me@lab"}
    user = {"client_id": "me", "client_secret": "hush", "refresh_token": "hush"}
    file.write_text(json.dumps({"type": kind, **(key if kind == "service_account" else user)}))
    settings = client.client_settings("gs", "bucket", {"credential_file": str(file)}, silence=20)
    GCSStore("bucket", **settings.arguments)  # raises if it cannot use the file


# Azure


def test_azure_s_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("holdfast.storage.cloud.credentials.reachable", lambda url: False)
    with pytest.raises(NoCredentials, match="the storage account is missing"):
        azure({})
    with pytest.raises(NoCredentials, match="there are no credentials"):
        azure({"account": "lab"})
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        "DefaultEndpointsProtocol=https;AccountName=lab;AccountKey=a2V5PT0=;EndpointSuffix=core.chinacloudapi.cn",
    )
    told = {
        "account_name": "lab", "account_key": "a2V5PT0=", "endpoint": "https://lab.blob.core.chinacloudapi.cn",
    }  # fmt: skip
    assert azure({}).config == told
    assert azure({"account": "lab"}).config == told
    # A key belongs to its account.
    with pytest.raises(NoCredentials, match="there are no credentials"):
        azure({"account": "other"})
    monkeypatch.setenv("AZURE_STORAGE_KEY", "of-env")
    assert azure({}).config["account_key"] == "of-env"
    assert azure({"account": "other", "token": "hush"}).config["token"] == "hush"
    given = azure({"account": "lab", "sas_token": "?sv=1&sig=2"})
    assert given.config["sas_key"] == "sv=1&sig=2" and "account_key" not in given.config
    assert azure({"account": "lab", "anonymous": True}).config["skip_signature"] is True


def test_azure_s_roles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers: list[Callable[[str], bool]] = [lambda url: True]
    monkeypatch.setattr("holdfast.storage.cloud.credentials.reachable", lambda url: answers[0](url))
    assert azure({"account": "lab"}).source == "the machine's managed identity"
    answers[0] = lambda url: False
    (tmp_path / "az").write_text("#!/bin/sh\n")
    (tmp_path / "az").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert azure({"account": "lab"}).config["use_azure_cli"] is True
    monkeypatch.setenv("AZURE_CLIENT_ID", "x")
    assert azure({"account": "lab"}).source == "the environment (AZURE_CLIENT_ID)"


def test_a_connection_string_reaches_azure_s_emulator(azurite: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    options = options_of(azurite)
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"AccountName={options['account']};AccountKey={options['account_key']};BlobEndpoint={options['endpoint_url']};",
    )
    store = Cloud("az", azurite.bucket())
    store.put("a", [b"x"], 1)
    assert store.get("a").data == b"x"


def test_a_port_that_is_open_is_reachable() -> None:
    with canned() as server:
        assert reachable(server.endpoint)
    assert not reachable("http://127.0.0.1:1")
