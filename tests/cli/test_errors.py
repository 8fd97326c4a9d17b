"""Every error that a user can cause, on its real cause: its code, its kind, and what it says to do next."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.cli.codes import Code
from tests.cli.conftest import Run
from tests.damaging import flip
from tests.foreign.truth import GOLDEN

Cause = Callable[[Path, pytest.MonkeyPatch], list[object]]


def _newest(root: Path) -> Path:
    return root / "step-000000500"


def _without_manifest(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    (root / "step-000000100" / "manifest.json").unlink()
    return ["verify", root / "step-000000100"]


def _half(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    (_newest(root) / "manifest.json").unlink()
    for path in (_newest(root) / "model").iterdir():
        path.write_bytes(path.read_bytes()[:4096])
    return ["verify", _newest(root)]


def _damaged_manifest(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    flip(_newest(root) / "manifest.json", 300)
    return ["verify", _newest(root)]


def _missing_shard(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    shutil.copytree(GOLDEN / "hf_safetensors_bf16_sharded" / "ckpt", root.parent / "hf")
    next((root.parent / "hf").glob("*00002-of*")).unlink()
    return ["verify", root.parent / "hf"]


def _foreign(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    (root.parent / "notes").mkdir()
    (root.parent / "notes" / "a.txt").write_text("no checkpoint")
    return ["verify", root.parent / "notes"]


def _no_obstore(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    from holdfast.engine.stores import urls

    patch.setattr(urls.importlib.util, "find_spec", lambda name: None)
    return ["verify", "s3://bucket/step"]


def _no_zstandard(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    for name in ("zstandard", "compression.zstd", "backports.zstd"):
        patch.setitem(sys.modules, name, None)
    return ["verify", GOLDEN / "dcp_fsdp2_zstd_2r" / "ckpt"]


def _no_credentials(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("HOME", str(root))
    return ["verify", "s3://bucket/step?endpoint_url=http://127.0.0.1:1"]


def _taken(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    (root.parent / "taken").mkdir()
    (root.parent / "taken" / "mine").write_text("x")
    return ["convert", _newest(root), root.parent / "taken"]


def _convert(*more: str) -> Cause:
    return lambda root, patch: ["convert", _newest(root), root.parent / "out", *more]


def _path(command: str, below: str) -> Cause:
    return lambda root, patch: [command, root / below]


TABLE: dict[str, tuple[Cause, Code, str, str]] = {
    "nothing there": (_path("verify", "../rum/x"), Code.NOT_A_CHECKPOINT, "no checkpoint", "did you mean"),
    "a step misspelt": (_path("verify", "step-00000050"), Code.NOT_A_CHECKPOINT, "no checkpoint", "did you mean"),
    "a run, not a step": (_path("verify", ""), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast ls "),
    "a part of a step": (
        _path("verify", "step-000000500/model"), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast show ",
    ),
    "no checkpoint": (_foreign, Code.NOT_A_CHECKPOINT, "no checkpoint", "docs/formats.md"),
    "no manifest": (_without_manifest, Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast rescue "),
    "half a checkpoint": (_half, Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast gc "),
    "damaged manifest": (_damaged_manifest, Code.DAMAGED, "damaged", "holdfast rescue "),
    "missing shard": (_missing_shard, Code.DAMAGED, "damaged", "bring back"),
    "missing obstore": (_no_obstore, Code.MISMATCH, "missing package", "pip install"),
    "missing zstandard": (_no_zstandard, Code.MISMATCH, "missing package", "pip install"),
    "no such scheme": (lambda r, p: ["verify", "s4://bucket/x"], Code.USAGE, "usage", "docs/stores.md"),
    "a slash lost": (lambda r, p: ["verify", "s3:/bucket/x"], Code.USAGE, "usage", "docs/stores.md"),
    "no bucket": (lambda r, p: ["verify", "s3://"], Code.USAGE, "usage", "docs/stores.md"),
    "no credentials": (_no_credentials, Code.STORAGE, "no credentials", "holdfast doctor "),
    "a glob without a match": (_convert("--only", "modle/*"), Code.MISMATCH, "mismatch", "holdfast show "),
    "target taken": (_taken, Code.STORAGE, "taken", "--overwrite"),
    "no dtype": (_convert("--dtype", "int8"), Code.USAGE, "usage", "holdfast convert --help"),
    "no size": (_convert("--max-shard-size", "many"), Code.USAGE, "usage", "holdfast convert --help"),
    "no format": (_convert("--to", "zip"), Code.USAGE, "usage", "holdfast convert --help"),
    "rename without =": (_convert("--rename", "model"), Code.USAGE, "usage", "holdfast convert --help"),
    "no such command": (lambda r, p: ["polish"], Code.USAGE, "usage", "holdfast --help"),
    "no argument": (lambda r, p: ["rescue"], Code.USAGE, "usage", "holdfast rescue --help"),
    "prune of a step": (_path("prune", "step-000000500"), Code.USAGE, "usage", "holdfast prune --help"),
    "prune of nothing": (_path("prune", "../rum"), Code.NOT_A_CHECKPOINT, "no checkpoint", "did you mean"),
    "gc of nothing": (_path("gc", "../rum"), Code.NOT_A_CHECKPOINT, "no checkpoint", "did you mean"),
    "no need of rescue": (_path("rescue", "step-000000500"), Code.STORAGE, "taken", "target that is free"),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_every_error_says_what_to_do_next(
    name: str, steps: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    cause, code, kind, hint = TABLE[name]
    arguments = cause(steps, monkeypatch)
    found, out, err = run(*arguments)
    assert (found, out) == (code, "") and "Traceback" not in err
    first, _, last = err.strip().rpartition("\n")
    assert first.startswith("error: ") and last.startswith("next:  ") and hint in last
    found, out, err = run(*arguments, "--json")
    told = json.loads(err)["error"]
    assert (found, out) == (code, "") and (told["code"], told["kind"]) == (code, kind)
    assert told["text"] and hint in told["next"]


def test_suggestions_are_near(steps: Path, run: Run) -> None:
    assert "did you mean s3://?" in run("verify", "s4://bucket/x")[2]
    assert "did you mean model" in run("convert", _newest(steps), steps.parent / "o", "--only", "modle/*")[2]
    assert f"{_newest(steps)}?" in run("verify", steps / "step-00000050")[2]


@pytest.fixture
def foreign_user() -> Iterator[Path]:
    """A folder in which this process is not the owner of anything, and another user while it is."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        if os.getuid() == 0:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_without_rights(foreign_user: Path, steps: Path, run: Run) -> None:
    step = shutil.copytree(_newest(steps), foreign_user / "step")
    step.chmod(0o700 if os.getuid() == 0 else 0o000)
    if os.getuid() == 0:
        os.seteuid(65534)
    code, _, err = run("verify", step, "--json")
    told = json.loads(err)["error"]
    assert code == Code.STORAGE and told["kind"] == "no rights" and "holdfast doctor" in told["next"]
    code, out, _ = run("doctor", step)
    assert code == Code.STORAGE and "rights" in out and "chmod" in out
    if os.getuid() == 0:
        os.seteuid(0)


def test_no_space(small_disk: Path, steps: Path, run: Run) -> None:
    for number in range(60):
        code, _, err = run("copy", _newest(steps), small_disk / str(number), "--json")
        if code != Code.FINE:
            break
    told = json.loads(err)["error"]
    assert code == Code.STORAGE and told["kind"] == "no space" and "holdfast prune" in told["next"]
