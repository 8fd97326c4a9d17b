"""Every block of every page does what the page says."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path

import pytest

from tests.docs.ask import ask
from tests.docs.pages import ROOT, RUN, blocks_of, pages
from tests.servers import Server

MOST_NOT_RUN = 0.2
"""Of all blocks, those that may say why they do not run."""

LONG_PAGES = (
    "background", "cli", "incremental", "migrate", "resume", "stores", "testing", "tiers", "trainers",
    "trainers-huggingface", "trainers-lightning", "values", "view",
)  # fmt: skip
"""Their programs take seconds, so `make test-all` runs them. Those of README.md and start.md take as long, and stay:
people read them first."""

NEEDS_A_STORE = re.compile(r"\b(s3|gs|az|abfss|r2|weka|https)://")


@pytest.mark.parametrize("page", pages())
@pytest.mark.slow_cases(*(f"docs/{page}.md" for page in LONG_PAGES))
def test_what_a_page_shows(page: str, warm: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    blocks = [block for block in blocks_of(page) if not block.not_run]
    if not any(block.language in RUN for block in blocks):
        return
    environment = dict(warm)
    if any(NEEDS_A_STORE.search(block.text) for block in blocks if block.language in RUN):
        environment.update(store_for(blocks, request.getfixturevalue("moto")))
    (tmp_path / "page" / "examples").parent.mkdir()
    (tmp_path / "page" / "examples").symlink_to(ROOT / "examples")
    said = tmp_path / "said.txt"
    with open(said, "wb") as out, open(os.devnull) as nothing:
        fds = (nothing.fileno(), out.fileno(), out.fileno())
        code = ask("page", [page], fds=fds, folder=str(tmp_path / "page"), environment=environment)
    if code:
        pytest.fail(said.read_text(errors="replace") or f"{page} ended with {code}", pytrace=False)


def store_for(blocks: list, server: Server) -> dict[str, str]:
    """The environment of a process for which the server is the store: buckets of all names that the page has."""
    from tests.docs.run_page import Places

    suffix = uuid.uuid4().hex[:6]
    places = Places(Path("/nowhere"), server.endpoint, suffix)
    for block in blocks:
        places.there(block.text)
    for here in places.back:
        server.make_bucket(here.rpartition("/")[2])
    return {
        "HOLDFAST_DOCS_STORE": server.endpoint,
        "HOLDFAST_DOCS_SUFFIX": suffix,
        "AWS_ENDPOINT_URL_S3": server.endpoint,
        "AWS_ACCESS_KEY_ID": "moto",
        "AWS_SECRET_ACCESS_KEY": "moto",
        "AWS_REGION": "us-east-1",
    }


def test_few_blocks_are_not_run() -> None:
    blocks = [block for page in pages() for block in blocks_of(page) if block.language in RUN and not block.hidden]
    left_out = [f"{block.where}: {block.not_run}" for block in blocks if block.not_run]
    print(f"{len(left_out)} of {len(blocks)} blocks are not run:", *left_out, sep="\n  ")
    assert len(left_out) <= MOST_NOT_RUN * len(blocks), left_out
