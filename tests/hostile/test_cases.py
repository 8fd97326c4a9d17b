"""Every hostile checkpoint is refused, by an error of ours that names it; nothing runs, and nothing outside is opened.

docs/security.md lists the cases; this test holds the two together.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import holdfast
import holdfast.ranks.ranks  # it asks for the name of the host when it is imported, and no case may ask for it
from holdfast.errors import HoldfastError, NotACheckpoint, Unsupported
from tests.formats import hostile
from tests.fuzz.trial import CONSTANT, _counted, _peak, _watched
from tests.hostile import files, pickled

CASES = {**pickled.cases(), **files.cases()}
DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "security.md"


def _use(path: Path) -> None:
    checkpoint = holdfast.open(path)
    if not checkpoint.tensors and not checkpoint.values and not checkpoint.differing:
        raise NotACheckpoint(f"{path} holds nothing that can be read")  # all that was in it is left out, and told
    if checkpoint.left_out:
        raise Unsupported(f"{path}: {checkpoint.left_out}")  # told in a warning: the rest is sound
    checkpoint.state_dict()
    checkpoint.verify()


@pytest.mark.parametrize("label", CASES)
@pytest.mark.slow_cases(
    "index: a million names of no file", "lies: lists a million deep", "lies: tuples a million deep",
    "lies: dicts a million deep", "tar: 64 MiB of nothing as .bz2", "tar: 64 MiB of nothing as .xz",
)  # fmt: skip
def test_it_is_refused_and_nothing_is_executed(label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, work = tmp_path / "root", tmp_path / "work"
    (root / "run").mkdir(parents=True)
    work.mkdir()
    (root / "secret.txt").write_text("secret")
    (work / "victim").mkdir()
    (work / "payload.py").write_text("open('canary', 'w')")
    monkeypatch.setenv("HOLDFAST_SCRATCH_LIMIT", str(16 << 20))
    path = CASES[label](root / "run")
    size = sum(f.stat().st_size for f in root.rglob("*") if f.is_file() and not f.is_symlink())
    monkeypatch.chdir(work)
    limit = 2 * size + CONSTANT
    with (
        hostile.listening() as heard,
        pytest.raises(HoldfastError) as caught,
        _watched(),
        _counted(limit),
        _peak(limit),
    ):
        _use(path)
    assert path.name in str(caught.value) or "model.pt" in str(caught.value)
    assert "secret" not in str(caught.value).replace("secret.txt", "")
    assert sorted(os.listdir(work)) == ["payload.py", "victim"]
    assert [event for event in heard if _is_forbidden(event)] == []


def _is_forbidden(event: str) -> bool:
    if event.startswith("open"):
        away = r"secret\.txt|/etc/passwd|outside|elsewhere|canary|payload|/dev/zero|/proc/self/mem"
        return re.search(away, event) is not None
    return event.startswith(("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess", "socket"))


def test_there_are_enough_of_them_and_the_document_tells_how_many() -> None:
    assert len(CASES) >= 60
    told = DOCUMENT.read_text()
    kinds: dict[str, int] = {}
    for label in CASES:
        kind = label.partition(":")[0] if ":" in label else "containers"
        kinds[kind] = kinds.get(kind, 0) + 1
    for kind, count in kinds.items():
        assert f"| {kind} | {count} |" in told, (kind, count)
