"""Saves that fail: the same verdict on every rank, nothing committed, the one before whole, training goes on."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import holdfast
from holdfast import dcp
from holdfast.storage.local import large
from holdfast.write import file_writer
from tests import pool
from tests.patience import wait_until
from tests.rights import OPEN


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((4096, 64), float(step)), "b": torch.full((3,), float(step))}, "step": step}


def _is_whole(path: str | Path, step: int) -> None:
    checkpoint = holdfast.open(path)
    checkpoint.verify()
    state = checkpoint.state_dict()
    assert state["step"] == checkpoint.step == step
    assert (state["model"]["w"] == step).all() and (state["model"]["b"] == step).all()


def save_step(path: str, step: int, overwrite: bool = False) -> str:
    return str(holdfast.save(_state(step), path, overwrite=overwrite).manifest.save)


def _same_on_all(errors: list[Any], *kinds: str) -> pool.RemoteError:
    assert all(isinstance(e, pool.RemoteError) for e in errors), errors
    assert {"SaveFailed", "HoldfastError", "RuntimeError", *kinds} <= set(errors[0].kinds), errors[0].kinds
    for error in errors[1:]:
        assert (error.kinds, error.text, error.fields) == (errors[0].kinds, errors[0].text, errors[0].fields)
    return errors[0]


# The five silent failures of torch's distributed checkpoint


def different_objects(path: str) -> None:
    holdfast.save({"config": {"name": f"run {_rank()}", "common": 1}, "step": 1}, path)


def test_dcp_1_ranks_save_different_objects_under_one_key(tmp_path: Path) -> None:
    error = _same_on_all(pool.attempt(3, different_objects, str(tmp_path / "c")), "Mismatch", "ValueError")
    assert 'config/name differs between ranks: "run 0" on rank 0, "run 1" on rank 1' in error.text
    assert "PerRank" in error.text and not (tmp_path / "c").exists()


def different_fields(path: str) -> None:
    state = {"config": {f"field {_rank()}": _rank()}, **({"step": 3, "list": [1, "a"]} if _rank() else {})}
    for _ in range(2):  # the second time the ranks know each other's layouts
        holdfast.save(state, path, overwrite=True)
    into = {"config": {f"field {_rank()}": -1}, **({"step": 0, "list": [0, ""]} if _rank() else {})}
    holdfast.load(path, into)
    assert into["config"] == {"field 0": 0, "field 1": 1} and into.get("step") == (3 if _rank() else None)


def test_what_a_rank_lacks_contradicts_nobody(tmp_path: Path) -> None:
    pool.run(2, different_fields, str(tmp_path / "c"))
    assert holdfast.open(tmp_path / "c").values["list"] == [1, "a"]


def different_lengths(path: str) -> None:
    holdfast.save({"config": {"list": [{"a": 1}, {"a": 2}, 3][: 2 + _rank()]}}, path)


def test_a_list_is_as_long_on_every_rank(tmp_path: Path) -> None:
    error = _same_on_all(pool.attempt(2, different_lengths, str(tmp_path / "c")), "Mismatch")
    assert "config/list differs between ranks: 2 values on rank 0, 3 on rank 1" in error.text


def first_rank_alone(path: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    assert bool(weights) == (_rank() == 0)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=path)


def test_a_state_that_the_first_rank_has_alone(tmp_path: Path) -> None:
    """What torch's full_state_dict leaves on the others is an empty dict."""
    pool.run(2, first_rank_alone, str(tmp_path / "c"))
    state = holdfast.open(tmp_path / "c").state_dict()
    assert set(state["model"]) == {"weight", "bias"} and state["optim"]["param_groups"][0]["lr"] == 0.001
    assert set(state["optim"]["state"]["weight"]) == {"step", "exp_avg", "exp_avg_sq"}


def fill_disk(path: str, unreserved: bool) -> None:
    reserve = large._reserve
    if unreserved:
        large._reserve = lambda fd, nbytes, path: None  # so that the disk runs full under the writing threads
    try:
        holdfast.save({"model": {"w": torch.ones(4 << 20)}, "step": 2}, path)
    finally:
        large._reserve = reserve


def test_a_save_lets_go_of_the_state_at_once(tmp_path: Path) -> None:
    """Not when garbage is collected: until then the memory of a whole state would be held."""
    gc.disable()
    try:
        for number, options in enumerate([{}, {"check_replicas": True}, {"degraded": True}, {"overwrite": True}]):
            tensor = torch.zeros(100, 100)
            state, living = {"model": {"w": tensor}}, weakref.ref(tensor)
            holdfast.save(state, tmp_path / str(number % 3), **options)
            del state, tensor
            assert living() is None, options
    finally:
        gc.enable()


@pytest.mark.parametrize("unreserved", [False, True], ids=["when reserving", "in a writing thread"])
def test_dcp_2_full_disk(unreserved: bool, small_disk: Path) -> None:
    pool.run(2, save_step, str(small_disk / "one"), 1)
    error = _same_on_all(pool.attempt(2, fill_disk, str(small_disk / "two"), unreserved), "StorageError", "OSError")
    assert "the disk is full" in error.text and error.fields["errno"] == errno.ENOSPC
    assert error.fields["phase"] == "write" and ".safetensors" in error.fields["file"]
    assert not (small_disk / "two").exists(), "a failed save leaves nothing behind"
    _is_whole(small_disk / "one", 1)
    pool.run(2, save_step, str(small_disk / "three"), 3)
    _is_whole(small_disk / "three", 3)


def fail_on_rank_1(path: str) -> None:
    if _rank() == 1:
        original = file_writer._write

        def broken(*args: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        file_writer._write = broken
        try:
            save_step(path, 2, True)
        finally:
            file_writer._write = original
    else:
        save_step(path, 2, True)


def test_dcp_3_failed_overwrite_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    pool.run(2, save_step, path, 1)
    before = {p: p.read_bytes() for p in (tmp_path / "c").rglob("*") if p.is_file()}
    error = _same_on_all(pool.attempt(2, fail_on_rank_1, path), "StorageError")
    assert error.fields["rank"] == 1 and error.fields["errno"] == errno.EIO
    assert {p: p.read_bytes() for p in (tmp_path / "c").rglob("*") if p.is_file()} == before
    _is_whole(path, 1)
    pool.run(2, save_step, path, 2, True)
    _is_whole(path, 2)
    assert len(list((tmp_path / "c").rglob("*.safetensors"))) == 2, "the old files are gone"


def hang_on_rank_2(path: str) -> str:
    if _rank() == 2:
        try:
            holdfast.save({"x": holdfast.PerRank(Sleepy(path))}, path, deadline=4)
        except holdfast.SaveFailed as error:
            return str(error)
        return "saved"
    try:
        holdfast.save({"x": holdfast.PerRank(1)}, path, deadline=4)
    except holdfast.SaveFailed as error:
        Path(f"{path}-{_rank()}").touch()
        assert isinstance(error, TimeoutError) and error.rank == 2 and error.phase == "plan"
        return str(error)
    return "saved"


class Sleepy:
    """Its state comes once the other two ranks have given up."""

    def __init__(self, path: str) -> None:
        self.path = path

    def state_dict(self) -> dict[str, int]:
        wait_until(lambda: all(Path(f"{self.path}-{rank}").exists() for rank in range(2)))
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.slow
def test_dcp_4_a_hanging_rank_is_named(tmp_path: Path) -> None:
    pool.run(3, save_step, str(tmp_path / "zero"), 0)
    texts = pool.run(3, hang_on_rank_2, str(tmp_path / "one"))
    assert texts[0] == texts[1] == texts[2], "the late rank reads the verdict that the others reached without it"
    assert "rank 2" in texts[0] and "never came to phase 'plan'" in texts[0] and os.uname().nodename in texts[0]
    assert not (tmp_path / "one").exists()
    pool.run(3, save_step, str(tmp_path / "two"), 2)
    _is_whole(tmp_path / "two", 2)


def test_dcp_5_no_silent_cast_and_no_ignored_keys(tmp_path: Path) -> None:
    holdfast.save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "c")
    half = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        holdfast.load(tmp_path / "c", {"a": half})
    assert "a: saved as float32, here bfloat16" in str(caught.value)
    assert "1 in the checkpoint that nothing asks for" in str(caught.value) and "\n    b" in str(caught.value)
    assert (half == 0).all()


# Bad input


def test_a_path_that_is_taken(tmp_path: Path) -> None:
    holdfast.save(_state(1), tmp_path / "c")
    with pytest.raises(holdfast.SaveFailed, match="already holds a committed checkpoint.*overwrite=True") as caught:
        holdfast.save(_state(2), tmp_path / "c")
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.EEXIST
    _is_whole(tmp_path / "c", 1)


def test_a_path_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    (tmp_path / "mine" / "figures").mkdir()
    (tmp_path / "file").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(holdfast.SaveFailed, match=r"holds other files \(thesis.tex\)"):
            holdfast.save(_state(1), tmp_path / "mine", overwrite=overwrite)
        with pytest.raises(holdfast.SaveFailed, match="is a file"):
            holdfast.save(_state(1), tmp_path / "file", overwrite=overwrite)
        with pytest.raises(holdfast.SaveFailed, match="part of the path is a file"):
            holdfast.save(_state(1), tmp_path / "file" / "c", overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "mine" / "figures").is_dir(), "not even an empty folder is taken away"


def test_no_permission() -> None:
    with tempfile.TemporaryDirectory(dir=OPEN) as folder:
        holdfast.save(_state(1), Path(folder, "before"))
        Path(folder).chmod(0o555)
        libc = ctypes.CDLL(None)
        try:
            libc.setfsuid(65534)  # root may write anywhere: look at files with somebody else's eyes
            with pytest.raises(holdfast.SaveFailed, match="check the owner and mode") as caught:
                holdfast.save(_state(1), Path(folder, "c"))
        finally:
            libc.setfsuid(os.geteuid())
            Path(folder).chmod(0o755)
        assert isinstance(caught.value, OSError) and caught.value.errno == errno.EACCES


def test_a_url(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ftp"):
        holdfast.save(_state(1), "ftp://bucket/run")


def different_states(path: str) -> None:
    shape = (4,) if _rank() == 0 else (5,)
    holdfast.save({"model": {"w": torch.ones(shape)}}, path)


def test_ranks_with_different_tensors(tmp_path: Path) -> None:
    error = _same_on_all(pool.attempt(2, different_states, str(tmp_path / "c")), "Mismatch")
    assert "model/w is float32 [4] on rank 0 and float32 [5] on rank 1" in error.text


def different_steps(root: str) -> None:
    holdfast.save(_state(1), f"{root}/{_rank()}")


def test_ranks_with_different_paths(tmp_path: Path) -> None:
    error = _same_on_all(pool.attempt(2, different_steps, str(tmp_path)), "Mismatch")
    assert "the ranks do different things" in error.text and f"{tmp_path}/1" in error.text


def one_rank_raises(path: str) -> str:
    state = _state(5)
    if _rank() == 1:
        state["f"] = lambda: None
    else:
        state["f"] = 1
    try:
        holdfast.save(state, path)
    except TypeError as error:
        assert isinstance(error, holdfast.SaveFailed)
        return str(error)
    return "saved"


def test_a_function_on_one_rank(tmp_path: Path) -> None:
    texts = pool.run(2, one_rank_raises, str(tmp_path / "c"))
    assert texts[0] == texts[1] and "rank 1" in texts[0] and "f: builtins.function is code" in texts[0]


# What a save does when it goes well


def many_saves(root: str) -> list[int]:
    from holdfast.ranks.ranks import ranks_of

    store = ranks_of().store
    sizes = []
    state = _state(0)
    for step in range(12):
        holdfast.save(state, f"{root}/{step}", step=step)
        dist.barrier()  # until all have read the last verdict
        sizes.append(store.underlying_store.num_keys())
        dist.barrier()  # before any begins the next save
    return sizes


def test_store_does_not_grow_with_saves(tmp_path: Path) -> None:
    sizes = pool.run(2, many_saves, str(tmp_path))[0]
    assert sizes[-1] <= sizes[3] + 2


def test_leavings_of_a_dead_save_do_not_block_the_path(tmp_path: Path) -> None:
    holdfast.save(_state(1), tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    holdfast.save(_state(2), tmp_path / "c")
    _is_whole(tmp_path / "c", 2)
    assert len(list((tmp_path / "c").rglob("*.safetensors"))) == 1


def test_overwrite_of_a_damaged_checkpoint(tmp_path: Path) -> None:
    holdfast.save(_state(1), tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_bytes(b'{"format":"holdfast","version":1')
    with pytest.raises(holdfast.errors.Damaged):
        holdfast.open(tmp_path / "c")
    holdfast.save(_state(2), tmp_path / "c", overwrite=True)
    _is_whole(tmp_path / "c", 2)


def test_on_a_file_system_without_direct_io(small_disk: Path) -> None:
    holdfast.save(_state(3), small_disk / "c")
    _is_whole(small_disk / "c", 3)


def test_events_tell_progress(tmp_path: Path) -> None:
    seen: list[holdfast.events.Event] = []
    with holdfast.events.listen(seen.append):
        holdfast.save(_state(1), tmp_path / "c")
        holdfast.load(tmp_path / "c", _state(0))
    kinds = [(e.task, e.kind) for e in seen if e.kind != "phase"]
    assert kinds[0] == ("save", "start") and ("save", "end") in kinds and kinds[-1] == ("load", "end")
    last = [e for e in seen if e.task == "load"][-1]
    assert last.done == last.total == 4096 * 64 * 4 + 12


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A state of 600 MB through a ring of windows: resident memory rises by far less than the state."""
    state = {"w": torch.ones(150_000_000)}
    torch.ones(1)
    Path("/proc/self/clear_refs").write_text("5")

    def peak() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("VmHWM:")[1].split()[0]) * 1024

    before = peak()
    holdfast.save(state, tmp_path / "c")
    assert peak() - before <= 256 << 20
    into = {"w": torch.zeros(150_000_000)}
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    holdfast.load(tmp_path / "c", into)
    assert peak() - before <= 256 << 20
    assert torch.equal(into["w"], state["w"])


COLLECTIVES = ["all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier"]


def without_collectives(path: str) -> int:
    """Save and load while every collective of torch is broken, as in a group that has no backend for the CPU."""

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a collective was used")

    kept = {name: getattr(dist, name) for name in COLLECTIVES}
    for name in COLLECTIVES:
        setattr(dist, name, broken)
    try:
        holdfast.save({**_state(4), "rng": holdfast.RNG()}, path)
        into = {**_state(0), "rng": holdfast.RNG()}
        holdfast.load(path, into)
        return int(into["step"])
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def test_no_collective_is_used(tmp_path: Path) -> None:
    assert pool.run(3, without_collectives, str(tmp_path / "c")) == [4, 4, 4]


def phases_of_saves(root: str) -> list[list[str]]:
    from holdfast.ranks.ranks import Call

    meet, seen = Call.exchange, []

    def recorded(self: Call, phase: str, *args: Any) -> Any:
        seen[-1].append(phase)
        return meet(self, phase, *args)

    Call.exchange = recorded  # type: ignore[method-assign]
    try:
        for step, rows in enumerate((4, 4, 5, 4, 5)):
            seen.append([])
            holdfast.save({"w": holdfast.Shard(torch.ones(rows), (2 * rows,), (_rank() * rows,))}, f"{root}/{step}")
    finally:
        Call.exchange = meet  # type: ignore[method-assign]
    return seen


def test_a_known_layout_is_not_told_again(tmp_path: Path) -> None:
    for seen in pool.run(2, phases_of_saves, str(tmp_path)):
        assert [len(phases) for phases in seen] == [3, 2, 3, 2, 2], seen
        assert seen[0] == ["plan", "layout", "write"] and seen[1] == ["plan", "write"]


def interrupted_while_waiting(path: str) -> str:
    from holdfast.ranks.ranks import Call
    from holdfast.ranks.rounds import Round

    meet, look, phases = Call.exchange, Round._look, []

    def noted(self: Call, phase: str, *rest: Any) -> Any:
        phases.append(phase)
        return meet(self, phase, *rest)

    def interrupted(self: Round, node: Any) -> Any:
        if phases[-1] == "write" and _rank() == 1:
            raise KeyboardInterrupt
        return look(self, node)

    Call.exchange, Round._look = noted, interrupted  # type: ignore[method-assign]
    try:
        return save_step(path, 3)
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        Call.exchange, Round._look = meet, look  # type: ignore[method-assign]


def test_an_interrupt_after_the_report_takes_nothing_away(tmp_path: Path) -> None:
    """Rank 1 has told that its files are durable; whatever happens to it then, the first rank may commit them."""
    results = pool.run(2, interrupted_while_waiting, str(tmp_path / "c"))
    pool.close(2)  # that rank has missed a verdict on purpose
    assert results[1] == "interrupted" and results[0] != "interrupted"
    _is_whole(tmp_path / "c", 3)


def test_old_layouts_and_plans_are_forgotten(tmp_path: Path) -> None:
    from holdfast.ranks.ranks import ranks_of

    for step in range(20):
        holdfast.save({"growing": {str(i): torch.ones(2) for i in range(step)}}, tmp_path / str(step))
    memory = ranks_of().remembered["save"]
    assert len(memory.plans) <= 8 and len(memory.layouts) <= 8
