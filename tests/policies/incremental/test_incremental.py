"""Incremental saves: what is as it was is cited and not written, and every step restores exactly what was saved."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.commit import settle
from holdfast.ondisk.manifest import Manifest
from holdfast.policies.incremental import reuse as module
from holdfast.storage.store_place import StorePlace
from holdfast.testing import Failing, Memory
from holdfast.write import write
from tests import format_reader, pool
from tests.marks import examples
from tests.programs import run_code

KB = 256
"""Elements of float32 in a KiB."""


def _tensor(seed: int, kib: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randint(-100, 100, (kib, KB), generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def _state(step: int, frozen: int = 6) -> dict[str, Any]:
    """Of 99 parts frozen and one that trains, like LoRA."""
    model = {f"layer.{i}": _tensor(i) for i in range(frozen)}
    return {"model": {**model, "lora": _tensor(1000 + step, 4)}, "optim": {"m": _tensor(2000 + step, 4)}, "step": step}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping):
        return isinstance(other, Mapping) and set(one) == set(other) and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, torch.Tensor):
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    return bool(one == other)


def _is(path: Path | Any, state: Mapping[str, Any], *, reader: bool = True) -> Manifest:
    """The checkpoint is whole, and is exactly this state; a reader of the bare format finds the same."""
    checkpoint = holdfast.open(path)
    checkpoint.verify()
    assert _equal(checkpoint.state_dict(), state)
    if reader:
        assert _equal(format_reader.read(path).state, state)
    return checkpoint.manifest


def _own(record: Manifest) -> int:
    """Bytes that this save wrote."""
    return sum(file.bytes for file in record.data_files if file.save is None)


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_what_is_as_it_was_is_linked_and_not_written(tmp_path: Path) -> None:
    first = holdfast.save(_state(1, 30), tmp_path / "1")
    second = holdfast.save(_state(2, 30), tmp_path / "2", base=first)
    record = _is(tmp_path / "2", _state(2, 30))
    borrowed = [file for file in record.data_files if file.save is not None]
    assert [file.save for file in borrowed] == [first.manifest.save] and ".." not in borrowed[0].path
    assert os.path.samefile(tmp_path / "2" / borrowed[0].path, tmp_path / "1" / borrowed[0].path)
    assert _own(second.manifest) < 0.015 * first.nbytes + 2 * 4096, "what changed, and two headers"
    shutil.rmtree(tmp_path / "1")
    _is(tmp_path / "2", _state(2, 30))


@pytest.mark.parametrize("given", ["path", "text", "checkpoint", "opened"])
def test_the_base_can_be_named_in_every_way(given: str, tmp_path: Path) -> None:
    first = holdfast.save(_state(1), tmp_path / "1")
    path = tmp_path / "1"
    named = {"path": path, "text": str(path), "checkpoint": first, "opened": holdfast.open(path)}
    second = holdfast.save(_state(2), tmp_path / "2", base=named[given])
    assert _own(second.manifest) < 0.2 * first.nbytes
    _is(tmp_path / "2", _state(2))


def test_a_section_without_changes_has_no_file_of_its_own(tmp_path: Path) -> None:
    same = {"model": {"w": _tensor(1), "none": torch.empty(0, 3)}, "step": 1}
    holdfast.save(same, tmp_path / "1")
    second = holdfast.save({**same, "step": 2}, tmp_path / "2", base=tmp_path / "1")
    record = _is(tmp_path / "2", {**same, "step": 2})
    assert len(record.data_files) == 1 and record.data_files[0].save is not None and second.step == 2
    third = holdfast.save({**same, "step": 3}, tmp_path / "3", base=second)
    assert _own(third.manifest) == 0
    _is(tmp_path / "3", {**same, "step": 3})


def test_values_that_differ_by_rank_are_written_each_time(tmp_path: Path) -> None:
    def state(step: int) -> dict[str, Any]:
        mine = holdfast.PerRank({"n": step, "t": torch.full((3,), step)})
        return {"model": {"w": _tensor(1), "mine": mine}, "step": step}

    first = holdfast.save(state(1), tmp_path / "1")
    second = holdfast.save(state(2), tmp_path / "2", base=first)
    second.verify()
    assert second.per_rank("model/mine", 0)["n"] == 2 and format_reader.read(tmp_path / "2").per_rank["model/mine"]
    assert len(second.manifest.data_files) == 2


CHANGES = {
    "renamed": lambda m: {**{f"{k}.new": v for k, v in m.items()}},
    "new": lambda m: {**m, "more": _tensor(77)},
    "removed": lambda m: {k: v for k, v in m.items() if k != "layer.2"},
    "another shape": lambda m: {**m, "layer.0": m["layer.0"].view(-1)},
    "transposed": lambda m: {**m, "layer.0": m["layer.0"].t()},
    "another type": lambda m: {**m, "layer.0": m["layer.0"].to(torch.bfloat16)},
    "other bits of the same size": lambda m: {**m, "layer.0": m["layer.0"].view(torch.int32)},
    "all changed": lambda m: {k: v + 1 for k, v in m.items()},
    "most changed": lambda m: {k: v + (k != "layer.1") for k, v in m.items()},
    "less than half changed": lambda m: {k: v + (k in ("layer.1", "layer.2")) for k, v in m.items()},
    "one bit": lambda m: {**m, "layer.3": _flipped(m["layer.3"])},
    "scattered in memory": lambda m: {k: v.t().contiguous().t() for k, v in m.items()},
    "tied": lambda m: {**m, "tied": m["layer.0"]},
}
CITED = {"new": 6, "removed": 5, "less than half changed": 4, "one bit": 5, "scattered in memory": 6, "tied": 6}
CITED |= dict.fromkeys(["another shape", "transposed", "another type", "other bits of the same size"], 5)


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1).view(torch.uint8)[-1] ^= 1
    return changed


@pytest.mark.parametrize("change", CHANGES)
def test_changes(change: str, tmp_path: Path) -> None:
    before = {f"layer.{i}": _tensor(i) for i in range(6)}
    after = {"model": CHANGES[change](before)}
    holdfast.save({"model": before}, tmp_path / "1")
    holdfast.save(after, tmp_path / "2", base=tmp_path / "1")
    record = _is(tmp_path / "2", after)
    borrowed = {index for index, file in enumerate(record.data_files) if file.save is not None}
    cited = [name for name, tensor in record.tensors.items() if {int(tensor.files)} & borrowed]
    assert len(cited) == CITED.get(change, 0), cited
    _is(tmp_path / "1", {"model": before})


@pytest.mark.parametrize("links", [True, False])
def test_a_long_chain(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What little changes with each save is found again later, from where it lies; dead bytes stay few."""
    if not links:
        _forbid_links(monkeypatch, errno.EMLINK)
    state = {"model": {f"t{i}": _tensor(i, 16) for i in range(20)}, "step": 0}
    states, previous = [], None
    for step in range(20):
        state = {"model": {**state["model"], f"t{step}": _tensor(100 + step, 16)}, "step": step}
        states.append(state)
        previous = holdfast.save(state, tmp_path / str(step), base=previous)
        dead = sum(file.bytes - file.header_bytes for file in previous.manifest.data_files) - 20 * 16 * 1024
        assert 0 <= dead <= 20 * 16 * 1024
    for step, one in enumerate(states):
        record = _is(tmp_path / str(step), one)
        if not links:
            named = {file.path.split("/")[1]: file.save for file in record.data_files if file.path.startswith("../")}
            assert all(holdfast.open(tmp_path / name).manifest.save == save for name, save in named.items())
    if links:
        for step in range(0, 20, 2):
            shutil.rmtree(tmp_path / str(step))
        for step in range(1, 20, 2):
            _is(tmp_path / str(step), states[step])


def _forbid_links(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = os.link

    def link(source: Any, target: Any, **more: Any) -> None:
        if str(target).endswith(".safetensors"):
            raise OSError(number, os.strerror(number), str(source), None, str(target))
        real(source, target, **more)

    monkeypatch.setattr(module.os, "link", link)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS])
def test_where_there_are_no_hard_links_files_are_cited_where_they_lie(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forbid_links(monkeypatch, number)
    first = holdfast.save(_state(1), tmp_path / "1")
    second = holdfast.save(_state(2), tmp_path / "2", base=first)
    third = holdfast.save(_state(3), tmp_path / "3", base=second)
    paths = [file.path for file in third.manifest.data_files if file.save is not None]
    assert paths == [f"../1/{first.manifest.data_files[0].path}"], "from the folder that holds it"
    for step in (1, 2, 3):
        _is(tmp_path / str(step), _state(step))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOSPC, errno.EIO])
def test_a_link_that_fails_otherwise_costs_a_copy(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = holdfast.save(_state(1), tmp_path / "1")
    _forbid_links(monkeypatch, number)
    second = holdfast.save(_state(2), tmp_path / "2", base=first)
    assert all(file.save is None for file in second.manifest.data_files)
    _is(tmp_path / "2", _state(2))


# A base that is not what it should be


def _bases(root: Path) -> dict[str, Any]:
    torch.save({"w": torch.ones(3)}, root / "foreign.pt")
    holdfast.save(_state(1), root / "elsewhere" / "1")
    (root / "unfinished").mkdir()
    holdfast.save(_state(1), root / "damaged")
    text = (root / "damaged" / "manifest.json").read_bytes()
    (root / "damaged" / "manifest.json").write_bytes(text.replace(b"layer.3", b"layer.9"))
    return {
        "missing": root / "missing", "unfinished": root / "unfinished", "elsewhere": root / "elsewhere" / "1",
        "itself": root / "2", "damaged": root / "damaged", "foreign": holdfast.open(root / "foreign.pt"),
        "a foreign path": root / "foreign.pt",
    }  # fmt: skip


@pytest.mark.parametrize(
    "kind, told, error",
    [
        ("missing", "cannot be a base: it is no committed checkpoint", FileNotFoundError),
        ("unfinished", "cannot be a base: it is no committed checkpoint", FileNotFoundError),
        ("a foreign path", "cannot be a base: it is no committed checkpoint", FileNotFoundError),
        ("foreign", "only a checkpoint of holdfast can be a base", TypeError),
        ("elsewhere", "does not lie beside", ValueError),
        ("itself", "cannot be its own base", ValueError),
        ("damaged", "is altered or truncated", ValueError),
    ],
)
def test_a_base_that_cannot_be_one(kind: str, told: str, error: type[Exception], tmp_path: Path) -> None:
    base = _bases(tmp_path)[kind]
    with pytest.raises(holdfast.SaveFailed, match=told) as caught:
        holdfast.save(_state(2), tmp_path / "2", base=base)
    assert isinstance(caught.value, error) and not (tmp_path / "2").exists()


def _damage_file(folder: Path, how: str) -> None:
    path = next((folder / "model").glob("*.safetensors"))
    if how == "gone":
        path.unlink()
    elif how == "cut":
        os.truncate(path, path.stat().st_size - 1)
    else:
        with path.open("r+b") as file:
            file.seek(100)
            file.write(b"\0")


@pytest.mark.parametrize("how", ["gone", "cut", "another header"])
def test_a_damaged_file_of_the_base_is_not_borrowed(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = holdfast.save(_state(1), tmp_path / "1")
    _damage_file(tmp_path / "1", how)
    second = holdfast.save(_state(2), tmp_path / "2", base=first)
    assert all(file.save is None for file in second.manifest.data_files) and "written again" in caplog.text
    _is(tmp_path / "2", _state(2))


def test_a_cited_file_that_goes_before_the_commit_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _forbid_links(monkeypatch, errno.EXDEV)
    holdfast.save(_state(1), tmp_path / "1")
    real = write.Writing.finish

    def finish(self: Any) -> None:
        real(self)
        shutil.rmtree(tmp_path / "1")

    monkeypatch.setattr(write.Writing, "finish", finish)
    with pytest.raises(holdfast.SaveFailed, match="which this save was to reuse, is gone"):
        holdfast.save(_state(2), tmp_path / "2", base=tmp_path / "1")
    assert not (tmp_path / "2").exists()


@pytest.mark.parametrize("links", [True, False])
def test_overwriting_what_the_base_cites(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        _forbid_links(monkeypatch, errno.EXDEV)
    holdfast.save(_state(1), tmp_path / "1")
    holdfast.save(_state(2), tmp_path / "2", base=tmp_path / "1")
    holdfast.save(_state(3), tmp_path / "1", base=tmp_path / "2", overwrite=True)
    _is(tmp_path / "1", _state(3))
    _is(tmp_path / "2", _state(2))
    holdfast.save(_state(4), tmp_path / "2", base=tmp_path / "1", overwrite=True)
    _is(tmp_path / "1", _state(3))
    _is(tmp_path / "2", _state(4))


def test_a_failed_overwrite_leaves_the_links_of_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save(_state(1), tmp_path / "1")
    holdfast.save(_state(2), tmp_path / "2", base=tmp_path / "1")
    before = _names(tmp_path / "2")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(settle, "commit", fails)
    with pytest.raises(holdfast.SaveFailed):
        holdfast.save(_state(3), tmp_path / "2", base=tmp_path / "1", overwrite=True)
    assert _names(tmp_path / "2") == before
    _is(tmp_path / "2", _state(2))


# Whatever fails


def test_every_call_of_the_system_fails_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each either nothing of the new step is there or all of it; the base is never touched."""
    first = holdfast.save(_state(1), tmp_path / "1")
    kept = {path: (tmp_path / "1" / path).read_bytes() for path in _names(tmp_path / "1")}
    left = [0]
    for name in ("link", "fsync", "open", "mkdir", "unlink", "stat", "samefile"):
        owner: Any = os.path if name == "samefile" else os
        real = getattr(owner, name)

        def failing(*args: Any, real: Any = real, **more: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(*args, **more)

        monkeypatch.setattr(owner, name, failing)
    failed = saved = nth = 0
    while True:
        nth += 1
        left[0] = nth
        try:
            holdfast.save(_state(2), tmp_path / "2", base=first)
        except holdfast.SaveFailed:
            failed += 1
        passed = left[0] > 0
        left[0] = -1
        if (tmp_path / "2" / "manifest.json").exists():
            _is(tmp_path / "2", _state(2))
            saved += 1
        assert {path: (tmp_path / "1" / path).read_bytes() for path in _names(tmp_path / "1")} == kept
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        if passed:
            break
    assert failed >= 5 and saved >= 2, (failed, saved, nth)


@pytest.mark.parametrize("when", ["before", "after"])
def test_every_operation_of_a_store_fails_in_turn(when: str) -> None:
    nth = 0
    while True:
        nth += 1
        store = Memory()
        first = holdfast.save(_state(1), StorePlace(store, "run/1"))
        failing = Failing(store, nth, when=when)
        with suppress(holdfast.SaveFailed):
            holdfast.save(_state(2), StorePlace(failing, "run/2"), base=StorePlace(failing, "run/1"))
        _is(first.path, _state(1), reader=False)
        if store.size("run/2/manifest.json") is not None:
            _is(StorePlace(store, "run/2"), _state(2), reader=False)
        if failing.count < nth:
            break
    assert nth > 5


def test_in_a_store_files_are_cited_where_they_lie() -> None:
    store = Memory()
    previous = holdfast.save(_state(0), StorePlace(store, "run/0"))
    lender = previous.manifest.data_files[0]
    for step in range(1, 4):
        previous = holdfast.save(_state(step), StorePlace(store, f"run/{step}"), base=previous)
        borrowed = [file for file in previous.manifest.data_files if file.save is not None]
        assert [file.path for file in borrowed] == [f"../0/{lender.path}"]
        into = {key: {k: torch.zeros_like(v) for k, v in _state(step)[key].items()} for key in ("model", "optim")}
        holdfast.load(StorePlace(store, f"run/{step}"), {**into, "step": 0})
        assert _equal(into["model"], _state(step)["model"])
    for step in range(4):
        _is(StorePlace(store, f"run/{step}"), _state(step), reader=False)


CRASH = """
import os, signal, sys, holdfast
from holdfast.commit import settle
from tests.policies.incremental.test_incremental import _state
root, how = sys.argv[1:]

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

holdfast.save(_state(1), f"{root}/step-000000001")
settle.commit = die
if how == "blocking":
    holdfast.save(_state(2), f"{root}/step-000000002", base=f"{root}/step-000000001")
else:
    saver = holdfast.Saver(worker="process")
    saver.save(_state(2), f"{root}/step-000000002", base=f"{root}/step-000000001").wait()
"""


@pytest.mark.parametrize("how", ["blocking", "background"])
@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_killed_between_the_links_and_the_commit(how: str, links: bool, tmp_path: Path) -> None:
    """What a blocking save leaves is swept; what a background save left can be committed late, by its parts."""
    script = CRASH
    if not links:
        script = script.replace(
            "settle.commit", "import errno; from holdfast.policies.incremental import reuse\n"
            "def _link(*_): raise OSError(errno.EXDEV, 'no')\nreuse._link = _link\nsettle.commit",
        )  # fmt: skip
    run = run_code(script, tmp_path, how)
    assert run.returncode == -signal.SIGKILL, run.stderr
    late = tmp_path / "step-000000002"
    assert not (late / "manifest.json").exists()
    into = {k: {n: torch.zeros_like(t) for n, t in v.items()} for k, v in _state(0).items() if k != "step"}
    with holdfast.CheckpointManager(tmp_path, every=1, worker="none", incremental=True, signals=()) as manager:
        loaded = manager.restore({**into, "step": 0})
        assert loaded is not None
        expected = 1 if how == "blocking" else 2
        assert loaded.step == expected and _equal(into["model"], _state(expected)["model"])
        assert late.exists() == (how == "background")
        if how == "background":
            borrowed = [file for file in _is(late, _state(2)).data_files if file.save is not None]
            assert len(borrowed) == 1 and borrowed[0].path.startswith("../") is not links
        saved = manager.save(3, {**_state(3)})
        assert _own(saved.manifest) < 0.3 * saved.nbytes
    _is(tmp_path / "step-000000003", _state(3))


# In the background, and by a manager


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_saver_cites_the_save_before(worker: Any, tmp_path: Path) -> None:
    with holdfast.Saver(worker=worker) as saver:
        saving = None
        for step in range(1, 5):
            saving = saver.save(_state(step), tmp_path / str(step), base=saving)
        assert saving is not None
        wrote = saving.wait() and saving.timing.bytes
    for step in range(1, 5):
        record = _is(tmp_path / str(step), _state(step))
        assert len([file for file in record.data_files if file.save is not None]) == (step > 1)
    assert wrote == 2 * 4 * 1024 and not list(tmp_path.rglob("parts"))


def test_memory_for_what_is_left_to_write_alone(tmp_path: Path) -> None:
    state = {"model": _state(1, frozen=40)["model"], "step": 1}
    holdfast.save(state, tmp_path / "1")
    with holdfast.Saver(worker="thread") as saver:
        saver.save({**state, "step": 2}, tmp_path / "2", base=tmp_path / "1").wait()
        assert sum(slot.nbytes for slot in saver._pool.buffers.values()) == 0
    _is(tmp_path / "2", {**state, "step": 2})


def test_a_base_that_failed_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    (tmp_path / "2").write_text("in the way")
    with holdfast.Saver(worker="thread") as saver:
        first = saver.save(_state(1), tmp_path / "1")
        second = saver.save(_state(2), tmp_path / "2", base=first)
        assert second.settled() is False
        second.hear()
        third = saver.save(_state(3), tmp_path / "3", base=second)
        third.wait()
    assert [file.save for file in _is(tmp_path / "3", _state(3)).data_files].count(first.wait().manifest.save) == 1


class _Frozen(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(512, 512).requires_grad_(False)
        self.lora = torch.nn.Linear(512, 4)


def manage(root: str, worker: str, slots: int, steps: int) -> list[Any]:
    """A run of a module whose body is frozen, restarted in its middle. What each step wrote, and what it holds."""
    wrote, states = [], []
    for begin, end in ((0, steps // 2), (steps // 2, steps)):
        torch.manual_seed(3)
        model = _Frozen()
        optimizer = torch.optim.AdamW(model.lora.parameters())
        state = {"model": model, "optimizer": optimizer, "step": 0}
        options: dict[str, Any] = {"worker": worker, "slots": slots, "signals": (), "keep": holdfast.Keep(last=3)}
        with holdfast.CheckpointManager(root, every=1, incremental=True, **options) as manager:
            loaded = manager.restore(state)
            assert (loaded.step if loaded else 0) == begin
            for step in range(begin + 1, end + 1):
                model.lora(model.body(torch.full((2, 512), float(step)))).square().sum().backward()
                optimizer.step()
                state["step"] = step
                saving = manager.step(step, state)
                assert saving is not None
                states.append({name: p.detach().clone() for name, p in model.state_dict().items()})
                wrote.append(saving)
        wrote[begin:] = [saving.timing.bytes for saving in wrote[begin:]]
        dist.barrier()  # the first rank sweeps
    same = []
    for step in sorted(manager.steps()):
        found = holdfast.open(manager._home.fast.path(step))
        found.verify()
        same.append(_equal(found.state_dict("model")["model"], states[step - 1]) or found.path)
    return [wrote, manager.steps(), same]


@pytest.mark.parametrize("worker, slots", [("none", 1), ("thread", 1), ("process", 1), ("thread", 2)])
def test_a_manager_writes_what_has_changed_alike_on_every_rank(worker: str, slots: int, tmp_path: Path) -> None:
    results = pool.run(2, manage, str(tmp_path), worker, slots, 6)
    for wrote, steps, same in results:
        assert steps == [4, 5, 6] and same == [True] * 3, "of each that is left"
        if worker != "none":  # a save that training waits for tells the bytes of the checkpoint
            later = [*wrote[slots:3], *wrote[3:]]
            assert max(later) < 0.1 * wrote[0], wrote
    for step in (4, 5, 6):
        record = holdfast.open(tmp_path / f"step-{step:09d}").manifest
        assert _own(record) < 0.3 * sum(file.bytes for file in record.data_files)
    left = {path.name.split(".")[1] for path in tmp_path.rglob("*.safetensors")}
    assert len(left) <= 6, "files of saves that nothing cites are gone"


def test_without_the_base_a_manager_saves_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with holdfast.CheckpointManager(tmp_path, every=1, incremental=True, worker="thread", signals=()) as manager:
        manager.save(1, _state(1))
        shutil.rmtree(tmp_path / "step-000000001")
        saved = manager.save(2, _state(2))
    assert _own(saved.manifest) == saved.nbytes and "its base cannot be read" in caplog.text
    _is(tmp_path / "step-000000002", _state(2))


def _sharded(rank: int, world: int, step: int) -> dict[str, Any]:
    rows = 256 // world
    full = {f"w{i}": _tensor(i, 256) for i in range(3)} | {"train": _tensor(100 + step, 256)[:, :8]}
    shards = {
        k: holdfast.Shard(v[rank * rows : (rank + 1) * rows], tuple(v.shape), (rank * rows, 0)) for k, v in full.items()
    }
    return {"model": {**shards, "replicated": _tensor(50, 256), "step": step}}


def save_sharded(root: str, step: int, base: int | None) -> None:
    named = None if base is None else f"{root}/{base}"
    holdfast.save(_sharded(dist.get_rank(), dist.get_world_size(), step), f"{root}/{step}", base=named)


def load_sharded(root: str, step: int) -> list[str]:
    rank, world = dist.get_rank(), dist.get_world_size()
    expected = _sharded(rank, world, step)["model"]
    into = {
        k: holdfast.Shard(torch.zeros_like(v.tensor), v.shape, v.offsets) if isinstance(v, holdfast.Shard) else v
        for k, v in _sharded(rank, world, 99)["model"].items()
    }
    holdfast.load(f"{root}/{step}", {"model": into})
    return [
        k for k, v in into.items() if isinstance(v, holdfast.Shard) and not torch.equal(v.tensor, expected[k].tensor)
    ]


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """Pieces that are cut otherwise are written again; what is cut alike is reused, of any writer."""
    root = str(tmp_path)
    pool.run(2, save_sharded, root, 1, None)
    pool.run(2, save_sharded, root, 2, 1)
    pool.run(4, save_sharded, root, 3, 2)
    pool.run(4, save_sharded, root, 4, 3)
    for step, share in ((1, 1.0), (2, 0.1), (3, 1.0), (4, 0.1)):
        record = holdfast.open(tmp_path / str(step)).manifest
        whole = sum(tensor.nbytes for tensor in record.tensors.values())
        own = sum(file.bytes - file.header_bytes for file in record.data_files if file.save is None)
        assert 0.5 * share * whole * (share == 1.0) <= own <= share * whole, (step, own, whole)
        format_reader.read(tmp_path / str(step))
        holdfast.open(tmp_path / str(step)).verify()
        assert not any(pool.run(4 if step < 3 else 2, load_sharded, root, step))


# Any sequence of changes


_NAMES = ["a/x", "a/y", "a/z", "b/x", "b/y", "top"]
_CHANGE = st.tuples(
    st.sampled_from(_NAMES), st.sampled_from(["set", "flip", "drop", "shape", "dtype", "tie"]), st.integers(0, 5)
)


@pytest.mark.parametrize("links", [True, False])
@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck), deadline=None)
@given(saves=st.lists(st.tuples(st.lists(_CHANGE, max_size=4), st.integers(0, 3)), min_size=2, max_size=6))
@pytest.mark.fast_cases("True")
def test_any_sequence_of_changes_and_saves(
    saves: list[Any], links: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("run")
    state: dict[str, torch.Tensor] = {name: _tensor(i, 16) for i, name in enumerate(_NAMES)}
    states: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        if not links:
            _forbid_links(patch, errno.EPERM)
        for step, (changes, back) in enumerate(saves):
            for name, how, number in changes:
                state = dict(state)
                before = state.get(name, torch.zeros(4, KB))
                if how == "set":
                    state[name] = _tensor(number, 16 * (1 + number % 2))
                elif how == "drop":
                    state.pop(name, None)
                elif how == "flip" and before.nbytes:
                    state[name] = _flipped(before)
                elif how == "shape":
                    state[name] = before.reshape(-1) if before.dim() > 1 else before.reshape(1, -1)
                elif how == "dtype":
                    state[name] = before.to([torch.float32, torch.bfloat16, torch.int8][number % 3])
                elif how == "tie":
                    state[name] = state.get(_NAMES[number], before)
            nested: dict[str, Any] = {"step": step}
            for name, tensor in state.items():
                section, _, key = name.rpartition("/")
                (nested.setdefault(section, {}) if section else nested)[key] = tensor
            base = root / str(max(step - 1 - back, 0)) if step else None
            holdfast.save(nested, root / str(step), base=base)
            states.append(nested)
    for step, nested in enumerate(states):
        _is(root / str(step), nested)
    shutil.rmtree(root)


def test_a_saver_cites_in_a_store() -> None:
    store = Memory()
    same = {"model": {"w": _tensor(1)}}
    with holdfast.Saver(worker="thread") as saver:
        saving = None
        for step in range(3):
            saving = saver.save({**same, "step": step}, StorePlace(store, f"run/{step}"), base=saving)
    for step in range(3):
        _is(StorePlace(store, f"run/{step}"), {**same, "step": step}, reader=False)
    below = [entry.key for entry in store.list("run", deep=True).files]
    assert sum(key.endswith(".safetensors") for key in below) == 1 and not any("/parts/" in key for key in below)


@pytest.mark.parametrize("links", [True, False])
def test_behind_a_fast_tier_every_step_is_whole(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        _forbid_links(monkeypatch, errno.EXDEV)
    fast, root = tmp_path / "fast", tmp_path / "root"
    options: dict[str, Any] = {"fast": fast, "worker": "thread", "incremental": True, "signals": ()}
    with holdfast.CheckpointManager(root, every=1, **options) as manager:
        for step in range(1, 5):
            manager.save(step, _state(step))
    for step in manager._home.fast.committed():
        assert step == 1 or any(f.save for f in _is(fast / f"step-{step:09d}", _state(step), reader=False).data_files)
    shutil.rmtree(fast)
    found = sorted(path.parent.name for path in root.glob("*/manifest.json"))
    assert found[-1] == "step-000000004"
    for name in found:
        _is(root / name, _state(int(name[-9:])))
