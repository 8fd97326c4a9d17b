"""Credentials that were given in a URL, an option or the environment stand in no error, log, report or name."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.storage.cloud.facts import answer_in
from holdfast.storage.urls import location

SECRET = "pl4nted+s3cret/value=="
WRITTEN = (SECRET, "pl4nted", "s3cret")

URLS = [
    f"s3://AKIA:{WRITTEN[1]}@bucket/run", f"https://user:{WRITTEN[1]}@host/run", f"https://{WRITTEN[1]}@host/run",
    f"https://host/run?X-Amz-Signature={WRITTEN[1]}&X-Amz-Credential=x", f"https://host/run?sig={WRITTEN[1]}",
    f"az://container/run?sas_token={WRITTEN[1]}", f"s3://bucket/run?secret_access_key={WRITTEN[1]}",
    f"s3://bucket/run?session_token={WRITTEN[1]}&region=x", f"gs://bucket/run?token={WRITTEN[1]}",
    f"abfss://c:{WRITTEN[1]}@account.dfs.core.windows.net/x", f"az://c/run?account_key={WRITTEN[1]}",
    f"s3://bucket/run?nonsense={WRITTEN[1]}", f"http://user:{WRITTEN[1]}@/x", f"ftp://user:{WRITTEN[1]}@host/x",
    f"s3://bu cket/x?sig={WRITTEN[1]}", f"https://host/../x?sig={WRITTEN[1]}", f"s3://user:{WRITTEN[1]}@/x",
    f"hf://{WRITTEN[1]}@owner/name", f"hf://user:{WRITTEN[1]}@hub/owner/name", f"hf://owner/name?token={WRITTEN[1]}",
    f"hf://owner/name?nonsense={WRITTEN[1]}",
]  # fmt: skip


def _shown(error: BaseException) -> str:
    """All that somebody may see of an error: its text, its notes, and those of what led to it."""
    texts = [str(error), repr(error), *map(str, error.args), *getattr(error, "__notes__", ())]
    lines = "".join(traceback.format_exception(error)).splitlines()
    return "\n".join([*texts, *(line for line in lines if not line.startswith("    "))])  # but for source code


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("use", [location, holdfast.storage.at, holdfast.open], ids=["location", "at", "open"])
def test_a_url_with_a_secret_is_told_without_it(
    url: str, use: Callable[[str], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    if use is holdfast.open:
        monkeypatch.setattr("holdfast.formats.own.read_manifest", lambda folder: _missing(folder))
        monkeypatch.setattr("holdfast.formats.detect.open_foreign", lambda folder: None)
        monkeypatch.setattr("holdfast.formats.detect.what_is_there", lambda folder: f"there is nothing in {folder}")
    caplog.set_level(logging.DEBUG)
    try:
        shown = f"{use(url)!r} {use(url)}"
    except (ValueError, OSError, TypeError) as error:
        shown = _shown(error)
    assert "pl4nted" not in shown + caplog.text


def _missing(folder: Any) -> Any:
    raise holdfast.errors.NotACheckpoint(f"there is no {folder}")


@pytest.mark.parametrize(
    "options",
    [
        {"access_key_id": "AKIA", "secret_access_key": SECRET}, {"access_key_id": "AKIA", "secret_access_key": SECRET,
         "session_token": SECRET}, {"endpoint_url": f"http://user:{WRITTEN[1]}@host"}, {"nonsense": SECRET},
        {"secret_access_key": SECRET, "region": 7}, {"secret_access_key": SECRET}, {"sas_token": SECRET},
    ],
)  # fmt: skip
def test_options_are_never_shown(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    try:
        place = holdfast.storage.at("s3://bucket/run", options)
        shown = f"{place!r} {place} {place.store!r} {place.store.url} {vars(place)!r}"
    except (ValueError, TypeError) as error:
        shown = _shown(error)
    assert not any(secret in shown + caplog.text for secret in WRITTEN)


_around = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="?@<>\"' &"), max_size=20)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    _around,
    _around,
    st.sampled_from(
        [
            "https://u:{}@h/x",
            "https://h/x?sig={}",
            "https://h/x?a=b&X-Amz-Signature={}",
            "Authorization: {}",
            "key {} is wrong",
            "<Message>{}</Message>",
        ]
    ),
)
def test_no_answer_of_a_store_is_told_with_a_secret_in_it(before: str, after: str, how: str) -> None:
    told = answer_in(OSError(f"{before} {how.format(SECRET)} {after}"), (SECRET,))
    assert not any(SECRET in str(part) for part in told)
