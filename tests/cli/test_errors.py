"""Every error that a user can cause, on its real cause: its code, its kind, and what it says to do next."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli.errors import Code, failure_of, in_options
from holdfast.storage.local import disk
from tests.cli.conftest import Run
from tests.damaging import flip
from tests.formats.truth import GOLDEN
from tests.rights import OPEN

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
    from holdfast.storage import urls

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


def _saved_nothing_yet(command: str) -> Cause:
    def cause(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
        with holdfast.CheckpointManager(root.parent / "fresh", every=100, worker="none", signals=()) as manager:
            manager.step(1, {"step": 1})
        return [command, root.parent / "fresh"]

    return cause


def _all_died(command: str) -> Cause:
    def cause(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
        for step in root.glob("step-*"):
            (step / "manifest.json").unlink()
        return [command, root]

    return cause


def _empty(command: str) -> Cause:
    def cause(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
        (root.parent / "empty").mkdir()
        return [command, root.parent / "empty"]

    return cause


def _borrowed(*more: str) -> Cause:
    """Its own manifest alone says which file of an older save it has borrowed."""

    def cause(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
        (_newest(root) / "manifest.json").unlink()
        return ["rescue", _newest(root), *more]

    return cause


def _values_beside(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    (root / "step-000000100" / "manifest.json").unlink()
    return ["rescue", root / "step-000000100"]


def _without(golden: str, pattern: str, command: str, *, cut: bool = False) -> Cause:
    """Another library's checkpoint that lacks a file, or has half of it."""

    def cause(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
        folder = Path(shutil.copytree(GOLDEN / golden / "ckpt", root.parent / "theirs"))
        file = sorted(folder.rglob(pattern))[0]
        if cut:
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        else:
            file.unlink()
        return [command, folder]

    return cause


def _half_a_file(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    torch.save({"a": torch.ones(9000)}, root.parent / "x.pt")
    whole = (root.parent / "x.pt").read_bytes()
    (root.parent / "x.pt").write_bytes(whole[: len(whole) // 2])
    return ["verify", root.parent / "x.pt"]


def _empty_file(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    (root.parent / "x.pt").touch()
    return ["verify", root.parent / "x.pt"]


def _killed_conversion(root: Path, patch: pytest.MonkeyPatch) -> list[object]:
    child = os.fork()
    if not child:
        with disk.hooked(_dying):
            holdfast.convert(_newest(root), root.parent / "out", to="huggingface")
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    return ["verify", root.parent / "out"]


def _dying(call: disk.Call, do: Callable[[], object]) -> object:
    if call.verb == "write" and call.path.endswith(".safetensors"):
        os.kill(os.getpid(), signal.SIGKILL)
    return do()


def _path(command: str, below: str, *more: str) -> Cause:
    return lambda root, patch: [command, root / below, *more]


TABLE: dict[str, tuple[Cause, Code, str, str]] = {
    "nothing there": (_path("verify", "../rum/x"), Code.NOT_A_CHECKPOINT, "no checkpoint", "did you mean"),
    "a step misspelt": (_path("verify", "step-00000050"), Code.NOT_A_CHECKPOINT, "no checkpoint", "did you mean"),
    "a run, not a step": (_path("show", ""), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast ls "),
    "a part of a step": (
        _path("verify", "step-000000500/model"), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast show ",
    ),
    "no checkpoint": (_foreign, Code.NOT_A_CHECKPOINT, "no checkpoint", "docs/formats.md"),
    "no manifest": (_without_manifest, Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast rescue "),
    "half a checkpoint": (_half, Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast prune --orphans "),
    **{
        f"nothing saved yet: {command}": (
            _saved_nothing_yet(command), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast watch ",
        )
        for command in ("ls", "show", "verify", "prune", "repair", "rescue")
    },
    **{
        f"an empty root: {command}": (_empty(command), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast ls ")
        for command in ("ls", "show", "watch", "view", "prune")
    },
    **{
        f"all saves died: {command}": (_all_died(command), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast rescue ")
        for command in ("verify", "prune")
    },
    "watch of a step": (_path("watch", "step-000000500"), Code.USAGE, "usage", "holdfast watch "),
    "ls of a part": (_path("ls", "step-000000500/model"), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast show "),
    "sizes of a part": (
        _path("show", "step-000000500/model", "--sizes"), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast show ",
    ),
    "a manifest": (
        _path("show", "step-000000500/manifest.json"), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast show ",
    ),
    "rescue of what borrowed": (_borrowed(), Code.MISMATCH, "mismatch", "take an older step"),
    "rescue without values": (_values_beside, Code.MISMATCH, "mismatch", "--like "),
    "DCP without .metadata": (
        _without("dcp_fsdp2_4r", ".metadata", "ls"), Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast ls ",
    ),
    "DCP, half of .metadata": (
        _without("dcp_fsdp2_4r", ".metadata", "show", cut=True), Code.DAMAGED, "damaged", "bring back",
    ),
    "DCP, half a shard": (_without("dcp_fsdp2_4r", "__2*", "show", cut=True), Code.DAMAGED, "damaged", "bring back"),
    "DeepSpeed without a rank": (
        _without("ds_zero2_bf16_frozen_2r", "*zero_pp_rank_1*", "verify"), Code.DAMAGED, "damaged", "bring back",
    ),
    "half a file": (_half_a_file, Code.DAMAGED, "damaged", "bring back"),
    "an empty file": (_empty_file, Code.NOT_A_CHECKPOINT, "no checkpoint", "holdfast ls "),
    "a conversion that was killed": (_killed_conversion, Code.NOT_A_CHECKPOINT, "no checkpoint", "goes on from there"),
    "damaged manifest": (_damaged_manifest, Code.DAMAGED, "damaged", "holdfast rescue "),
    "missing shard": (_missing_shard, Code.DAMAGED, "damaged", "bring back"),
    "missing obstore": (_no_obstore, Code.MISMATCH, "missing package", "pip install"),
    "missing zstandard": (_no_zstandard, Code.MISMATCH, "missing package", "pip install"),
    "no such scheme": (lambda r, p: ["verify", "s4://bucket/x"], Code.USAGE, "usage", "docs/stores.md"),
    **{
        f"no such scheme: {command}": (
            lambda root, patch, command=command: [command, _newest(root), "s4://bucket/x"],  # type: ignore[misc]
            Code.USAGE, "usage", "docs/stores.md",
        )
        for command in ("convert", "copy")
    },
    "a slash lost": (lambda r, p: ["verify", "s3:/bucket/x"], Code.USAGE, "usage", "docs/stores.md"),
    "no bucket": (lambda r, p: ["verify", "s3://"], Code.USAGE, "usage", "docs/stores.md"),
    "no credentials": (_no_credentials, Code.STORAGE, "no credentials", "holdfast doctor "),
    "a glob without a match": (_convert("--only", "modle/*"), Code.MISMATCH, "mismatch", "holdfast show "),
    "one glob of two without a match": (
        _convert("--only", "model", "--only", "optimiser"), Code.MISMATCH, "mismatch", "holdfast show ",
    ),
    "an empty glob": (_convert("--only", ""), Code.MISMATCH, "mismatch", "holdfast show "),
    "a rename of nothing": (_convert("--rename", "modle=net"), Code.MISMATCH, "mismatch", "holdfast show "),
    "target taken": (_taken, Code.STORAGE, "taken", "--overwrite"),
    "no dtype": (_convert("--dtype", "int8"), Code.USAGE, "usage", "holdfast convert --help"),
    "no size": (_convert("--max-shard-size", "many"), Code.USAGE, "usage", "holdfast convert --help"),
    "no format": (_convert("--to", "zip"), Code.USAGE, "usage", "holdfast convert --help"),
    "rename without =": (_convert("--rename", "model"), Code.USAGE, "usage", "holdfast convert --help"),
    "no such command": (lambda r, p: ["polish"], Code.USAGE, "usage", "holdfast --help"),
    "no argument": (lambda r, p: ["rescue"], Code.USAGE, "usage", "holdfast rescue --help"),
    "prune of a step": (_path("prune", "step-000000500"), Code.USAGE, "usage", "holdfast prune "),
    "prune of nothing": (_path("prune", "../rum"), Code.NOT_A_CHECKPOINT, "no checkpoint", "did you mean"),
    "orphans of nothing": (
        _path("prune", "../rum", "--orphans"), Code.NOT_A_CHECKPOINT, "no checkpoint", "did you mean",
    ),
    "no need of rescue": (_path("rescue", "step-000000500"), Code.STORAGE, "taken", "holdfast verify "),
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x exists; pass overwrite=True", "x exists; pass --overwrite"),
        ("fits only='modle' (did you mean model?)", "fits --only 'modle' (did you mean model?)"),
        ("rename= or only= tells them apart", "--rename or --only tells them apart"),
        ('step goes with to="holdfast"; x', 'step goes with --to "holdfast"; x'),
        ("name it with like=, or sources=[...]", "name it with --like, or --from [...]"),
        ("max_shard_bytes=0 is not positive", "--max-shard-size 0 is not positive"),
        ("holdfast.tools.repair mends, holdfast.convert(x)", "holdfast repair mends, holdfast convert(x)"),
        ("/runs/only=3/step=4 and s3://b/k?save=1", "/runs/only=3/step=4 and s3://b/k?save=1"),
    ],
)
def test_errors_speak_of_options(text: str, words: str) -> None:
    assert in_options(text) == words


def test_errors_name_options_and_not_arguments(steps: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(*_taken(steps, monkeypatch))[2].splitlines() == [  # the advice once
        f"error: {steps.parent / 'taken'} exists", "next:  choose a target that is free, or --overwrite",
    ]  # fmt: skip
    err = run("convert", _newest(steps), steps.parent / "o", "--only", "modle")[2]
    assert "fits --only 'modle'" in err and "only=" not in err
    (_newest(steps) / "manifest.json").unlink()
    err = run("rescue", _newest(steps), "--like", _newest(steps))[2]
    assert "like=" not in err and "holdfast." not in err
    assert run("show", steps, "--sizes", "--mesh", "fsdp=2")[2].startswith("error: ask one at a time")


def test_a_choice_that_there_is_not(steps: Path, run: Run) -> None:
    code, _, err = run("convert", _newest(steps), steps.parent / "new", "--to", "hugginface")
    assert code == Code.USAGE and "error: Invalid value for '--to': 'hugginface' is not one of" in err


def test_suggestions_are_near(steps: Path, run: Run) -> None:
    assert "did you mean s3://?" in run("verify", "s4://bucket/x")[2]
    assert "did you mean model" in run("convert", _newest(steps), steps.parent / "o", "--only", "modle/*")[2]
    assert f"{_newest(steps)}?" in run("verify", steps / "step-00000050")[2]


def test_what_to_do_next_names_the_checkpoint_and_no_option(steps: Path, run: Run) -> None:
    pattern = "w" * 300
    for before, after in (((), ("--tensors", pattern)), (("--json", "--tensors", pattern), ())):
        code, _, err = run("show", *before, _newest(steps), *after)
        assert code == Code.MISMATCH and f"holdfast show {_newest(steps)} lists" in err
    code, _, err = run("show", "--ranks", 2, steps / "gone", "--shard", pattern + "=1")
    assert code == Code.NOT_A_CHECKPOINT and f"holdfast ls {steps} lists" in err


@pytest.fixture
def foreign_user() -> Iterator[Path]:
    """A folder in which this process is not the owner of anything, and another user while it is."""
    folder = Path(tempfile.mkdtemp(dir=OPEN))
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
    assert run("verify", step)[0] == run("doctor", step)[0] == Code.FINE  # another user may not import what they need
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


@pytest.mark.slow
def test_no_space(small_disk: Path, steps: Path, run: Run) -> None:
    for number in range(60):
        code, _, err = run("copy", _newest(steps), small_disk / str(number), "--json")
        if code != Code.FINE:
            break
    told = json.loads(err)["error"]
    assert code == Code.STORAGE and told["kind"] == "no space" and "holdfast prune" in told["next"]


@pytest.mark.parametrize(("command", "hint"), [("copy", "the same command continues from here"), ("verify", "")])
def test_an_interrupt_says_whether_the_same_command_continues(command: str, hint: str) -> None:
    failure = failure_of(KeyboardInterrupt(), ["--quiet", command, "run/step-1"])
    assert failure is not None and (failure.text, failure.next) == ("interrupted", hint)
