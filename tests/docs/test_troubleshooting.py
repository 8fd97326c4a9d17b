"""What docs/troubleshooting.md quotes is raised, its table is in the code, and the site's page has all messages."""

from __future__ import annotations

import html
import os
import re
import runpy
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.errors import HoldfastError
from tests.docs import troubles
from tests.docs.ask import ask
from tests.docs.pages import ROOT
from tests.servers import Server

SCRIPT = runpy.run_path(str(ROOT / "docs/messages.py"))
PAGE = ROOT / "docs/troubleshooting.md"

ALONE = {
    "there is nothing at": troubles.nothing_there,
    "is none itself": troubles.the_root_of_a_run,
    "no step was saved": troubles.nothing_saved_yet,
    "is one checkpoint": troubles.a_step_for_a_root,
    "holds data but no manifest": troubles.no_manifest,
    "is a file of no format": troubles.no_such_format,
    "its pickle names": troubles.a_class_in_a_pickle,
    "does not fit": troubles.left_over,
    "only= fits nothing": troubles.a_pattern_of_nothing,
    "rename= maps": troubles.a_rename_of_nothing,
    "saved with shape": troubles.another_shape,
    "saved by a LayerNorm": troubles.another_kind_of_layer,
    "holds steps of two runs": troubles.two_runs,
    "is altered: bytes": troubles.a_bad_block,
    "is altered or truncated": troubles.another_manifest,
    "is missing; restore": troubles.a_file_gone,
    "is not signed": troubles.not_signed,
    "already holds": troubles.taken,
    "holds other files": troubles.other_files,
    "is code": troubles.a_function_in_the_state,
    "cannot reserve": troubles.a_full_disk,
    "changed while": troubles.changed_while_copied,
    "needs obstore": troubles.no_client,
}
ON_TWO_RANKS = {
    "differs between ranks": "differs_between_ranks",
    "never came to phase": "a_rank_does_not_come",
    "the ranks do different things": "ranks_that_do_other_things",
    "each with its own value": "another_number_of_ranks",
}
AT_A_STORE = {"there is no bucket": troubles.no_bucket}


def quoted() -> list[str]:
    return re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)


def check(piece: str, said: str) -> None:
    """The one heading with this piece of text fits what was said, `…` for anything."""
    [heading] = [heading for heading in quoted() if piece in heading]
    pattern = ".*".join(re.escape(part.strip()) for part in heading.split("…"))
    assert re.search(pattern, said, re.DOTALL), f"{heading}\n\nis not what is said:\n\n{said}"


def test_the_table_of_classes_is_the_one_in_the_code() -> None:
    assert SCRIPT["classes_part"]() in PAGE.read_text(), "run python docs/messages.py"
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HoldfastError)}
    assert {row.error for row in errors.MEANINGS} == kinds - {HoldfastError}


@pytest.mark.slow
def test_every_word_of_every_message_is_on_the_page_of_the_site() -> None:
    on_the_page = SCRIPT["words"](html.unescape(SCRIPT["with_messages"](PAGE.read_text())))
    messages = SCRIPT["messages"]()
    assert len(messages) > 500
    assert not {m.text for m in messages if not SCRIPT["words"](m.text) <= on_the_page}


def test_every_text_of_the_page_is_raised() -> None:
    pieces = [*ALONE, *ON_TWO_RANKS, *AT_A_STORE]
    for heading in quoted():
        assert [piece for piece in pieces if piece in heading], f"nothing raises {heading}"


def test_errors_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for piece, trouble in ALONE.items():
        folder = tmp_path / trouble.__name__
        folder.mkdir()
        monkeypatch.chdir(folder)
        with pytest.raises(Exception) as raised:
            trouble()
        check(piece, str(raised.value))


@pytest.mark.parametrize("piece", ON_TWO_RANKS)
def test_errors_of_two_ranks(piece: str, warm: dict[str, str], tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    with open(said, "wb") as out, open(os.devnull) as nothing:
        command = ["--nproc-per-node", "2", "-m", "tests.docs.troubles", ON_TWO_RANKS[piece]]
        fds = (nothing.fileno(), out.fileno(), out.fileno())
        ask("torchrun", command, fds=fds, folder=str(tmp_path), environment=warm)
    check(piece, said.read_text())


def test_errors_of_a_store(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", moto.endpoint)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "moto")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    for piece, trouble in AT_A_STORE.items():
        with pytest.raises(Exception) as raised:
            trouble()
        check(piece, str(raised.value))
