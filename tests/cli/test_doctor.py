"""The doctor: what it finds on a machine, in a folder, in a store and in broken checkpoints, and what it prescribes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.cli.errors import Code
from holdfast.commit.folder import delete_checkpoint
from holdfast.doctor import folders, machine, stores
from tests.citing import save_on, state_of
from tests.cli.conftest import Run
from tests.damaging import flip
from tests.formats.truth import GOLDEN
from tests.rights import refused
from tests.servers import Server
from tests.servers.faults import Fault
from tests.stores import bucket_of, is_same


def _checkpoint(run: Run, path: object) -> tuple[int, list[dict[str, Any]]]:
    code, out, err = run("doctor", path, "--json")
    assert out, err
    return code, json.loads(out)["checkpoint"]


def test_a_machine_and_a_folder(tmp_path: Path, run: Run) -> None:
    code, out, _ = run("doctor", tmp_path, "--json")
    told = json.loads(out)
    assert code == Code.FINE and told["well"] and "checkpoint" not in told
    names = {one["name"] for one in told["machine"]}
    assert {"python", "torch", "holdfast", "obstore", "memory", "/dev/shm", "open files", "locked memory"} <= names
    names = {one["name"] for one in told["folder"]}
    assert {"file system", "free space", "rights", "writing", "clock", "direct I/O", "hard links", "locks"} <= names
    assert not list(tmp_path.iterdir())
    assert "torch" in run("doctor")[1]


def test_what_is_wrong_with_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    monkeypatch.setattr(machine.resource, "getrlimit", lambda what: (256, 4096))
    found = {one.name: one for one in machine.findings()}
    assert found["torch"].verdict == "fail" and "pip install" in found["torch"].mend
    assert found["open files"].verdict == "warn" and "ulimit -n 4096" in found["open files"].mend


def test_an_optional_package_that_is_not_installed_is_no_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run("doctor")[1].splitlines()[-1].partition(": ")[2]
    monkeypatch.setattr(machine, "_EXTRAS", (("no-such-package", "cloud", "URLs"),))
    code, out, _ = run("doctor")
    assert code == Code.FINE and "  --   no-such-package: not installed: optional, for URLs\n" in out
    assert 'pip install "holdfast-torch[cloud]"' in out and out.splitlines()[-1].endswith(f"checks: {before}")


def test_what_is_wrong_with_a_folder(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {one.name: one for one in folders.findings(small_disk)}
    assert found["file system"].verdict == "warn" and "memory" in found["file system"].text
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        found = {one.name: one for one in folders.findings(small_disk)}
        assert found["file system"].verdict == "fail" and "read-only" in found["file system"].text
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    behind = namedtuple("behind", "st_mtime")(1.0)
    monkeypatch.setattr(
        folders.disk, "stat", lambda path, real=folders.disk.stat: behind if path.name == "file" else real(path)
    )
    found = {one.name: one for one in folders.findings(small_disk)}
    assert found["clock"].verdict == "warn" and "behind" in found["clock"].text


def test_broken_checkpoints(steps: Path, run: Run) -> None:
    newest = steps / "step-000000500"
    copy = shutil.copytree(newest, steps.parent / "copy")
    assert _checkpoint(run, newest) == (Code.FINE, [pytest.approx(_checkpoint(run, newest)[1][0])])
    code, [found] = _checkpoint(run, steps)
    assert code == Code.FINE and "5 checkpoints" in found["text"] and "holdfast ls" in found["mend"]

    file = next((newest / "optimizer").iterdir())
    file.unlink()
    code, [found] = _checkpoint(run, newest)
    assert code == Code.DAMAGED and "is missing" in found["text"] and "holdfast repair" in found["mend"]
    assert run("repair", newest, "--from", copy)[0] == Code.FINE

    flip(file, 20)
    code, found_all = _checkpoint(run, newest)
    assert code == Code.DAMAGED and "holdfast repair" in found_all[0]["mend"]
    assert run("repair", newest, "--from", copy)[0] == Code.FINE

    # It shares a file with older steps, which headers do not tell: nobody but a copy of it knows all.
    flip(newest / "manifest.json", 200)
    code, [found] = _checkpoint(run, newest)
    assert code == Code.DAMAGED and "step-000000400" in found["mend"] and "--like COPY" in found["mend"]
    (newest / "manifest.json").unlink()
    code, [found] = _checkpoint(run, newest)
    assert code == Code.NOT_A_CHECKPOINT and "--like COPY" in found["mend"]


def test_the_command_that_it_prescribes_is_the_right_one(tmp_path: Path, run: Run) -> None:
    for step in (1, 2):
        holdfast.save({"model": {"w": torch.ones(900) * step}, "lr": 0.1}, tmp_path / f"step-{step}", step=step)
    for hurt in ("altered", "gone"):
        if hurt == "altered":
            flip(tmp_path / "step-2" / "manifest.json", 200)
        else:
            (tmp_path / "step-2" / "manifest.json").unlink()
        code, [found] = _checkpoint(run, tmp_path / "step-2")
        assert code == (Code.DAMAGED if hurt == "altered" else Code.NOT_A_CHECKPOINT)
        assert found["mend"].endswith("step-1") and run(*found["mend"].split()[1:])[0] == Code.FINE
        assert holdfast.tools.verify(tmp_path / "step-2").whole and holdfast.open(tmp_path / "step-2").step == 2
    # Alone, it is made from its headers.
    (tmp_path / "step-2" / "manifest.json").unlink()
    alone = shutil.move(tmp_path / "step-2", tmp_path / "alone" / "step-2")
    code, [found] = _checkpoint(run, alone)
    assert run(*found["mend"].split()[1:])[0] == Code.FINE and "--like" not in found["mend"]


def test_a_file_with_a_bad_header_is_told_of_once(tmp_path: Path, run: Run) -> None:
    holdfast.save({"model": {f"w{n}": torch.ones(3) for n in range(12)}}, tmp_path / "c")
    flip(next((tmp_path / "c" / "model").iterdir()), 100)
    code, [found] = _checkpoint(run, tmp_path / "c")
    assert code == Code.DAMAGED and found["text"].startswith("12 tensors: model/w0[0:3], model/w1[0:3] … and 10 more: ")


def test_a_step_that_borrowed_files_is_rescued_from_a_copy(steps: Path) -> None:
    newest = steps / "step-000000500"
    copy = shutil.copytree(newest, steps.parent / "copy")
    before = holdfast.open(newest).state_dict()
    (newest / "manifest.json").unlink()
    assert holdfast.tools.rescue(newest, like=copy).origin == "copy"
    assert is_same(holdfast.open(newest).state_dict(), before) and holdfast.tools.verify(newest).whole


def test_other_formats(tmp_path: Path, run: Run) -> None:
    code, [found] = _checkpoint(run, GOLDEN / "dcp_fsdp2_4r" / "ckpt")
    assert code == Code.FINE and "torch.distributed.checkpoint" in found["text"]
    shutil.copytree(GOLDEN / "dcp_fsdp2_4r" / "ckpt", tmp_path / "dcp")
    next((tmp_path / "dcp").glob("__2*")).unlink()
    code, [found] = _checkpoint(run, tmp_path / "dcp")
    assert code == Code.DAMAGED and "bring back" in found["mend"]
    (tmp_path / "dcp" / "sub").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x").write_text("x")
    code, [found] = _checkpoint(run, tmp_path / "notes")
    assert code == Code.NOT_A_CHECKPOINT and found["mend"]
    (tmp_path / "out.partial").mkdir()
    code, [found] = _checkpoint(run, tmp_path / "out")
    assert code == Code.NOT_A_CHECKPOINT and "goes on from there" in found["mend"]


def test_a_store(moto: Server, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_of(moto) as bucket:
        found = {one.name: one for one in stores.findings(bucket.at("run"))}
        assert [one.verdict for one in found.values()] == ["ok"] * len(found), found
        assert {"credentials", "clock", "listing", "writing", "reading", "deleting", "conditional writes"} <= set(found)
        assert "options" in found["credentials"].text and not bucket.files()
        assert bucket.options()["secret_access_key"] not in str(found)
        monkeypatch.setattr(stores, "clock_ahead", lambda endpoint: 400.0)
        found = {one.name: one for one in stores.findings(bucket.at("run"))}
        assert found["clock"].verdict == "fail" and "chronyc" in found["clock"].mend
        bucket.proxy.add(Fault("status", times=None, method="PUT", status=403))
        found = {one.name: one for one in stores.findings(bucket.at("run"))}
        assert found["writing"].verdict == "fail" and "s3:PutObject" in found["writing"].text


def test_steps_of_two_runs(tmp_path: Path, run: Run) -> None:
    for step in (300, 150):  # who begins afresh beside older steps is another run
        with holdfast.CheckpointManager(tmp_path, every=1, worker="none", signals=()) as manager:
            manager.save(step, {"step": step}, overwrite=True)
    manager = holdfast.CheckpointManager(tmp_path, every=1, worker="none", signals=())
    with manager, pytest.raises(holdfast.errors.Mismatch, match="two runs"):
        manager.restore({"step": 0})
    code, found = _checkpoint(run, tmp_path)
    assert code == Code.MISMATCH and "two runs" in found[1]["text"] and "holdfast ls" in found[1]["mend"]


def test_a_disk_that_has_no_room_for_another_step(small_disk: Path, run: Run) -> None:
    with holdfast.CheckpointManager(small_disk, every=1, worker="none", signals=()) as manager:
        manager.save(1, {"weight": torch.zeros(600_000)})
        _, found = _checkpoint(run, small_disk)
        assert not [one for one in found if one["name"] == "free space"]
        manager.save(2, {"weight": torch.zeros(600_000)})
    _, found = _checkpoint(run, small_disk)
    [room] = [one for one in found if one["name"] == "free space"]
    assert room["verdict"] == "warn" and "step-000000002 takes 2.4 MB" in room["text"] and "prune" in room["mend"]


def test_a_run_that_has_not_saved_is_not_ill(tmp_path: Path, run: Run) -> None:
    with holdfast.CheckpointManager(tmp_path, every=9, worker="none", signals=()) as manager:
        manager.step(1, {"step": 1})
    code, [found] = _checkpoint(run, tmp_path)
    assert code == Code.FINE and found["verdict"] == "warn" and "no step was saved here yet" in found["text"]


def test_what_is_damaged_says_the_next_command(steps: Path, run: Run) -> None:
    newest = steps / "step-000000500"
    shutil.copytree(newest, steps.parent / "copy")
    file = next((newest / "optimizer").iterdir())
    flip(file, file.stat().st_size - 100)
    for code, out, _ in (run("verify", newest), run("repair", newest)):
        assert code == Code.DAMAGED and f"next: holdfast repair {newest} --from {steps} " in out
    assert json.loads(run("verify", newest, "--json")[1])["next"].startswith("holdfast repair ")
    assert run("repair", newest, "--from", steps.parent / "copy")[0] == Code.FINE
    assert "next" not in run("verify", newest)[1]
    (newest / "manifest.json").unlink()
    assert (
        "careful with" in run("prune", steps, "--orphans")[1]
        and "careful" not in run("prune", steps, "--orphans", "--yes")[1]
    )


def test_what_may_not_be_read_is_told_with_what_to_do(steps: Path, run: Run) -> None:
    names = sorted(path.name for path in steps.iterdir() if path.is_dir() and path.name.startswith("step"))
    first, second, last = (steps / name for name in (names[0], names[-2], names[-1]))
    (last / "manifest.json").unlink()
    hidden = second / "manifest.json"
    with refused():
        hidden.chmod(0)
        code, out, _ = run("doctor", steps)
        assert code == Code.DAMAGED and "Permission denied" in out and f"holdfast doctor {second}" in out
        code, out, _ = run("doctor", second)
        assert code == Code.STORAGE and "Permission denied" in out and "chmod" in out
        code, out, _ = run("doctor", last)
        assert code == Code.NOT_A_CHECKPOINT and f"holdfast rescue {last}" in out, (
            "its neighbour tells nothing, it does all the same"
        )
        code, out, _ = run("prune", steps, "--orphans")
        assert code == 0 and "Permission denied" in out and str(last) in out
        hidden.chmod(0o644)
        (first / "manifest.json").rename(first / "aside")
        first.chmod(0)
        try:
            code, out, _ = run("doctor", first / "model")
            assert code == Code.STORAGE and "chmod" in out and "you may not read" in out
            with pytest.raises(holdfast.errors.StorageError, match="no permission"):
                holdfast.open(first)
        finally:
            first.chmod(0o755)


def test_a_swept_step_whose_files_others_borrow(tmp_path: Path, run: Run) -> None:
    save_on(state_of(1), tmp_path / "step-1")
    save_on(state_of(2, model=2), tmp_path / "step-2", tmp_path / "step-1")
    delete_checkpoint(tmp_path / "step-1")
    code, found = _checkpoint(run, tmp_path)
    assert code == Code.FINE and [one["verdict"] for one in found] == ["ok", "ok"]
    assert "step-1 is no checkpoint any more" in found[1]["text"] and "step-2 reuses them" in found[1]["text"]
    code, [one] = _checkpoint(run, tmp_path / "step-1")
    assert code == Code.NOT_A_CHECKPOINT and "step-2 reuses them" in one["text"] and "rescue" not in one["mend"]


def test_a_section_that_a_neighbour_has_is_told_to_be_missing(tmp_path: Path, run: Run) -> None:
    for step in (1, 2):
        state = {"model": {"w": torch.ones(900) * step}, "optimizer": {"m": torch.ones(9), "v": torch.ones(9)}}
        holdfast.save(state, tmp_path / f"step-{step}", step=step)
    newest = tmp_path / "step-2"
    (newest / "manifest.json").unlink()
    shutil.rmtree(newest / "optimizer")
    code, [one] = _checkpoint(run, newest)
    assert code == Code.NOT_A_CHECKPOINT and "optimizer/m and 1 more tensors, which step-1 has" in one["text"]
    assert "take an older step" in one["mend"] and one["mend"].endswith("--like COPY")
    code, _, err = run("rescue", newest)
    assert code == Code.MISMATCH and "which step-1 has" in err and "--save" in err and not list(newest.glob("*.json"))
    save = next(iter((newest / "model").iterdir())).name.split(".")[-2].split("-")[-1]
    assert run("rescue", newest, "--save", save)[0] == Code.FINE, "who wants what is there says so"


def test_credentials_that_cannot_be_fetched_are_not_called_fine(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in (("ID", "arn:aws:iam::1:role/x"), ("FILE", "/nowhere/token")):
        monkeypatch.setenv({"ID": "AWS_ROLE_ARN", "FILE": "AWS_WEB_IDENTITY_TOKEN_FILE"}[name], value)
    code, out, _ = run("doctor", "s3://bucket/run?endpoint_url=http://127.0.0.1:1", "--json")
    found = {one["name"]: one for one in json.loads(out)["store"]}
    assert code == Code.STORAGE and found["credentials"]["verdict"] == "fail", found
    assert "could be fetched" in found["credentials"]["text"] and "listing" not in found
    assert "credentials" in found["credentials"]["mend"]
