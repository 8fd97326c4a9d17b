"""Files that steps share: they stay as long as a committed step needs them, and not longer.

Steps that cite are made by hand (`tests.citing`), with links, without links, and in a store.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import Keep
from holdfast.commit.commit import commit
from holdfast.commit.folder import delete_checkpoint, delete_checkpoints, sweep_beside, sweep_dead
from holdfast.commit.reused import Reuses, reused_in
from holdfast.formats.own import read_manifest
from holdfast.ondisk import manifest
from holdfast.policies.incremental import reuse
from holdfast.run.keep import Kept
from holdfast.run.retention import KeptSteps as Steps
from holdfast.run.whole import fault_of
from holdfast.storage import storage
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace
from holdfast.testing import Failing, Memory
from tests.citing import SECTIONS, is_state, needed, save_on, state_of
from tests.marks import examples

NAME = "step-{step}"


def old() -> Memory:
    """A store in which nothing is young: what no manifest names is a dead save's."""
    return Memory(clock=lambda: time.time() - 7 * 3600)


@pytest.fixture(params=["links", "cited", "store"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return StorePlace(old(), "run") if request.param == "store" else tmp_path / request.param


def linking(root: Place) -> bool:
    return isinstance(root, Path) and root.name == "links"


def chain(root: Place) -> dict[int, dict[str, Any]]:
    """Three steps: 2 has the embedding and the head of 1, 3 the embedding of 1 and the model of 2."""
    states = {1: state_of(1), 2: state_of(2, model=1, optimizer=1), 3: state_of(3, model=1, optimizer=2, head=1)}
    for step, state in states.items():
        base = root / f"step-{step - 1}" if step > 1 else None
        save_on(state, root / f"step-{step}", base, links=linking(root))
    return states


def files(root: Place) -> set[str]:
    return set(root.files_below())


def retire(steps: Steps, *kept: int) -> None:
    steps.retire(Kept(frozenset(kept), frozenset(kept)), 1000)


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 1, 3), (2, 3, 1), (1, 3, 2), (3, 1, 2)])
def test_any_step_goes_at_any_time(order: tuple[int, ...], root: Place) -> None:
    states = chain(root)
    steps = Steps(root, NAME)
    if not linking(root):
        assert Reuses(root).by(["step-3"]).keys() == {"step-1", "step-2"}
    for step in order:
        del states[step]
        retire(steps, *states)
        assert list(steps.committed()) == sorted(states) and files(root) == needed(root)
        newest = steps.newest()
        assert (None if newest is None else newest.name) == (f"step-{max(states)}" if states else None)
        for left, state in states.items():
            is_state(root / f"step-{left}", state)
    assert not files(root) and not root.folder_names()


def test_several_go_at_once(root: Place) -> None:
    states = chain(root)
    retire(Steps(root, NAME), 3)
    is_state(root / "step-3", states[3])
    assert files(root) == needed(root)
    retire(Steps(root, NAME))
    assert not files(root)


def test_a_single_checkpoint_is_deleted_alike(root: Place) -> None:
    states = chain(root)
    for step in (2, 1, 3):
        delete_checkpoint(root / f"step-{step}")
        del states[step]
        assert files(root) == needed(root)
        for left, state in states.items():
            is_state(root / f"step-{left}", state)


def test_a_checkpoint_that_is_no_step_counts_too(tmp_path: Path) -> None:
    root = tmp_path
    states = chain(root)
    save_on(states[3], root / "best", root / "step-3")
    steps = Steps(root, NAME)
    retire(steps)
    is_state(root / "best", states[3])
    assert files(root) == needed(root)
    delete_checkpoint(root / "best")
    assert not files(root)


def test_sweeps_spare_what_is_cited(root: Place) -> None:
    states = chain(root)
    steps = Steps(root, NAME)
    retire(steps, 3)
    stray = "model/00000-of-00001.0123456789abcdef.safetensors"
    for name in ("step-1", "step-2", "step-3"):
        (root / name / "model").make_folder()
        (root / name / stray).write_small(b"what a killed save left")
    sweep_dead(root / "step-1")
    sweep_beside(root / "step-3", read_manifest(root / "step-3"))
    Steps(root, NAME).clean(())
    assert files(root) == needed(root)
    is_state(root / "step-3", states[3])


def test_a_step_is_saved_again_where_cited_files_lie(root: Place) -> None:
    states = chain(root)
    steps = Steps(root, NAME)
    retire(steps, 1, 3)
    (root / "step-2" / "parts").make_folder()
    (root / "step-2" / "parts" / "00000.0123456789abcdef.json").write_small(b"a dead save's")
    again = state_of(2, head=7)
    save_on(again, root / "step-2", root / "step-1", links=linking(root))
    steps.renewed(2)
    assert files(root) == needed(root), "what was in the way is gone"
    for step, state in {**states, 2: again}.items():
        is_state(root / f"step-{step}", state)
    retire(steps, 2)
    is_state(root / "step-2", again)
    retire(steps)
    assert not files(root)


def test_overwriting_a_cited_checkpoint(root: Place) -> None:
    states = chain(root)
    states[1] = state_of(1, embedding=5, model=5)
    holdfast.save(states[1], root / "step-1", overwrite=True)
    states[3] = state_of(3, head=9)
    save_on(states[3], root / "step-3", root / "step-2", links=linking(root), overwrite=True)
    for step, state in states.items():
        is_state(root / f"step-{step}", state)
    steps = Steps(root, NAME)
    retire(steps, 1, 3)
    steps.clean(())
    assert files(root) == needed(root)
    retire(steps)
    assert not files(root)


def test_a_held_step_stays_whole(root: Place) -> None:
    states = chain(root)
    steps = Steps(root, NAME)
    assert steps.hold(root / "step-1") and steps.hold(root / "step-1") and steps.hold(root / "step-2")
    steps.retire(Kept(frozenset({2, 3}), frozenset({3}), "optim*"), 3)
    for step, state in states.items():
        is_state(root / f"step-{step}", state)
    steps.free(root / "step-1")
    retire(steps, 2, 3)
    is_state(root / "step-1", states[1])
    steps.free(root / "step-1")
    retire(steps, 2, 3)
    assert list(steps.committed()) == [2, 3]


def test_what_is_on_its_way_out_cannot_be_held(tmp_path: Path) -> None:
    chain(tmp_path)
    steps, told = Steps(tmp_path, NAME), []

    def deleting(call: disk.Call, do: Callable[[], Any]) -> Any:
        if call.verb == "delete":
            told.append((steps.hold(tmp_path / "step-1"), steps.hold(tmp_path / "step-3")))
        return do()

    with disk.hooked(deleting):
        retire(steps, 2, 3)
    assert told and set(told) == {(False, True)}
    assert steps.hold(tmp_path / "step-1"), "there is nothing, but nothing is on its way out either"


# Deleted by hand


@pytest.mark.parametrize("kind", ["cited", "store"])
def test_what_was_deleted_by_hand_is_told(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root: Place = StorePlace(old(), "run") if kind == "store" else tmp_path
    states = chain(root)
    if isinstance(root, StorePlace):
        storage.delete(*(root / "step-2" / path for path in (root / "step-2").files_below()))
    else:
        shutil.rmtree(root / "step-2")
    fault = fault_of(root / "step-3")
    assert fault is not None and all(word in fault for word in ("step-2", "model/", "missing", "step-3 reuses"))
    for call in (holdfast.open(root / "step-3").verify, lambda: holdfast.load(root / "step-3", state_of(0))):
        with pytest.raises(holdfast.errors.Damaged, match=r"model/.* is missing \(a file of step-2, .*step-3 reuses\)"):
            call()
    state = state_of(0)
    with holdfast.CheckpointManager(root, every=1, name=NAME, worker="none") as manager:
        with caplog.at_level(logging.WARNING, "holdfast"):
            loaded = manager.restore(state)
        assert loaded is not None and loaded.step == 1
        assert "step-3 is passed over" in caplog.text and "a file of step-2" in caplog.text
    is_state(root / "step-1", states[1])


def test_links_make_a_step_whole_by_itself(tmp_path: Path) -> None:
    root = tmp_path / "links"
    states = chain(root)
    shutil.rmtree(root / "step-1")
    shutil.rmtree(root / "step-2")
    is_state(root / "step-3", states[3])
    with holdfast.CheckpointManager(root, every=1, name=NAME, worker="none") as manager:
        assert manager.restore(state_of(0)) is not None
    assert files(root) == needed(root), "old save ids are no leavings"


def test_verify_reads_what_is_cited(tmp_path: Path) -> None:
    chain(tmp_path)
    cited = next((tmp_path / "step-1" / "embedding").iterdir())
    data = bytearray(cited.read_bytes())
    data[-1] ^= 1
    cited.write_bytes(data)
    for step in (1, 2, 3):
        with pytest.raises(holdfast.errors.Damaged, match="another checksum"):
            holdfast.open(tmp_path / f"step-{step}").verify()


@pytest.mark.parametrize("links", [True, False])
def test_torchs_readers_follow_citations(links: bool, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as torch_dcp

    import holdfast.dcp as dcp

    states = {1: state_of(1), 2: state_of(2, model=1)}
    save_on(states[1], tmp_path / "step-1")
    save_on(states[2], tmp_path / "step-2", tmp_path / "step-1", links=links)
    for load in (
        lambda into: dcp.load(into, checkpoint_id=tmp_path / "step-2"),
        lambda into: torch_dcp.load(into, storage_reader=dcp.Reader(tmp_path / "step-2"), no_dist=True),
    ):
        into = {name: {key: torch.zeros_like(value) for key, value in states[2][name].items()} for name in SECTIONS}
        load(into)
        for name in SECTIONS:
            assert all(torch.equal(into[name][key], states[2][name][key]) for key in into[name])


# Crashes


class Killed(BaseException):
    pass


ENDINGS = {
    "retire": lambda steps: steps.retire(Kept(frozenset({3}), frozenset({3})), 3),
    "retire the newest": lambda steps: steps.retire(Kept(frozenset({1}), frozenset({1})), 3),
    "drop": lambda steps: steps.retire(Kept(frozenset({1, 2, 3}), frozenset({3}), "optim*"), 3),
    "overwrite": lambda steps: overwrite(steps.root / "step-2"),
}


def overwrite(path: Path) -> None:
    """The end of a save whose files are all there: its commit."""
    new = path.parent.parent / "new"
    record = holdfast.save(state_of(2, head=3), new, overwrite=True).manifest
    for file in record.data_files:
        shutil.copyfile(new / file.path, path / file.path)
    commit(path, record, replaces=True)


def check(root: Place, states: dict[int, dict[str, Any]], ending: str) -> None:
    for name in root.folder_names():
        if (root / name / "manifest.json").is_file():
            step = int(name[5:])
            lost = holdfast.open(root / name).manifest.producer.get("dropped")
            new = state_of(2, head=3)
            if ending == "overwrite" and step == 2 and holdfast.open(root / name).read("head/w")[0, 0] == 33:
                is_state(root / name, new)
            else:
                is_state(root / name, states[step], (lost,) if lost else ())


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("kind", ["links", "cited"])
@pytest.mark.fast_cases("links-drop", "cited-overwrite")
def test_a_kill_at_any_moment(ending: str, kind: str, tmp_path: Path) -> None:
    n, template = 0, tmp_path / kind
    states = chain(template)
    while True:
        n += 1
        root = tmp_path / str(n) / kind
        root.parent.mkdir()
        subprocess.run(["cp", "-a", template, root], check=True)  # links stay links
        done = _until(n, lambda: ENDINGS[ending](Steps(root, NAME)))
        check(root, states, ending)
        again = Steps(root, NAME)
        if ending != "overwrite":
            ENDINGS[ending](again)
        again.clean(())
        check(root, states, ending)
        assert files(root) == needed(root), f"after operation {n}"
        retire(again)
        assert not files(root) and not root.folder_names()
        if done:
            break
    assert n > 4


def _until(nth: int, work: Callable[[], object]) -> bool:
    """Do ``work`` but die at the n-th change to what there was; whether it came to its end."""
    count = 0

    def dying(call: disk.Call, do: Callable[[], Any]) -> Any:
        nonlocal count
        count += call.verb in ("delete", "remove folder", "replace")
        if count >= nth:
            raise Killed
        return do()

    try:
        with disk.hooked(dying):
            work()
    except (Killed, holdfast.SaveFailed):
        return False
    return True


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ending", ["retire", "retire the newest", "drop"])
@pytest.mark.fast_cases("retire-before", "drop-after")
def test_a_store_that_fails_at_any_moment(ending: str, when: Any) -> None:
    n, count, template = 0, 1, old()
    states = chain(StorePlace(template, "run"))
    while n < count:
        n += 1
        store = old()
        store._files.update(template._files)
        root = StorePlace(store, "run")
        failing = Failing(store, n, times=10_000, when=when)
        ENDINGS[ending](Steps(StorePlace(failing, "run"), NAME))
        count = max(count, n if failing.count < n else n + 1)
        check(root, states, ending)
        again = Steps(root, NAME)
        ENDINGS[ending](again)
        again.clean(())
        check(root, states, ending)
        assert files(root) == needed(root), f"after request {n}"
        retire(again)
        assert not files(root)
    assert n > 4


def test_a_process_that_goes_on_sweeps_what_a_failure_left() -> None:
    store = old()
    root = StorePlace(store, "run")
    states = chain(root)

    class Stubborn(Failing):
        refuses = True

        def delete(self, keys: Any) -> None:
            if self.refuses and any(key.endswith(".safetensors") for key in keys):
                raise OSError(5, "not now")
            super().delete(keys)

    stubborn = Stubborn(store)
    steps = Steps(StorePlace(stubborn, "run"), NAME)
    steps.clean(())
    retire(steps, 3)
    assert list(steps.committed()) == [3] and files(root) > needed(root)
    stubborn.refuses = False
    steps.clean(())
    assert files(root) == needed(root)
    is_state(root / "step-3", states[3])


# Any order of anything


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "retire", "delete", "overwrite", "drop", "clean"]),
        st.integers(0, 5),
        st.sampled_from(SECTIONS),
    ),
    min_size=4,
    max_size=12,
)


@settings(max_examples=examples(6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations=OPERATIONS, remembers=st.booleans())
@pytest.mark.parametrize("kind", ["links", "cited", "store", "saved", "saved in a store"])
@pytest.mark.fast_cases("links")
def test_any_sequence(
    kind: str, operations: list[tuple[str, int, str]], remembers: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root: Place = StorePlace(old(), "run") if "store" in kind else LocalPlace(tmp_path_factory.mktemp("any")) / kind
    steps, links, versions, number = Steps(root, NAME), kind == "links", dict.fromkeys(SECTIONS, 0), 0
    states: dict[int, dict[str, Any]] = {}
    lost: dict[int, tuple[str, ...]] = {}
    for what, which, section in [("save", 0, "model"), *operations]:
        if not remembers:
            steps = Steps(root, NAME)
        at = sorted(states)[which % len(states)] if states else None
        if what in ("save", "overwrite"):
            versions[section] += 1
            target = at if what == "overwrite" and at is not None else (number := number + 1)
            base = root / f"step-{max(states)}" if states and max(states) != target else None
            states[target], lost[target] = state_of(target, **versions), ()
            path = root / f"step-{target}"
            if kind.startswith("saved"):  # as users do
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(reuse, "SMALLEST", 0)
                    holdfast.save(states[target], path, base=base, overwrite=what == "overwrite")
            else:
                save_on(states[target], path, base, links=links, overwrite=what == "overwrite")
            steps.renewed(target)
        elif at is None:
            continue
        elif what == "retire":
            del states[at]
            retire(steps, *states)
        elif what == "delete":
            del states[at]
            delete_checkpoint(root / f"step-{at}")
        elif what == "drop":
            holdfast.tools.drop(root / f"step-{at}", "optimizer")
            lost[at] = ("optimizer",)
        else:
            steps.clean(())
        for step, state in states.items():
            is_state(root / f"step-{step}", state, lost[step])
    Steps(root, NAME).clean(())
    assert files(root) == needed(root)
    for step in list(states):
        del states[step]
        retire(Steps(root, NAME), *states)
    assert not files(root) and not root.folder_names()


# What it costs


class Counting(Memory):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, str]] = []

    def list(self, prefix: str, *, deep: bool) -> Any:
        self.asked.append(("list", prefix))
        return super().list(prefix, deep=deep)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Any:
        self.asked.append(("get", key))
        return super().get(key, begin, end)


def test_each_manifest_is_read_once_to_see_what_it_cites() -> None:
    store = Counting()
    root = StorePlace(store, "run")
    steps, keep = Steps(root, NAME), Keep(last=2, every=5)
    costs = []
    for step in range(1, 31):
        base = root / f"step-{step - 1}" if step > 1 else None
        save_on(state_of(step, model=step, optimizer=step), root / f"step-{step}", base)
        steps.clean(())
        store.asked.clear()
        steps.sweep(keep, step, {root / f"step-{step}"})
        costs.append(len(store.asked))
    assert list(steps.committed()) == [5, 10, 15, 20, 25, 29, 30]
    # Once more steps are kept than are asked one by one, one listing of all tells which of them hold a manifest.
    assert max(costs[3:]) <= 10, costs
    is_state(root / "step-30", state_of(30, model=30, optimizer=30))


def test_other_peoples_files_are_not_cited_nor_deleted(tmp_path: Path) -> None:
    chain(tmp_path)
    target = tmp_path / "step-3" / "manifest.json"
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine").mkdir()
    (tmp_path / "notes" / "mine" / "text").write_text("not a data file of ours")
    record = read_manifest(tmp_path / "step-3")
    rows = [*record.files, ["../notes/mine/text", 100, 50, "0" * 32, record.save]]
    target.write_bytes(manifest.encode(msgspec.structs.replace(record, files=rows)))
    assert reused_in(tmp_path / "notes") == {"mine/text"}
    delete_checkpoint(tmp_path / "step-3")
    assert (tmp_path / "notes" / "mine" / "text").exists()


def test_nothing_is_deleted_through_a_link(tmp_path: Path) -> None:
    root = tmp_path / "run"
    chain(root)
    retire(Steps(root, NAME), 2, 3)
    (root / "step-1").rename(tmp_path / "elsewhere")
    (root / "step-1").symlink_to(tmp_path / "elsewhere")
    there = (tmp_path / "elsewhere").files_below()
    with pytest.raises(holdfast.errors.Damaged, match="leads out"):  # and nothing is read through one either
        holdfast.open(root / "step-3").state_dict()
    delete_checkpoint(root / "step-2")
    delete_checkpoint(root / "step-3")
    assert there and (tmp_path / "elsewhere").files_below() == there


def test_what_a_newer_holdfast_wrote_is_not_guessed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain(tmp_path)
    target = tmp_path / "step-3" / "manifest.json"
    target.write_bytes(target.read_bytes().replace(b'"version":1', b'"version":7'))
    before = files(tmp_path)
    with caplog.at_level(logging.WARNING, "holdfast"):
        retire(Steps(tmp_path, NAME), 3)
    assert "version 7" in caplog.text and files(tmp_path) == before


def test_a_damaged_manifest_keeps_nothing_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain(tmp_path)
    target = tmp_path / "step-3" / "manifest.json"
    target.write_bytes(target.read_bytes().replace(b'"step":3', b'"step":9'))
    with caplog.at_level(logging.WARNING, "holdfast"):
        retire(Steps(tmp_path, NAME), 3)
    assert "step-3 reuses is not spared" in caplog.text
    assert not (tmp_path / "step-1").exists()


def test_two_may_delete_the_same_steps(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        holdfast.save({"w": torch.ones(9)}, tmp_path / f"step-{step}")
    delete_checkpoint(tmp_path / "step-1")
    delete_checkpoints(tmp_path, ["step-1", "step-2"], {}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
