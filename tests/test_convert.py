"""Conversions as a whole: the same bytes on any number of ranks, killed and gone on with, bounded, clear errors."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.export import copying
from holdfast.export.work import Converted
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from tests import pool
from tests.export import states
from tests.export.conftest import source
from tests.export.killing import killed_in_its_middle

__all__ = ["source"]  # the fixture

FORMATS = ["holdfast", "huggingface", "torch", "dcp"]


def convert(path: str, target: str, to: Any, options: dict[str, Any]) -> Converted:
    return holdfast.convert(path, target, to=to, **options)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("options", [{}, {"dtype": torch.float16, "max_shard_bytes": 5 << 20}], ids=["plain", "cast"])
def test_the_same_bytes_on_one_and_on_two_ranks(to: str, options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    alone = holdfast.convert(source, tmp_path / "one", to=to, **options)
    both = pool.run(2, convert, str(source), str(tmp_path / "two"), to, options)
    assert states.files(tmp_path / "one") == states.files(tmp_path / "two")
    assert all(0 < one.bytes_read < 0.9 * alone.bytes_read for one in both), "the work is split"
    assert {one.nbytes for one in both} == {alone.nbytes}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "two"], "nothing else is left"


def convert_and_be_killed(path: str, target: str, to: Any, victim: int) -> None:
    """Convert unit by unit, and be killed in its middle."""
    if (dist.get_rank() if dist.is_initialized() else 0) != victim:
        holdfast.convert(path, target, to=to, deadline=6)
    killed_in_its_middle(target, lambda: holdfast.convert(path, target, to=to, deadline=6))


@pytest.mark.parametrize("to", FORMATS)
def test_killed_it_leaves_no_target_and_the_same_call_goes_on(to: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    (died,) = pool.attempt(1, convert_and_be_killed, str(source), str(target), to, 0)
    pool.close(1)
    assert died.kinds == ["Killed"]
    assert not target.exists()
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.open(target)
    for path in [tmp_path / "t.partial", tmp_path / "t.partial" / "content"]:
        with pytest.raises(holdfast.HoldfastError):
            holdfast.open(path)
    resumed = holdfast.convert(source, target, to=to)
    fresh = holdfast.convert(source, tmp_path / "fresh", to=to)
    assert resumed.bytes_resumed > 0 and resumed.bytes_read < fresh.bytes_read and not fresh.bytes_resumed
    assert states.files(target) == states.files(tmp_path / "fresh")
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_one_rank_killed_and_gone_on_with_alone(source: Path, tmp_path: Path) -> None:
    survivor, died = pool.attempt(2, convert_and_be_killed, str(source), str(tmp_path / "t.pt"), "torch", 1)
    pool.close(2)
    assert died.kinds == ["Killed"] and "RankLost" in survivor.kinds and survivor.fields["rank"] == 1
    assert not (tmp_path / "t.pt").exists()
    resumed = holdfast.convert(source, tmp_path / "t.pt", to="torch")
    assert resumed.bytes_resumed, "what the survivor has copied counts"
    states.same(torch.load(tmp_path / "t.pt", weights_only=True), states.whole(holdfast.open(source)))


def test_other_arguments_begin_anew(source: Path, tmp_path: Path) -> None:
    pool.attempt(1, convert_and_be_killed, str(source), str(tmp_path / "t"), "holdfast", 0)
    pool.close(1)
    other = holdfast.convert(source, tmp_path / "t", dtype=torch.float16)
    assert not other.bytes_resumed
    holdfast.open(tmp_path / "t").verify()


def fail_on_rank_1(path: str, target: str) -> None:
    if dist.get_rank() == 1:
        original = copying.write

        def broken(*args: Any) -> None:
            raise OSError(errno.EIO, "Input/output error", target)

        copying.write = broken
        try:
            holdfast.convert(path, target)
        finally:
            copying.write = original
    else:
        holdfast.convert(path, target)


def test_a_failure_of_one_rank_is_raised_by_all(source: Path, tmp_path: Path) -> None:
    errors = pool.attempt(2, fail_on_rank_1, str(source), str(tmp_path / "t"))
    assert [e.kinds for e in errors] == [errors[0].kinds] * 2 and "StorageError" in errors[0].kinds
    assert errors[0].fields["rank"] == 1 and errors[0].fields["errno"] == errno.EIO
    assert not (tmp_path / "t").exists()
    pool.run(2, convert, str(source), str(tmp_path / "t"), "holdfast", {})
    holdfast.open(tmp_path / "t").verify()


def differ(path: str, target: str) -> None:
    holdfast.convert(path, target, only="model" if dist.get_rank() else "optimizer")


def test_ranks_that_would_make_different_targets(source: Path, tmp_path: Path) -> None:
    errors = pool.attempt(2, differ, str(source), str(tmp_path / "t"))
    assert all("Mismatch" in e.kinds and "with the same arguments on every rank" in e.text for e in errors)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """One tensor of 400 MB, to every format, cast or not: resident memory rises by far less than it."""
    holdfast.save({"model": {"w": torch.arange(100_000_000.0).view(10_000, 10_000)}}, tmp_path / "c")

    def status(field: str) -> int:
        return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024

    for to in FORMATS:
        for dtype in (None, torch.bfloat16):
            Path("/proc/self/clear_refs").write_text("5")
            before = status("VmRSS")
            holdfast.convert(tmp_path / "c", tmp_path / "t", to=to, dtype=dtype, overwrite=True)
            assert status("VmHWM") - before <= 192 << 20, (to, dtype)
    loaded = holdfast.open(tmp_path / "c").read("model/w", [slice(9_999, None)])
    assert torch.equal(loaded[0], torch.arange(99_990_000.0, 100_000_000.0))


def test_a_target_that_exists(source: Path, tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "t", only="model")
    before = states.files(tmp_path / "t")
    with pytest.raises(
        holdfast.errors.StorageError, match="exists; choose another path, or pass overwrite=True"
    ) as caught:
        holdfast.convert(source, tmp_path / "t", only="optimizer")
    assert caught.value.errno == errno.EEXIST and states.files(tmp_path / "t") == before
    holdfast.convert(source, tmp_path / "t", to="dcp", only="optimizer", overwrite=True)
    assert not before.keys() & states.files(tmp_path / "t").keys(), "nothing of the old one is left"
    holdfast.convert(source, tmp_path / "t.pt", to="torch", only="model")
    holdfast.convert(source, tmp_path / "t.pt", to="torch", only="layers", overwrite=True)
    assert set(torch.load(tmp_path / "t.pt")) == {"layers"}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("mine")
    with pytest.raises(holdfast.errors.StorageError, match="does not look like a checkpoint"):
        holdfast.convert(source, tmp_path / "home", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["home", "t", "t.pt"]


@pytest.mark.parametrize("far", [False, True])
def test_other_checkpoints_in_the_target_do_not_go_with_it(far: bool, source: Path, tmp_path: Path) -> None:
    output: Any = StorePlace(Memory(), "output") if far else tmp_path / "output"
    holdfast.convert(source, output, to="huggingface")
    holdfast.convert(source, tmp_path / "one", to="huggingface", overwrite=True)
    data = (tmp_path / "one" / "model.safetensors").read_bytes()
    if far:
        output.store.put((output / "checkpoint-5" / "model.safetensors").key, [data], len(data))
    else:
        shutil.copytree(tmp_path / "one", output / "checkpoint-5")
    with pytest.raises(holdfast.errors.StorageError, match=r"holds other checkpoints \(checkpoint-5\)"):
        holdfast.convert(source, output, to="huggingface", overwrite=True)
    holdfast.open(output / "checkpoint-5").verify()


@pytest.mark.parametrize("far", [False, True])
def test_the_source_is_no_target_whatever_it_is_called(far: bool, tmp_path: Path) -> None:
    step: Any = tmp_path / "run" / "step-1"
    names = [step, tmp_path / "link", tmp_path / "run"]
    if far:
        step = StorePlace(Memory(), "run") / "step-1"
        names = [step]
    holdfast.save({"model": {"w": torch.ones(9)}, "optim": {"m": torch.ones(9)}}, step)
    (tmp_path / "link").symlink_to(tmp_path / "run" / "step-1")
    for called in names[:2]:
        for target in names:
            with pytest.raises(holdfast.errors.Mismatch, match="is the source, or around it"):
                holdfast.convert(called, target, only="model", overwrite=True)
    assert len(holdfast.open(step).tensors) == 2


def test_a_damaged_source_gives_no_target(source: Path, tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "c")
    (file,) = (tmp_path / "c" / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for to in FORMATS:
        with pytest.raises(holdfast.errors.Damaged, match="is altered: bytes .* have another checksum"):
            holdfast.convert(tmp_path / "c", tmp_path / "t", to=to)
        assert not (tmp_path / "t").exists()
    holdfast.convert(tmp_path / "c", tmp_path / "t", verify=False)


def test_a_full_disk_is_found_before_anything_is_copied(source: Path, small_disk: Path) -> None:
    with pytest.raises(holdfast.errors.StorageError, match=r"cannot reserve .* bytes .*the disk is full") as caught:
        holdfast.convert(source, small_disk / "t")
    assert caught.value.errno == errno.ENOSPC and not list(small_disk.iterdir())
    holdfast.convert(source, small_disk / "t", only="kinds")
    holdfast.open(small_disk / "t").verify()


def test_what_cannot_be_asked_for(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "t"
    with pytest.raises(ValueError, match="to is one of 'holdfast', 'huggingface', 'hf', 'torch', 'dcp', not 'onnx'"):
        holdfast.convert(source, target, to="onnx")
    with pytest.raises(ValueError, match="give a floating dtype"):
        holdfast.convert(source, target, dtype=torch.int8)
    with pytest.raises(ValueError, match="step goes with"):
        holdfast.convert(source, target, to="dcp", step=1)
    with pytest.raises(ValueError, match="extras go with"):
        holdfast.convert(source, target, extras={"a": b""})
    with pytest.raises(ValueError, match="max_shard_bytes=.*: give a whole number of bytes, at least 1"):
        holdfast.convert(source, target, max_shard_bytes=0)
    with pytest.raises(ValueError, match="no store for ftp"):
        holdfast.convert(source, "ftp://bucket/t")
    with pytest.raises(holdfast.errors.NotACheckpoint, match="there is nothing at"):
        holdfast.convert(tmp_path / "nowhere", target)
    with pytest.raises(
        holdfast.errors.Mismatch, match=r"nothing that fits only='model/sen' \(did you mean model/seen\?\)"
    ):
        holdfast.convert(source, target, only="model/sen")
    with pytest.raises(
        holdfast.errors.Mismatch, match="nothing that fits only='optimiser' .did you mean optimizer.., 'x'"
    ):
        holdfast.convert(source, target, only=["model", "optimiser", "x"])
    with pytest.raises(
        holdfast.errors.Mismatch, match="only= takes names as they were saved, and net/.* was saved as model/"
    ):
        holdfast.convert(source, target, only="net", rename={"model": "net"})
    with pytest.raises(holdfast.errors.Mismatch, match=r"only=\[\] names nothing"):
        holdfast.convert(source, target, only=[])
    for place in (source, source.parent):
        with pytest.raises(holdfast.errors.Mismatch, match="is the source, or around it"):
            holdfast.convert(source, place, overwrite=True)
    assert not list(tmp_path.iterdir())


def test_progress_is_told_and_what_is_left_out_is_logged_once(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[holdfast.events.Event] = []
    with holdfast.events.listen(seen.append), caplog.at_level(logging.INFO, "holdfast"):
        converted = holdfast.convert(
            holdfast.open(source), tmp_path / "t", to="huggingface", extras={"config.json": b"{}"}
        )
    assert [e.kind for e in seen][0] == "start" and seen[-1].kind == "end"
    assert {e.task for e in seen} == {"convert"} and seen[-1].done == seen[-1].total > states.wide(0).nbytes
    assert {"optimizer/columns", "config/lr", "rng", "mine"} <= set(converted.left_out)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert repr(converted).startswith(f"Converted('{tmp_path / 't'}', 'huggingface', {len(converted.tensors)} tensors")
    assert f"leaves out {len(converted.left_out)} names" in record.getMessage()


def test_a_foreign_source(tmp_path: Path) -> None:
    """What torch saved, as a file and as a folder of its distributed checkpoint, in every other form."""
    import torch.distributed.checkpoint as dcp

    model = {"a.weight": torch.randn(700, 300), "a.bias": torch.randn(7).bfloat16(), "n": torch.tensor(3)}
    torch.save({"model": model, "epoch": 3, "lr": [0.1, 0.2]}, tmp_path / "file.pt")
    dcp.save({"model": model, "epoch": 3}, checkpoint_id=tmp_path / "folder", no_dist=True)
    for saved in ("file.pt", "folder"):
        before = holdfast.open(tmp_path / saved)
        native = holdfast.convert(tmp_path / saved, tmp_path / f"{saved}.native")
        assert native.bytes_unverified > 0, "there are no sums to check"
        after = holdfast.open(tmp_path / f"{saved}.native")
        after.verify()
        states.same(after.state_dict(), before.state_dict())
        states.same(after.state_dict()["model"], model)
        holdfast.convert(tmp_path / saved, tmp_path / f"{saved}.pt", to="torch")
        states.same(torch.load(tmp_path / f"{saved}.pt", weights_only=True), before.state_dict())
        holdfast.convert(tmp_path / saved, tmp_path / f"{saved}.again")
        assert states.files(tmp_path / f"{saved}.again") == states.files(tmp_path / f"{saved}.native")


def test_a_source_that_changes_meanwhile(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "file.pt")

    def touch(event: holdfast.events.Event) -> None:
        os.utime(tmp_path / "file.pt", (0, 0))

    with (
        holdfast.events.listen(touch),
        pytest.raises(holdfast.errors.Mismatch, match="was changed while it was converted"),
    ):
        holdfast.convert(tmp_path / "file.pt", tmp_path / "t")
    assert not (tmp_path / "t").exists()
    assert not holdfast.convert(tmp_path / "file.pt", tmp_path / "t").bytes_resumed, "what was copied is not trusted"
    assert holdfast.open(tmp_path / "t").read("model/w").sum() == 1000


GOLDEN = [
    "dcp_fsdp2_tp_2x2", "dcp_fsdp2_zstd_2r", "ds_zero3_fp32_2r", "hf_safetensors_single_tied", "hfai_3r",
    "megatron_flat_tp2", "torchsave_legacy_views", "torchsnapshot_fsdp1_2r",
]  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_every_kind_of_foreign_source(name: str, tmp_path: Path) -> None:
    """Shards by row and by column, flat parts, compressed and strided tensors, values by rank: all comes over."""
    folder = Path(__file__).parent / "golden" / name / "ckpt"
    path = next(folder.iterdir()) if name.startswith("torchsave") else folder
    before = holdfast.open(path)
    wanted = states.whole(before)
    holdfast.convert(path, tmp_path / "native")
    after = holdfast.open(tmp_path / "native")
    after.verify()
    states.same(states.whole(after), wanted)
    assert after.attachments == before.attachments and after.manifest.aliases == before.manifest.aliases
    holdfast.convert(path, tmp_path / "state.pt", to="torch")
    states.same(torch.load(tmp_path / "state.pt", weights_only=True), wanted)
