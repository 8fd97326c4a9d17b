"""The recorder misses nothing, and the model of a file system says what it should."""

from __future__ import annotations

import os

import pytest

from holdfast.storage.local import disk, durable
from tests.crash import operations
from tests.crash.model import Trace, Tree
from tests.crash.profiles import PROFILES, Limits, states
from tests.crash.record import recorded
from tests.crash.runs import folder


@pytest.mark.parametrize("name", operations.OPERATIONS)
def test_a_replay_is_what_the_run_left(name: str) -> None:
    """Byte for byte, name for name, link for link: so no call that changes something went unseen."""
    trace = operations.OPERATIONS[name]().trace
    again = trace.replay().tree()
    assert trace.left is not None and len(trace.ops) > 5
    assert again.folders == trace.left.folders and again.contents() == trace.left.contents()
    assert links(again) == links(trace.left)


def links(tree: Tree) -> set[frozenset[str]]:
    found: dict[int, set[str]] = {}
    for path, (number, _) in tree.files.items():
        found.setdefault(number, set()).add(path)
    return {frozenset(paths) for paths in found.values()}


def trees(trace: Trace, profile: str, cut: int) -> set[tuple[tuple[str, bytes], ...]]:
    """All that may be there after so many operations, as far as this profile goes."""
    limits = Limits(1 << 12, 64, 1 << 12)
    return {
        tuple(state.tree.contents().items()) for state in states(trace, PROFILES[profile], limits) if state.cut == cut
    }


def test_an_unsynced_name_and_unsynced_bytes() -> None:
    with folder() as root, recorded(root) as seen:
        fd = disk.open(root / "a", os.O_WRONLY | os.O_CREAT)
        disk.write_all(fd, b"x" * 600, 0, root / "a")
        os.close(fd)
    nothing, empty, whole = (), (("a", b""),), (("a", b"x" * 600),)
    sector, holes = (("a", b"x" * 512),), (("a", bytes(512) + b"x" * 88),)
    assert trees(seen.trace, "ext4-ordered", 2) == {nothing, empty, sector, whole}
    assert {nothing, empty, sector, whole, holes} <= trees(seen.trace, "weak", 2)
    assert holes in trees(seen.trace, "xfs", 2)
    assert trees(seen.trace, "nfs", 2) == {empty, whole}
    stale = [tree[0][1] for tree in trees(seen.trace, "ext4-writeback", 2) if tree and len(tree[0][1]) == 600]
    assert any(data != b"x" * 600 and any(data) for data in stale), "what the disk held before may be seen"


def test_what_is_synced_stays() -> None:
    with folder() as root, recorded(root) as seen:
        durable.write_synced(str(root / "a"), b"one")
        disk.sync_folder(root)
        disk.replace(root / "a", root / "b")
        disk.sync_folder(root)
    end = len(seen.trace.ops)
    for profile in PROFILES:
        assert trees(seen.trace, profile, end) == {(("b", b"one"),)}
        before = {(("a", b"one"),), (("b", b"one"),)} if profile != "nfs" else {(("b", b"one"),)}
        assert trees(seen.trace, profile, end - 1) == before


def test_a_sync_takes_along_what_its_file_system_promises() -> None:
    """An older change of a name elsewhere: durable with a journal, open on others."""
    with folder() as root, recorded(root) as seen:
        for name in ("one", "two"):
            disk.make_folder(root / name)
        disk.sync_folder(root)
        durable.write_synced(str(root / "one" / "a"), b"a")
        durable.write_synced(str(root / "two" / "b"), b"b")
        disk.sync_folder(root / "two")
    end = len(seen.trace.ops)
    both, second = (("one/a", b"a"), ("two/b", b"b")), (("two/b", b"b"),)
    for profile in ("ext4-ordered", "ext4-writeback", "xfs", "btrfs", "nfs"):
        assert trees(seen.trace, profile, end) == {both}
    assert trees(seen.trace, "weak", end) == {both, second}


def test_changes_of_names_keep_their_order_in_a_journal() -> None:
    with folder() as root, recorded(root) as seen:
        for name in ("a", "b"):
            durable.write_synced(str(root / name), name.encode())
        disk.sync_folder(root)
        disk.delete(root / "a")
        disk.delete(root / "b")
    end = len(seen.trace.ops)
    both, second, first, nothing = (("a", b"a"), ("b", b"b")), (("b", b"b"),), (("a", b"a"),), ()
    for profile in ("ext4-ordered", "xfs", "btrfs"):
        assert trees(seen.trace, profile, end) == {both, second, nothing}
    assert trees(seen.trace, "weak", end) == {both, second, first, nothing}
    assert trees(seen.trace, "nfs", end) == {nothing}
