"""Small files of other libraries: read up to a limit, and Damaged that names the file for whatever else they hold."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from holdfast.errors import Damaged, StorageError, Unsupported
from holdfast.formats.machine.untrusted import damaged_as, named_in_errors, read_json, read_whole


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"12345")
    assert read_whole(path, 5) == b"12345"
    with pytest.raises(Damaged, match="small has 5 bytes"):
        read_whole(path, 4)
    with pytest.raises((FileNotFoundError, StorageError)):
        read_whole(tmp_path / "none", 4)


@pytest.mark.parametrize("data", [b"{", b"\xff", b"", b"[" * 100_000, b'{"a": 1} x'])
def test_what_is_no_json(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(data)
    with pytest.raises(Damaged, match="state.json is no valid JSON") as caught:
        read_json(path)
    assert caught.value.__cause__ is None


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(b'{"loss": NaN}')
    assert math.isnan(read_json(path)["loss"])


@pytest.mark.parametrize("error", [KeyError("a"), TypeError("b"), ZeroDivisionError(), ValueError("c")])
def test_malformed_contents_are_damage(error: Exception) -> None:
    with pytest.raises(Damaged, match=f"^the file is odd: {type(error).__name__}"), damaged_as("the file is odd"):
        raise error
    with pytest.raises(Damaged, match="^a: odd: ") as caught, named_in_errors("a", "odd"):
        raise error
    assert caught.value.__cause__ is None
    with pytest.raises(Damaged) as caught, damaged_as("odd", unexpected=True):
        raise error
    assert caught.value.__cause__ is error


def test_errors_that_say_what_is_wrong_stay() -> None:
    with pytest.raises(Unsupported, match="^new$"), damaged_as("odd"):
        raise Unsupported("new")
    with pytest.raises(Unsupported, match="^a: new$"), named_in_errors("a", "odd"):
        raise Unsupported("new")
    with pytest.raises(OSError, match="^disk$"), named_in_errors("a", "odd"):
        raise OSError("disk")
