"""Signed checkpoints: what their maker saved, byte for byte, or nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.ondisk import blocks, datafile, manifest, signature
from holdfast.policies.signing.keys import Signer, signer
from holdfast.read.files import DataFiles
from holdfast.read.source import ReadStats
from holdfast.storage.local.local import Local
from holdfast.storage.store_place import StorePlace
from tests import pool

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
PUBLIC = Ed25519PrivateKey.from_private_bytes(KEY).public_key()
STRANGER = Ed25519PrivateKey.from_private_bytes(OTHER).public_key()


def _state(seed: int = 1) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    big = torch.randn(3 << 20, generator=made)  # two blocks
    return {
        "model": {"big": big, "small": torch.randn(7, generator=made), "empty": torch.zeros(0, 2)},
        "optimizer": {"m": torch.randn(50, 20, generator=made).t()},
        "rng": holdfast.PerRank([seed, torch.ones(3)]),
        "step": seed,
    }


def _save(path: Path, **options: Any) -> Path:
    holdfast.save(_state(), path, sign=KEY, files={"config.json": b"{}"}, **options)
    return path


def _signature(path: Path) -> Path:
    (found,) = path.glob("manifest.*.sig")
    return found


def _everything(path: Any, require: Any = PUBLIC) -> None:
    """All the ways in which bytes of a checkpoint are used."""
    opened = holdfast.open(path, require=require)
    opened.state_dict()
    opened.per_rank("rng", 0)
    opened.attachment("config.json")
    opened.verify()


def test_a_signed_save_loads_where_its_key_is_required(tmp_path: Path) -> None:
    path = _save(tmp_path / "c")
    _everything(path)
    _everything(path, [STRANGER, PUBLIC])
    target = _state(2)
    target["model"]["big"].zero_()
    loaded = holdfast.load(path, target, require=PUBLIC)
    assert torch.equal(target["model"]["big"], _state()["model"]["big"]) and target["step"] == 1
    assert loaded.bytes_unverified == 0
    assert holdfast.open(path, require=PUBLIC).signed_by == PUBLIC.public_bytes_raw().hex()
    opened = holdfast.open(path, require=PUBLIC)
    assert torch.equal(opened.state_dict(mmap=True)["model"]["small"], _state()["model"]["small"])
    assert torch.equal(opened.read("model/big", [slice(5, 9)]), _state()["model"]["big"][5:9])
    assert holdfast.open(path).signed_by is None
    holdfast.load(path, _state(2))  # readers that do not require anything are not concerned


@pytest.mark.parametrize("require", [STRANGER, [STRANGER]])
def test_another_key_is_refused(require: Any, tmp_path: Path) -> None:
    path, target = _save(tmp_path / "c"), _state(2)
    with pytest.raises(holdfast.errors.Untrusted, match="none of those required"):
        holdfast.load(path, target, require=require)
    assert torch.equal(target["model"]["big"], _state(2)["model"]["big"])


def test_no_signature_is_refused(tmp_path: Path) -> None:
    holdfast.save(_state(), tmp_path / "c")
    with pytest.raises(holdfast.errors.Untrusted, match="is not signed"):
        holdfast.open(tmp_path / "c", require=PUBLIC)
    with pytest.raises(PermissionError):
        holdfast.load(tmp_path / "c", _state(2), require=PUBLIC)
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    with pytest.raises(holdfast.errors.Untrusted, match="cannot be signed"):
        holdfast.open(tmp_path / "w.pt", require=PUBLIC)
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.open(tmp_path / "nothing", require=PUBLIC)
    with pytest.raises(holdfast.errors.Unsupported, match="cannot be signed"):
        holdfast.tools.sign(tmp_path / "w.pt", KEY)


def test_verification_cannot_be_switched_off(tmp_path: Path) -> None:
    path = _save(tmp_path / "c")
    with pytest.raises(ValueError, match="verify=False"):
        holdfast.load(path, _state(2), require=PUBLIC, verify=False)
    opened = holdfast.open(path, require=PUBLIC)
    for use in (lambda: opened.read("model/big", verify=False), lambda: opened.state_dict(mmap=True, verify=False)):
        with pytest.raises(ValueError, match="verify=False"):
            use()


# A forger who knows the format makes all sums of XXH3 fit again: only the signature can tell.


def _reseal(path: Path, change: Callable[[manifest.Manifest], manifest.Manifest]) -> None:
    target = path / "manifest.json"
    target.write_bytes(manifest.encode(change(manifest.decode(target.read_bytes(), ""))))


def _forge_file(path: Path, section: str, *, sha256: bool = False) -> None:
    """Change a tensor's last byte, its block's sum in the header, and the header's digest in the manifest."""
    (file,) = (path / section).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    nbytes = datafile.header_length(bytes(data[:8]), len(data))
    header = datafile.parse_header(bytes(data[:nbytes]), len(data))
    last = max((p for p in header.pieces.values() if p.nbytes), key=lambda p: p.begin)
    start = last.begin + (blocks.count(last.nbytes) - 1) * blocks.BLOCK
    block = bytes(data[start : last.begin + last.nbytes])
    old = header.sums[last.key][-1].encode()
    data[:nbytes] = bytes(data[:nbytes]).replace(old, xxhash.xxh3_64_hexdigest(block).encode())
    if sha256:
        strong = datafile.strong_sums(header.metadata["sha256"], header)[last.key][-1].encode()
        data[:nbytes] = bytes(data[:nbytes]).replace(strong, hashlib.sha256(block).hexdigest().encode())
    file.write_bytes(data)
    name = str(file.relative_to(path))
    digest = blocks.digest(bytes(data[:nbytes]))

    def renewed(record: manifest.Manifest) -> manifest.Manifest:
        files = [[*row[:3], digest] if row[0] == name else row for row in record.files]
        return manifest.msgspec.structs.replace(record, files=files)

    _reseal(path, renewed)


def _forge_value(path: Path) -> None:
    _reseal(path, lambda m: manifest.msgspec.structs.replace(m, values={**m.values, "step": 7}))


def _forge_attachment(path: Path) -> None:
    (path / "attachments" / "config.json").write_bytes(b"[]")
    proof = ("attachments/config.json", 2, blocks.digest(b"[]"))
    _reseal(path, lambda m: manifest.msgspec.structs.replace(m, attachments=[proof]))


FORGED: dict[str, Callable[[Path], None]] = {
    "tensor": lambda path: _forge_file(path, "model"),
    "tensor and its sha256": lambda path: _forge_file(path, "model", sha256=True),
    "value of a rank": lambda path: _forge_file(path, "state"),
    "value": _forge_value,
    "attachment": _forge_attachment,
}


@pytest.mark.parametrize("what", FORGED)
@pytest.mark.parametrize("resigned", ["unsigned bytes", "under the old statement", "by a stranger"])
def test_what_is_forged_is_refused(what: str, resigned: str, tmp_path: Path) -> None:
    path = _save(tmp_path / "c")
    old = _signature(path)
    FORGED[what](path)
    holdfast.open(path).verify()  # it all fits: nobody else can tell
    if resigned == "under the old statement":
        record = manifest.decode((path / "manifest.json").read_bytes(), "")
        old.rename(path / signature.file_name(record))
    elif resigned == "by a stranger":
        holdfast.tools.sign(path, OTHER)
        holdfast.open(path, require=STRANGER).verify()
    with pytest.raises(holdfast.errors.Untrusted):
        holdfast.open(path, require=PUBLIC)


def test_blocks_that_are_swapped_under_an_honest_manifest_are_found(tmp_path: Path, monkeypatch: Any) -> None:
    """As if XXH3 collided: every comparison with it passes, and only SHA-256 is left to tell."""
    path = _save(tmp_path / "c")
    (file,) = (path / "model").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    monkeypatch.setattr(blocks.xxhash, "xxh3_64_hexdigest", lambda data: pytest.fail("a weak sum was believed"))
    for use in (
        lambda opened: opened.state_dict(),
        lambda opened: opened.state_dict(mmap=True),
        lambda opened: opened.verify(),
        lambda opened: holdfast.load(path, {"model": _state(2)["model"]}, only="model", require=PUBLIC),
    ):
        with pytest.raises(holdfast.errors.Damaged, match="have another checksum"):
            use(holdfast.open(path, require=PUBLIC))


def test_a_header_with_another_digest_behind_the_same_weak_one_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    path = _save(tmp_path / "c")
    opened = holdfast.open(path, require=PUBLIC)
    files = opened.files
    assert isinstance(files, DataFiles)
    monkeypatch.setattr(blocks, "strong_sum", lambda data: "0" * 64)
    with pytest.raises(holdfast.errors.Damaged, match="not the one that was signed"):
        files.header(0, ReadStats())


def test_an_attachment_behind_the_same_weak_digest_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _save(tmp_path / "c")
    opened = holdfast.open(path, require=PUBLIC)
    ((_, _, digest),) = opened.manifest.attachments
    (path / "attachments" / "config.json").write_bytes(b"[]")
    monkeypatch.setattr(blocks, "digest", lambda data: digest)
    with pytest.raises(holdfast.errors.Damaged, match="not what was signed"):
        opened.attachment("config.json")


@pytest.mark.parametrize("cut", [0, 1, 40, -70, -1])
def test_a_signature_that_is_cut_or_altered_is_refused(cut: int, tmp_path: Path) -> None:
    path = _save(tmp_path / "c")
    data = _signature(path).read_bytes()
    for altered in (data[:cut], data[:cut] + bytes([data[cut] ^ 1]) + data[cut:][1:]):
        _signature(path).write_bytes(altered)
        with pytest.raises(holdfast.errors.Untrusted):
            holdfast.open(path, require=PUBLIC)


def test_every_byte_of_the_signature_counts(tmp_path: Path) -> None:
    path = _save(tmp_path / "c")
    target = _signature(path)
    data = target.read_bytes()
    for at in range(0, len(data), 7):
        altered = bytearray(data)
        altered[at] ^= 1 << at % 8
        target.write_bytes(altered)
        with pytest.raises(holdfast.errors.Untrusted):
            holdfast.open(path, require=PUBLIC)


# What becomes of a signature


def test_a_checkpoint_that_is_there_is_signed(tmp_path: Path) -> None:
    state = _state()
    holdfast.save(state, tmp_path / "1", files={"config.json": b"{}"})
    state["model"]["small"] += 1
    state["step"] = 2
    holdfast.save(state, tmp_path / "2", base=tmp_path / "1", files={"config.json": b"{}"})  # borrows
    for name in ("1", "2"):
        assert holdfast.tools.sign(tmp_path / name, KEY).signed_by == PUBLIC.public_bytes_raw().hex()
        _everything(tmp_path / name)
    _save(tmp_path / "3")
    holdfast.tools.sign(tmp_path / "3", OTHER)  # has sums of its own: none is stored twice
    assert len(json.loads(_signature(tmp_path / "3").read_bytes())["files"][0]) == 2
    assert json.loads(_signature(tmp_path / "3").read_bytes())["files"][0][1] is None
    with pytest.raises(holdfast.errors.Untrusted):
        holdfast.open(tmp_path / "3", require=PUBLIC)
    (file,) = (tmp_path / "1" / "optimizer").glob("*")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(holdfast.errors.Damaged):
        holdfast.tools.sign(tmp_path / "1", KEY)


def test_it_goes_where_a_copy_goes(tmp_path: Path) -> None:
    source = _save(tmp_path / "c")
    holdfast.copy(source, tmp_path / "there" / "d")
    _everything(tmp_path / "there" / "d")
    _signature(tmp_path / "there" / "d").unlink()
    holdfast.copy(source, tmp_path / "there" / "d")  # the same checkpoint is there: it gets what it lacks
    _everything(tmp_path / "there" / "d")
    holdfast.save({"w": torch.ones(3)}, tmp_path / "there" / "e")
    holdfast.copy(source, tmp_path / "there" / "e", overwrite=True)  # attachments move into a folder of their own
    _everything(tmp_path / "there" / "e")
    _forge_value(source)
    holdfast.copy(source, tmp_path / "f")
    assert not list((tmp_path / "f").glob("*.sig"))


@pytest.mark.parametrize("waves", [False, True])
def test_a_store_holds_signed_checkpoints(waves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the header goes first: sums are taken before anything is sent, or as the slot fills."""
    place = StorePlace(Local(tmp_path), "c")
    if waves:
        monkeypatch.setattr("holdfast.write.write.room_for", lambda sizes, window: 1 << 60)
    with holdfast.Saver(worker="thread", sign=KEY) as saver:
        saver.save(_state(), place, files={"config.json": b"{}"}).wait()
    _everything(place)
    holdfast.save(_state(), place, sign=KEY, files={"config.json": b"{}"}, overwrite=True)
    _everything(place)
    assert _signature(tmp_path / "c")
    target = _state(2)
    holdfast.load(place, target, require=PUBLIC, cache=tmp_path / "cache")
    assert torch.equal(target["model"]["big"], _state()["model"]["big"])
    holdfast.copy(place, tmp_path / "d")
    _everything(tmp_path / "d")


def test_an_overwrite_leaves_one_signature_and_a_delete_none(tmp_path: Path) -> None:
    path = _save(tmp_path / "c")
    first = _signature(path)
    _save(path, overwrite=True)
    assert _signature(path) != first
    _everything(path)
    holdfast.save(_state(), path, overwrite=True)
    assert not list(path.glob("*.sig"))


def test_a_drop_signs_anew_or_says_that_it_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "abc":
        _save(tmp_path / name)
    assert holdfast.tools.drop(tmp_path / "a", "optimizer", sign=KEY).sections == ("optimizer",)
    _everything(tmp_path / "a")
    assert "optimizer" not in holdfast.open(tmp_path / "a", require=PUBLIC).state_dict()
    with caplog.at_level(logging.WARNING, "holdfast"):
        holdfast.tools.drop(tmp_path / "b", "optimizer")
    assert "not signed any more" in caplog.text and not list((tmp_path / "b").glob("*.sig"))
    with pytest.raises(holdfast.errors.Untrusted):  # no oracle: only what this key signed is signed by it again
        holdfast.tools.drop(tmp_path / "c", "optimizer", sign=OTHER)
    _everything(tmp_path / "c")
    _forge_value(tmp_path / "c")
    with pytest.raises(holdfast.errors.Untrusted):
        holdfast.tools.drop(tmp_path / "c", "optimizer", sign=KEY)


def test_a_base_and_a_signature_exclude_each_other(tmp_path: Path) -> None:
    path = _save(tmp_path / "1")
    with pytest.raises(holdfast.SaveFailed, match="cannot be signed"):
        holdfast.save(_state(), tmp_path / "2", base=path, sign=KEY)
    with pytest.raises(ValueError, match="incremental"):
        holdfast.CheckpointManager(tmp_path / "run", every=1, incremental=True, sign=KEY)


# Keys


def test_keys_of_every_form(tmp_path: Path) -> None:
    public = holdfast.tools.signing.generate(tmp_path / "key")
    private = tmp_path / "key"
    assert private.stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        holdfast.tools.signing.generate(private)
    forms = [
        private,
        str(private),
        private.read_bytes(),
        private.read_text(),
        holdfast.tools.signing.load_key(private, private=True),
    ]
    raw = forms[-1].private_bytes_raw()
    (tmp_path / "raw").write_bytes(raw)
    expected = signer(raw)
    assert expected is not None
    assert {signer(form).public for form in [*forms, tmp_path / "raw"]} == {expected.public}
    holdfast.save({"w": torch.ones(2)}, tmp_path / "c", sign=private)
    opened = holdfast.tools.signing.load_key(public)
    assert isinstance(opened, Ed25519PublicKey)
    for form in (public, str(public), public.read_bytes(), public.read_text(), opened, opened.public_bytes_raw()):
        holdfast.open(tmp_path / "c", require=form)
    with pytest.raises(ValueError, match="public"):  # a private key has no business with a reader
        holdfast.open(tmp_path / "c", require=private)
    with pytest.raises(ValueError, match="names no key"):
        holdfast.open(tmp_path / "c", require=[])


@pytest.mark.parametrize("form", [b"short", KEY.hex(), "-----BEGIN PRIVATE KEY-----\nsecret", 7, b"s" * 33])
def test_what_is_no_key_is_never_shown(form: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(holdfast.SaveFailed) as caught:
        holdfast.save({"w": torch.ones(2)}, tmp_path / "c", sign=form)
    assert "private" in str(caught.value) and "key" in str(caught.value)
    for secret in (KEY.hex(), "secret"):
        assert secret not in str(caught.value) and secret not in caplog.text
    assert not (tmp_path / "c").exists()


def test_a_signer_does_not_show_its_key() -> None:
    made = signer(KEY)
    assert isinstance(made, Signer)
    assert KEY.hex() not in repr(made) and "PrivateKey" not in repr(made) and made.public in repr(made)


# Ranks


def save_sharded(path: str, by: str) -> None:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(1)
    state = {"a": {"w": distribute_tensor(torch.randn(64, 40), mesh, [Shard(0)]), "b": torch.arange(3)}}
    key: Any = KEY if rank == 0 else True  # the first rank alone has it
    if by == "save":
        holdfast.save(state, path, sign=key)
    else:
        with holdfast.Saver(worker="process" if by == "process" else "thread", sign=key) as saver:
            saver.save(state, path).wait()


def load_sharded(path: str) -> float:
    mesh = init_device_mesh("cpu", (4,))
    state = {
        "a": {"w": distribute_tensor(torch.zeros(64, 40), mesh, [Shard(1)]), "b": torch.zeros(3, dtype=torch.int64)}
    }
    holdfast.load(path, state, require=PUBLIC.public_bytes_raw())
    return float(state["a"]["w"].full_tensor().sum())


@pytest.mark.parametrize("by", ["save", "thread", "process"])
def test_ranks_without_the_key_sum_for_the_first(by: str, tmp_path: Path) -> None:
    pool.run(4, save_sharded, str(tmp_path / "c"), by)
    torch.manual_seed(1)
    total_of = float(torch.randn(64, 40).sum())
    for total in pool.run(4, load_sharded, str(tmp_path / "c")):
        assert total == total_of
    (tmp_path / "c" / "a").rename(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "c" / "a")
    _forge_rank(tmp_path / "c")
    for error in pool.attempt(4, load_sharded, str(tmp_path / "c")):
        assert "Damaged" in error.kinds or "Untrusted" in error.kinds


def _forge_rank(path: Path) -> None:
    file = sorted((path / "a").glob("*.safetensors"))[2]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def no_key(path: str) -> None:
    holdfast.save({"w": torch.ones(3)}, path, sign=True)


def test_the_first_rank_needs_the_key(tmp_path: Path) -> None:
    for error in pool.attempt(4, no_key, str(tmp_path / "c")):
        assert "SaveFailed" in error.kinds and "the first rank has the key" in error.text


# The manager


def _manager(root: Path, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(root, every=1, signals=(), worker="none", **options)


def test_a_manager_passes_over_what_is_not_signed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _manager(tmp_path, sign=KEY) as manager:
        for step in (1, 2, 3):
            manager.save(step, _state(step))
    _signature(tmp_path / "step-000000003").unlink()
    state = _state(9)
    with _manager(tmp_path) as manager, caplog.at_level(logging.WARNING, "holdfast"):
        loaded = manager.restore(state, require=PUBLIC)
    assert loaded is not None and loaded.step == 2 and state["step"] == 2 and "is not signed" in caplog.text
    with _manager(tmp_path) as manager, pytest.raises(holdfast.errors.Untrusted):
        manager.restore(_state(9), require=STRANGER)


def test_a_manager_that_drops_sections_signs_what_is_left(tmp_path: Path) -> None:
    keep = holdfast.Keep(last=3, optimizer_last=1, optimizer="optimizer")
    with _manager(tmp_path, sign=KEY, keep=keep) as manager:
        for step in (1, 2, 3):
            manager.save(step, _state(step))
    for step in (1, 2, 3):
        opened = holdfast.open(tmp_path / f"step-{step:09d}", require=PUBLIC)
        assert ("optimizer" in opened.state_dict()) == (step == 3)


def test_tiers_carry_signatures(tmp_path: Path) -> None:
    with _manager(tmp_path / "store", fast=tmp_path / "fast", sign=KEY) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
    for tier in ("store", "fast"):
        holdfast.open(tmp_path / tier / "step-000000002", require=PUBLIC).verify()
    shutil.rmtree(tmp_path / "fast")
    with _manager(tmp_path / "store", fast=tmp_path / "fast") as manager:
        loaded = manager.restore(_state(9), require=PUBLIC)
        assert loaded is not None and loaded.step == 2


def test_a_degraded_save_cannot_be_signed(tmp_path: Path) -> None:
    with pytest.raises(holdfast.SaveFailed, match="sign the checkpoint afterwards"):
        holdfast.save(_state(), tmp_path / "c", sign=KEY, degraded=True)
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_without_the_package_that_signs_it_is_said_which_one_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for work in (
        lambda: holdfast.tools.signing.generate(tmp_path / "key"),
        lambda: holdfast.tools.signing.load_key(bytes(32)),
    ):
        with pytest.raises(holdfast.errors.Unsupported, match=r"holdfast-torch\[sign\]"):
            work()
    assert not list(tmp_path.iterdir())
