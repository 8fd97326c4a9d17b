"""One read for many, on real ranks: the same bytes as without sharing, one copy from storage, nobody left waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests import meshes, pool
from tests.golden import make
from tests.read import share_trials

SAVED = ["one process", "HSDP 2x2", "FSDP1 flat 4"]
SHARING = ["DDP 2", "HSDP 2x2", "FSDP2 x TP 2x2", "compiled DDP 3", "FSDP1 hybrid 2x2", "FSDP1 unsharded 2", "TP 2"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("meshes")
    pairs = []
    for number, layout in enumerate(SAVED):
        pair = (str(folder / f"ckpt{number}"), str(folder / f"truth{number}.pt"))
        pool.run(meshes.LAYOUTS[layout][0], meshes.save_one, layout, *pair)
        pairs.append(pair)
    return pairs


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "c"
    pool.run(4, share_trials.save_big, str(path))
    return path


@pytest.mark.parametrize("layout", [*SHARING, pytest.param("HSDP x TP 2x2x2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.slow_cases("1-HSDP 2x2", "1-compiled DDP 3", "1-FSDP2 x TP 2x2", "1-FSDP1 hybrid 2x2", "1-TP 2")
def test_every_mesh_that_shares(layout: str, hosts: int, checkpoints: list[tuple[str, str]]) -> None:
    world = meshes.LAYOUTS[layout][0]
    for rank, (problems, received) in enumerate(pool.run(world, share_trials.load_meshes, layout, checkpoints, hosts)):
        assert not any(problems), f"rank {rank} of {layout}"
        assert all(received), f"rank {rank} of {layout} got nothing from others"


@pytest.mark.parametrize(("world", "hosts"), [(4, 1), (4, 2), (3, 2), (4, 4), (2, 1)])
@pytest.mark.fast_cases("2-1")
def test_a_ddp_state_is_read_once(world: int, hosts: int, saved: Path) -> None:
    sizes = pool.run(world, share_trials.load_big, str(saved), {}, hosts)
    needed = sizes[0]["needed"]
    assert sum(s["read"] for s in sizes) <= 1.05 * needed
    assert all(s["needed"] == needed and not s["unverified"] for s in sizes)
    assert sum(s["received"] for s in sizes) == (world - 1) * needed
    readers = [s["read"] for s in sizes if s["read"]]
    assert max(readers) - min(readers) < 9 << 20, "balanced, but for a block"


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.fast_cases("1")
def test_a_default_device_of_the_user_is_not_where_windows_lie(hosts: int, saved: Path) -> None:
    assert all(s["received"] for s in pool.run(4, share_trials.load_big, str(saved), {}, hosts, 1 << 16, "meta"))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_in_many_windows(hosts: int, saved: Path) -> None:
    sizes = pool.run(4, share_trials.load_big, str(saved), {}, hosts, 1 << 16)
    assert sum(s["read"] for s in sizes) <= 1.05 * sizes[0]["needed"]
    # Blocks that are cut for this test alone cannot be checked: as many on every rank, as all want all of them.
    assert len({s["unverified"] for s in sizes}) == 1 and sizes[0]["unverified"]


def test_switched_off_or_not_worth_it(saved: Path) -> None:
    for size in pool.run(2, share_trials.load_big, str(saved), {"share": "off"}):
        assert size["received"] == 0 and size["read"] >= size["needed"]
    with pytest.raises(ValueError, match='share=.*: give "auto" or "off"'):
        holdfast.load(saved, {}, share="on")  # type: ignore[arg-type]
    for size in pool.run(4, share_trials.load_sharded, str(saved)):
        assert size["received"] == 0 and size["read"] < 1.05 * size["needed"]


def test_pages_that_every_machine_has_are_not_passed_on(saved: Path) -> None:
    for size in pool.run(2, share_trials.load_big, str(saved), {}, 2, None, "cpu", (0, 1)):
        assert not size["received"] and size["read"] >= size["needed"]
    assert all(size["received"] for size in pool.run(2, share_trials.load_big, str(saved), {}, 2, None, "cpu", (0,)))


@pytest.mark.slow
def test_numbers_that_a_map_adds_lie_in_no_cache_and_in_no_file(saved: Path) -> None:
    for warm in (), (0, 1):
        sizes = pool.run(2, share_trials.load_with_numbers, str(saved), warm)
        assert all(bool(size["received"]) == (not warm) for size in sizes)


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"cast": True}, {"missing": "keep"}, {"only": ["plain", "hybrid"]}, {"verify": "blocks"}, {"verify": False},
    ],
    ids=repr,
)  # fmt: skip
def test_all_kinds_of_leaves(options: dict[str, Any], hosts: int, tmp_path: Path) -> None:
    pool.run(4, share_trials.save_mixed, str(tmp_path / "c"))
    for size in pool.run(4, share_trials.load_mixed, str(tmp_path / "c"), hosts, options):
        assert size["received"]


@pytest.mark.slow
def test_a_checkpoint_of_another_library() -> None:
    for name in ("dcp_ddp_2r", "dcp_fsdp2_4r"):
        sizes = pool.run(3, share_trials.load_foreign, str(make.HERE / name / "ckpt"))
        assert sum(s["received"] for s in sizes) == 2 * sizes[0]["needed"]


def test_from_a_store(tmp_path: Path) -> None:
    pool.run(1, share_trials.save_big, str(tmp_path / "c"))
    sizes = pool.run(3, share_trials.load_from_store, str(tmp_path))
    assert sum(s["read"] for s in sizes) <= 1.05 * sizes[0]["needed"] and all(s["received"] for s in sizes)


@pytest.mark.parametrize("hosts", [1, 2])
def test_damage_is_found_by_one_and_told_to_all(hosts: int, tmp_path: Path) -> None:
    pool.run(4, share_trials.save_big, str(tmp_path / "c"))
    file = sorted((tmp_path / "c").rglob("*.safetensors"))[2]
    with file.open("r+b") as data:
        data.seek(-5, 2)
        data.write(b"\xff\xfe\xfd")
    errors = pool.attempt(4, share_trials.load_big, str(tmp_path / "c"), {}, hosts)
    assert len({error.text for error in errors}) == 1 and "Damaged" in errors[0].kinds
    assert file.name in errors[0].text and "is altered" in errors[0].text and "in model/b[" in errors[0].text
    assert errors[0].text.count("; the state may be filled in part: load again before you use it") == 1


@pytest.mark.parametrize("hosts", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("how", "kind", "says"),
    [
        ("cannot read", "StorageError", "it is broken"), ("cannot copy", "HoldfastError", "out of memory"),
        ("interrupted", "HoldfastError", "KeyboardInterrupt"),
        ("interrupted while waiting", "HoldfastError", "KeyboardInterrupt"),
    ],
)  # fmt: skip
@pytest.mark.slow_cases(
    "cannot read-StorageError-it is broken-2",
    "cannot copy-HoldfastError-out of memory-2",
    "interrupted-HoldfastError-KeyboardInterrupt-2",
    "interrupted while waiting-HoldfastError-KeyboardInterrupt-1",
)
def test_a_rank_that_fails_stops_all(how: str, kind: str, says: str, hosts: int, saved: Path) -> None:
    found = pool.run(4, share_trials.load_failing, str(saved), how, 1, hosts, 60.0)
    told = {(name, text) for rank, (name, text, _) in enumerate(found) if rank != 1}
    assert len(told) == 1
    ((name, text),) = told
    assert name == kind and says in text and "rank 1" in text
    assert found[1][0] == (kind if "interrupted" not in how else "KeyboardInterrupt")
    # The group is whole: the next load shares again.
    assert all(s["received"] for s in pool.run(4, share_trials.load_big, str(saved), {}, hosts))


def test_a_connection_that_breaks_ends_the_load_on_all(saved: Path) -> None:
    found = pool.run(4, share_trials.load_failing, str(saved), "leaves", 1, 1, 60.0)
    assert len({(name, text) for name, text, _ in found}) == 1
    assert found[0][0] == "StorageError" and "lost the ranks" in found[0][1] and 'share="off"' in found[0][1]


@pytest.mark.parametrize("what", ["memory", "gloo"])
@pytest.mark.fast_cases("memory")
def test_ranks_that_cannot_connect_read_by_themselves(what: str, saved: Path) -> None:
    for size in pool.run(4, share_trials.load_unconnected, str(saved), what):
        assert size["received"] == 0 and size["read"] >= size["needed"]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "hosts"), [("killed", 1), ("killed while copying", 3)])
def test_a_rank_that_is_killed_is_named(how: str, hosts: int, saved: Path) -> None:
    pool.run(3, share_trials.load_big, str(saved), {})  # all is imported: the deadline is for the kill alone
    found = pool.attempt(3, share_trials.load_failing, str(saved), how, 1, hosts, 5.0)
    pool.close(3)
    assert isinstance(found[1], pool.RemoteError) and found[1].kinds == ["Killed"]
    for rank in (0, 2):
        name, text, _ = found[rank]
        assert name == "RankLost" and "rank 1" in text, f"rank {rank}"
