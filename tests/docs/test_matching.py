"""The tests of the pages can fail: what is shown is compared, and what does not keep to the convention is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.matching import matches
from tests.docs.pages import Malformed, parse
from tests.docs.run_page import Places, Wrong, commands_of, run_block


@pytest.mark.parametrize(
    ("shown", "printed", "fits"),
    [
        ("whole: 12 tensors, 1.2 MB in 0.4 s", "whole: 12 tensors, 310 kB in 3 ms", True),
        ("whole: 12 tensors, 1.2 MB in 0.4 s", "whole: 13 tensors, 1.2 MB in 0.4 s", False),
        ("whole: … in … s", "whole: 3 tensors in 0.4 s", True),
        ("save 7c1e09ab52d3f410 of 2026-01-01 12:00", "save 0123456789abcdef of 2025-12-31 23:59", True),
        ("a   b", "a b", True),
        ("one\n…\nfour", "one\ntwo\nthree\nfour", True),
        ("one\n…", "one", True),
        ("one", "one\ntwo", False),
        ("step … of 4", "step 3 of 4", True),
        ("step … of 4", "step 3\nof 4", False),
        ("━━━━━━ 4", "━━━━━━━━━━━ 4", True),
        ("\x1b[1mbold\x1b[0m", "bold", True),
    ],
)
def test_what_is_shown_and_what_is_printed(shown: str, printed: str, fits: bool) -> None:
    assert matches(shown, printed) is fits


@pytest.mark.parametrize(
    "text",
    [
        "```\nno language\n```",
        "```python\nno end",
        "words\n\n    holdfast.save()\n",
        "```console\nno command\n```",
        "<!-- not run: -->\n```python\npass\n```",
        "<!-- not run: why -->\nwords",
        "<!-- before\npass\n",
    ],
)
def test_pages_that_would_leave_something_out_are_refused(text: str) -> None:
    with pytest.raises(Malformed):
        parse("page.md", text)


@pytest.mark.parametrize(
    "text",
    [
        "```python\n1 / 0\n```",
        "<!-- raises: KeyError -->\n```python\n1 / 0\n```",
        "<!-- raises: KeyError -->\n```python\npass\n```",
        "```console\n$ false\n```",
        "```console\n$ echo one\ntwo\n```",
        "```console\n$ exit 0\n$ echo two\n```",
    ],
)
def test_blocks_that_do_something_else_are_wrong(text: str, tmp_path: Path) -> None:
    with pytest.raises(Wrong, match=r"page\.md:[23]"):
        for block in parse("page.md", text):
            run_block(block, Places(tmp_path, "", ""), {})


def test_a_list_may_be_indented() -> None:
    assert parse("page.md", "- one\n\n    and more of it\n\n    ```python\n    pass\n    ```\n")[0].text == "pass"


def test_commands_and_what_is_below_them() -> None:
    text = "$ one \\\n  --more\nsaid\n$ two"
    assert commands_of(text) == [("one \\\n  --more", "said"), ("two", "")]


def test_places_there_and_back() -> None:
    places = Places(Path("/tmp/x"), "http://127.0.0.1:1", "ab")
    assert places.there('save("/ckpt/1", "s3://my-bucket/run")') == 'save("/tmp/x/ckpt/1", "s3://my-bucket-ab/run")'
    assert places.there("az://c/run?account=a") == "s3://az-c-ab/run"
    assert places.there("https://huggingface.co/org/model") == "http://127.0.0.1:1/huggingface.co-ab/org/model"
    assert places.there("cp /archive/x /dev/null") == "cp /tmp/x/archive/x /dev/null"
    assert places.there("a/runs/x and ./models") == "a/runs/x and ./models"
    assert places.as_shown("/tmp/x/ckpt/1 s3://az-c-ab/run") == "/ckpt/1 az://c/run"
